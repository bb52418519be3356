"""`--load-format`: what is chosen, pickled files, random values; and what loading holds."""

from __future__ import annotations

import gc
import json
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_files import write_model
from paged_run import load, serve
from quire.attention.paged import PagedAttention
from quire.config import ModelConfig
from quire.config.shape import ModelShape
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.dispatch import ops
from quire.models.families.llama import LlamaForCausalLM
from quire.models.registry import load_model
from quire.weights import loader
from quire.weights.count import count_weights, estimated_weights
from quire.weights.dummy import TINY, random_checkpoint, random_tensors
from quire.weights.files import SafetensorsCheckpoint
from quire.weights.formats import open_checkpoint
from quire.weights.torch_files import INDEX, TorchCheckpoint

PROMPT = [[1, 2, 3, 4, 5]]


def logits(folder: Path, load_format: str = "auto") -> torch.Tensor:
    shape = ModelShape.from_folder(folder)
    model = load_model(shape, folder, "float32", "cpu", load_format=load_format)
    return serve(model, PROMPT, random.Random(0))[0]


def as_bin(folder: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """Put the weights of a tiny checkpoint into pickled files."""
    random_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    tensors = random_tensors(TINY, 0)
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i}.bin"
        part = {name: tensors[name] for name in names[i::shards]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not legacy)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"legacy": True}], ids=str)
def test_pickled_files_give_the_same_model(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = as_bin(tmp_path / "bin", **options)
    expected = logits(random_checkpoint(tmp_path / "plain"))
    assert torch.equal(logits(folder, "pt"), expected)


def test_pickled_files_are_read_only_when_asked_for(tmp_path: Path) -> None:
    folder = as_bin(tmp_path)
    with pytest.raises(ModelLoadError, match="pytorch_model.bin: see --load-format"):
        logits(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("evil",))


def test_code_in_a_pickled_file_does_not_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    random_checkpoint(tmp_path)
    for legacy in (False, True):
        torch.save({"x": Evil()}, "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ModelLoadError, match="quire runs no code from a checkpoint"):
            logits(tmp_path, "pt")
    assert not Path("evil").exists()
    os.mkdir("evil")
    with pytest.raises(FileExistsError):
        torch.load("pytorch_model.bin", weights_only=False)  # the file does try


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04" + bytes(50)])
def test_a_broken_pickled_file_is_named(tmp_path: Path, content: bytes) -> None:
    random_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match="pytorch_model.bin"):
        TorchCheckpoint(tmp_path)


def test_a_pickled_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="must hold a dictionary of tensors"):
        TorchCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"has no \*.bin"):
        TorchCheckpoint(tmp_path)


def test_auto_takes_safetensors_before_gguf(tmp_path: Path) -> None:
    random_checkpoint(tmp_path)
    write_model(tmp_path / "m.gguf", {**TINY, "tie_word_embeddings": True})
    with open_checkpoint(tmp_path) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
    (tmp_path / "model.safetensors").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert not isinstance(checkpoint, SafetensorsCheckpoint)
    with pytest.raises(ModelLoadError, match=r"has no \*.safetensors \(but m.gguf"):
        open_checkpoint(tmp_path, "safetensors")


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="--load-format must be one of auto, safetensors, gguf"):
        ModelConfig(load_format="npz")


def test_dummy_values_need_no_files_and_are_always_the_same(tmp_path: Path) -> None:
    random_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first = logits(tmp_path, "dummy")
    assert torch.equal(first, logits(tmp_path, "dummy"))
    assert first.isfinite().all() and first.std() > 0.01
    shape = ModelShape.from_folder(tmp_path)
    exact = load_model(shape, tmp_path, "float32", "cpu", load_format="dummy").num_parameters
    assert exact == pytest.approx(estimated_weights(shape), rel=0.05)
    assert count_weights(tmp_path, "dummy", shape) == estimated_weights(shape)


def test_weights_are_counted_from_headers(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, shards=2)
    shape = ModelShape.from_folder(folder)
    assert count_weights(folder, "auto", shape) == load(folder).num_parameters


def test_the_report_comes_before_any_data_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = random_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda *_: pytest.fail("data was read"))
    with pytest.raises(ModelLoadError, match="missing: model.layers.2"):
        load(folder)


@pytest.mark.parametrize("shards", [1, 4])
def test_loading_holds_one_parameter_beside_the_model(
    tmp_path: Path, monkeypatch: Any, shards: int
) -> None:
    """The stated bound: the parts of one parameter, whatever the order of the files."""
    alive: set[int] = set()
    most: list[int] = []
    read = SafetensorsCheckpoint.read

    def counted(self: SafetensorsCheckpoint, name: str) -> torch.Tensor:
        gc.collect()
        tensor = read(self, name).clone()
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        most.append(len(alive))
        return tensor

    class Dropping:
        """A target that keeps nothing."""

        def __init__(self, parameter: Any) -> None:
            self.shape, self.parts = parameter.shape, parameter.parts
            self.dtype = self.stored = self.load_parts = self.kept = self.bundle = None
            self.optional = parameter.optional

        def load(self, tensor: torch.Tensor) -> None:
            pass

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    folder = random_checkpoint(tmp_path, shards=shards)
    shape = ModelShape.from_folder(folder)
    model = LlamaForCausalLM(shape, torch.float32, "cpu", PagedAttention(ops))
    targets = {name: Dropping(p) for name, p in model.parameters().items()}
    most.clear()
    loader.load_weights(folder, targets, model.name_rules(), torch.float32, "cpu")
    assert max(most) == 3, "queries, keys and values of one layer"
