"""Weights in memory that outlives the process that packed them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import ModelConfig
from quire.kernels import compiled, dispatch
from quire.kernels.pages import weight_memory
from quire.models.base import CausalLM
from quire.models.registry import load_model
from quire.utils import memory_file
from quire.weights import kept, loader
from quire.weights.dummy import TINY, random_checkpoint
from quire.weights.kept import KeptWeights

pytestmark = [
    pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only"),
]
MANY = {"vocab_size": 30011, "hidden_size": 64, "num_hidden_layers": 3, "attention_bias": True}
"""Its embedding is larger than what is kept as a copy."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = memory_file.create("test")
    assert made is not None
    yield made
    os.close(made)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path, MANY)


def load(folder: Path, **options: Any) -> CausalLM:
    shape = ModelConfig(str(folder)).read_shape()
    return load_model(shape, folder, device="cpu", ops=dispatch.choose("native"), **options)


def load_kept(
    monkeypatch: pytest.MonkeyPatch, memory: KeptWeights, folder: Path, **options: Any
) -> CausalLM:
    monkeypatch.setattr(kept, "_here", memory)
    model = load(folder, **options)
    memory.finish()
    return model


def tensors(model: Any) -> list[torch.Tensor]:
    """All that the layers have made of their parameters, in order."""
    found = []
    for _, module in model.modules():
        for value in (*vars(module).values(), getattr(module, "method", None)):
            packed = getattr(value, "_prepared", value)
            coded = getattr(packed, "tensors", None) or {}
            own = (getattr(packed, "memory", None), getattr(packed, "bias", None))
            for part in (packed, *own, *coded.values()):
                if isinstance(part, torch.Tensor):
                    found.append(part)
    return found


def equal(one: Any, other: Any) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(loader, "open_checkpoint", refuse)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_next_process_reads_nothing(
    monkeypatch, descriptor, tmp_path, tied, quantization
) -> None:
    folder = random_checkpoint(tmp_path, {**MANY, "tie_word_embeddings": tied})
    how = {"quantization": quantization}
    plain = load(folder, **how)
    first = load_kept(monkeypatch, KeptWeights(descriptor), folder, **how)
    assert memory_file.is_sealed(descriptor)
    no_reading(monkeypatch)
    second = load_kept(monkeypatch, KeptWeights(descriptor), folder, **how)
    assert len(tensors(plain)) > 20
    assert equal(plain, first) and equal(plain, second)
    assert first.num_parameters == second.num_parameters == plain.num_parameters


def test_it_takes_no_more_than_the_weights(monkeypatch, descriptor, folder) -> None:
    model = load_kept(monkeypatch, KeptWeights(descriptor), folder)
    packed = sum(t.nbytes for t in tensors(model))
    assert packed > 16 << 20
    assert os.fstat(descriptor).st_size <= packed + 2 * memory_file.LARGE_PAGE
    assert KeptWeights(descriptor).size == os.fstat(descriptor).st_size


def test_nothing_is_mapped_twice(monkeypatch, descriptor, tmp_path) -> None:
    """Not even in the process that packs: what it holds would be counted double. Several slabs."""
    folder = random_checkpoint(tmp_path, {**MANY, "hidden_size": 1024, "head_dim": 256})
    load_kept(monkeypatch, KeptWeights(descriptor), folder)
    inode = os.fstat(descriptor).st_ino
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[4] == str(inode)]
    sizes = [int(end, 16) - int(begin, 16) for begin, end in ranges]
    assert len(sizes) > 1 and sum(sizes) == os.fstat(descriptor).st_size


def test_what_is_not_sealed_is_not_used(monkeypatch, descriptor, folder) -> None:
    monkeypatch.setattr(kept, "_here", half := KeptWeights(descriptor))
    load(folder)  # and it dies before `finish`
    assert os.fstat(descriptor).st_size > 0 and not memory_file.is_sealed(descriptor)
    assert half.size == KeptWeights(descriptor).size == 0


def test_another_model_is_read(monkeypatch, descriptor, folder, tmp_path) -> None:
    load_kept(monkeypatch, KeptWeights(descriptor), folder)
    random_checkpoint(folder, {**MANY, "num_hidden_layers": 2}, seed=1)
    other = load(folder)
    assert equal(other, load_kept(monkeypatch, KeptWeights(descriptor), folder))


def test_another_way_to_keep_them_is_another_model(monkeypatch, descriptor, folder) -> None:
    load_kept(monkeypatch, KeptWeights(descriptor), folder, quantization="int8")
    plain = load(folder)
    assert equal(plain, load_kept(monkeypatch, KeptWeights(descriptor), folder))


def test_another_version_is_not_trusted(monkeypatch, descriptor, folder) -> None:
    load_kept(monkeypatch, KeptWeights(descriptor), folder)
    monkeypatch.setattr(kept, "__version__", "0.0.1")
    with pytest.raises(ValueError, match="another version"):
        KeptWeights(descriptor)
    kept.open_kept(descriptor)  # says so, and goes on without


def test_without_memory_it_loads_as_ever(monkeypatch, descriptor, folder) -> None:
    memory = KeptWeights(descriptor)

    def full(*_: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(os, "ftruncate", full)
    assert equal(load(folder), load_kept(monkeypatch, memory, folder))
    assert not memory_file.is_sealed(descriptor) and not weight_memory.is_kept


def test_small_pages_are_not_taken_for_large_ones(monkeypatch, descriptor, folder) -> None:
    """Where only private memory lies on large pages, weights stay private: steps come first."""
    monkeypatch.setattr(memory_file, "take_large_pages", lambda *_: False)
    monkeypatch.setattr(memory_file, "private_memory_has_large_pages", lambda: True)
    load_kept(monkeypatch, KeptWeights(descriptor), folder)
    assert not memory_file.is_sealed(descriptor)


def test_kernels_that_pack_nothing_keep_nothing(monkeypatch, descriptor, folder) -> None:
    monkeypatch.setattr(kept, "_here", memory := KeptWeights(descriptor))
    shape = ModelConfig(str(folder)).read_shape()
    load_model(shape, folder, device="cpu", ops=dispatch.choose("reference"))
    memory.finish()
    second = KeptWeights(descriptor)
    monkeypatch.setattr(kept, "_here", second)
    model = load_model(shape, folder, device="cpu", ops=dispatch.choose("reference"))
    assert model.num_parameters > 0


STRAY = """
import ctypes, sys
from quire.weights.kept import KeptWeights
from quire.weights import kept
from quire.config import ModelConfig
from quire.models.registry import load_model
from quire.kernels import dispatch
from pathlib import Path

descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
kept.open_kept(descriptor)
shape = ModelConfig(str(folder)).read_shape()
model = load_model(shape, folder, device="cpu", ops=dispatch.choose("native"))
kept.kept_weights().finish()
print("loaded", flush=True)
ctypes.memset(model._lm_head.prepared.memory.data_ptr(), 7, 1)
"""


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_stray_write_hits_nobody_else(monkeypatch, descriptor, folder, which) -> None:
    if which == "second":
        load_kept(monkeypatch, KeptWeights(descriptor), folder)
    command = [sys.executable, "-c", STRAY, str(descriptor), str(folder)]
    done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, check=False)
    assert b"loaded" in done.stdout, done.stderr
    assert done.returncode == -signal.SIGSEGV
    plain = load(folder)
    assert memory_file.is_sealed(descriptor)
    assert equal(plain, load_kept(monkeypatch, KeptWeights(descriptor), folder))


def test_tiny_models_too(monkeypatch, descriptor, tmp_path) -> None:
    folder = random_checkpoint(tmp_path, TINY)
    first = load_kept(monkeypatch, KeptWeights(descriptor), folder)
    no_reading(monkeypatch)
    assert equal(first, load_kept(monkeypatch, KeptWeights(descriptor), folder))
