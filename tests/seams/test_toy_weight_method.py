"""What a weight format takes: one class, one row. Here: int8 with a scale for each row."""

import json
import random
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.attention.kv_cache import allocate_kv_cache
from quire.config import ModelShape
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import ModelLoadError
from quire.kernels.attention_metadata import AttentionMetadata
from quire.layers.linear_method import PLAIN, WEIGHT_FORMATS, LinearMethod
from quire.layers.parameter import Parameter
from quire.models.registry import load_model
from quire.weights.dummy import random_checkpoint
from quire.weights.files import SINGLE

CONFIG = {"torch_dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048}

KEPT = ["lm_head", "model.layers.0.mlp.down_proj"]
"""Layers that the quantised checkpoint leaves as they are."""


# ---- the format: what a plug-in would bring ---------------------------------------------------


class ToyInt8(LinearMethod):
    """Keeps int8 and one scale per row, and makes the weight anew for each product."""

    def __init__(self, spec):
        super().__init__(spec)
        self._tensors = {}

    def parameters(self):
        rows, columns = self.spec.out_features, self.spec.in_features
        return {
            name: Parameter(
                (rows, width), partial(self._load, name), self.spec.stacked, dtype, stored
            )
            for name, width, dtype, stored in (
                ("weight", columns, torch.int8, frozenset({"I8"})),
                ("weight_scale", 1, torch.float32, None),
            )
        }

    def _load(self, name, tensor):
        self._tensors[name] = tensor.clone()

    def _plain(self):
        weight = (self._tensors["weight"] * self._tensors["weight_scale"]).to(self.spec.dtype)
        gated, leaves = self.spec.gated, self.spec.leaves
        return self.spec.ops.prepare_linear(weight, gated=gated, leaves=leaves)

    def apply(self, x, out_dtype=None, keep=None):
        return self.spec.ops.linear(x, self._plain(), out_dtype, keep)


class ToyFormat:
    """`modules_to_not_convert` names layers that stay as they are."""

    def __init__(self, config):
        self._kept = config.get("modules_to_not_convert", ())

    def linear_method(self, spec):
        return (PLAIN.linear_method if spec.name in self._kept else ToyInt8)(spec)


# ---- what it is held against ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(WEIGHT_FORMATS, "_rows", {})
    monkeypatch.setattr(WEIGHT_FORMATS, "_loaded", {})
    WEIGHT_FORMATS.register("toy_int8", ToyFormat)


def checkpoints(folder):
    """A quantised checkpoint, and the plain one that has its dequantised weights."""
    plain = random_checkpoint(folder / "plain", CONFIG)
    config = json.loads((plain / "config.json").read_text())
    dequantised, quantised = {}, {}
    for name, tensor in load_file(plain / SINGLE).items():
        if "_proj" not in name or name.startswith(KEPT[1]):
            dequantised[name] = quantised[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        q = (tensor.float() / scale).round().to(torch.int8)
        quantised |= {name: q, name.replace("weight", "weight_scale"): scale}
        dequantised[name] = (q * scale).to(tensor.dtype)
    save_file(dequantised, plain / SINGLE, {"format": "pt"})
    other = folder / "quantised"
    other.mkdir()
    save_file(quantised, other / SINGLE, {"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "toy_int8", "modules_to_not_convert": KEPT,
    }  # fmt: skip
    (other / "config.json").write_text(json.dumps(config))
    return plain, other


def load(folder):
    return load_model(ModelShape.from_folder(folder), folder, "auto", "cpu")


def logits(model, prompts):
    """Of every position, prompts in one batch."""
    lens = [len(prompt) for prompt in prompts]
    tables = [[3 * r + i for i in range(3)] for r in range(len(lens))]
    layers = model.kv_layers(model.shape)
    caches = allocate_kv_cache(layers, 3 * len(lens), 16, "bfloat16", "cpu")
    metadata = AttentionMetadata.build(lens, lens, tables, 16)
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = model.forward(ids, metadata.positions, caches, metadata)
    return model.compute_logits(hidden)


def test_logits_are_those_of_the_dequantised_model(tmp_path):
    plain, quantised = (load(folder) for folder in checkpoints(tmp_path))
    rng = random.Random(1)
    prompts = [[rng.randrange(2048) for _ in range(n)] for n in (1, 30, 45)]
    want, got = logits(plain, prompts), logits(quantised, prompts)
    assert torch.equal(want.view(torch.int32), got.view(torch.int32))
    kinds = {name: type(m.method) for name, m in quantised.modules() if hasattr(m, "method")}
    assert {name for name, kind in kinds.items() if kind is not ToyInt8} == set(KEPT)
    assert len(kinds) == 1 + 2 * 4, "four of each layer, some of them stacks"


def test_it_generates(tmp_path):
    plain, quantised = checkpoints(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    said = []
    for folder in (plain, quantised):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, folder / name)
        with LLM(str(folder), num_gpu_blocks_override=40) as llm:
            (output,) = llm.generate({"prompt_token_ids": [3, 1, 4]}, params, use_tqdm=False)
            said.append(output.outputs[0].token_ids)
    assert said[0] == said[1] and len(said[0]) == 8


def test_a_missing_scale_and_a_wrong_type_are_told(tmp_path):
    _, folder = checkpoints(tmp_path)
    tensors = load_file(folder / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].float()}, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' has type F32; .* reads I8"):
        load(folder)
    del tensors[name.replace("weight", "weight_scale")]
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="missing: model.layers.1.mlp.up_proj.weight_scale"):
        load(folder)


@pytest.mark.parametrize("said", [{"quant_method": "mine", "bits": 4}, {"bits": 4}])
def test_an_unknown_format_is_refused(said, tmp_path):
    folder = random_checkpoint(tmp_path, {"quantization_config": said})
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert caught.value.message == (
        f"the checkpoint is quantised ({said.get('quant_method', repr(said))}), which quire does "
        "not read: use a float32, bfloat16 or float16 one. It reads toy_int8"
    )


def test_a_format_that_is_no_object_is_refused(tmp_path):
    folder = random_checkpoint(tmp_path, {"quantization_config": ["awq"]})
    with pytest.raises(ModelLoadError, match="quantization_config must be an object, got"):
        load(folder)
