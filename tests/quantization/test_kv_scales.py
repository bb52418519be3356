"""Scales of keys and values out of checkpoints, in every spelling."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_run import load, serve
from quire.config.kv_dtypes import kept_layers
from quire.errors import ModelLoadError
from quire.weights.dummy import random_checkpoint
from quire.weights.files import SINGLE
from quire.weights.kv_scales import is_unused, our_names

KEYS, VALUES = 2.0**9, 2.0**11
AT = "model.layers.{}.self_attn."
SPELLINGS = {
    "plain": {"k_scale": KEYS, "v_scale": VALUES},
    "inner": {"attn.k_scale": KEYS, "attn.v_scale": VALUES},
    "projections": {"k_proj.k_scale": KEYS, "v_proj.v_scale": VALUES},
    "outputs": {"k_proj.output_scale": KEYS, "v_proj.output_scale": VALUES},
    "fused": {"qkv_proj.k_scale": KEYS, "qkv_proj.v_scale": VALUES},
    "caches": {"k_cache.scale": KEYS, "v_cache.scale": VALUES},
    "queries too": {"q_scale": 3.0, "prob_scale": 0.1, "k_scale": KEYS, "v_scale": VALUES},
    "heads": {"k_scale": [KEYS, KEYS / 4], "v_scale": [VALUES / 2, VALUES]},
}


def checkpoint(folder, scales=None, turned=False):
    """Keys and values far outside of float8, or with `turned` inside of it, and queries and outputs
    that make up for that: powers of two, so nothing is rounded otherwise."""
    random_checkpoint(folder, {"torch_dtype": "float32", "num_key_value_heads": 2})
    tensors = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        for part, by in (("k_proj", KEYS), ("v_proj", VALUES)):
            if f"{part}.weight" in name and not turned:
                tensor *= by
        for part, by in (("q_proj", KEYS), ("o_proj", VALUES)):
            if f"{part}.weight" in name:
                tensor.mul_(by if turned else 1)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for name, scale in (scales or {}).items():
            tensors[AT.format(layer) + name] = torch.as_tensor(scale).clone()
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


def logits(folder, kind="fp8"):
    """Of a prompt in pieces, keys and values kept in a type."""
    model = load(folder)
    layers = kept_layers(model.kv_layers(model.shape), "float32", kind)
    prompt, rng = [7, 3, 9, 30, 2] * 4, random.Random(1)
    return serve(model, [prompt], rng, chunk=lambda: 6, garbage=0, layers=layers)[0]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_they_are_what_keys_and_values_are_divided_by(spelling, tmp_path):
    got = logits(checkpoint(tmp_path / "a", SPELLINGS[spelling]))
    want = logits(checkpoint(tmp_path / "b", turned=True))
    assert torch.equal(got, want)
    without = logits(checkpoint(tmp_path / "c"))
    assert not torch.allclose(without, want, rtol=0.01), "the numbers are cut"


def test_one_for_both(tmp_path):
    both = {"k_scale": KEYS, "v_scale": KEYS}
    want = logits(checkpoint(tmp_path / "a", both))
    got = logits(checkpoint(tmp_path / "b", {"kv_scale": KEYS}))
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["auto", "int8_per_token_head"])
def test_other_types_have_no_use_for_them(kind, tmp_path):
    got = logits(checkpoint(tmp_path / "a", SPELLINGS["plain"]), kind)
    assert torch.equal(got, logits(checkpoint(tmp_path / "b"), kind))


def test_below_zero_stands_for_none(tmp_path):
    got = logits(checkpoint(tmp_path / "a", {"k_scale": -1.0, "v_scale": -1.0}))
    assert torch.equal(got, logits(checkpoint(tmp_path / "b")))


ZEROS = (
    "k_zero_point",
    "attn.v_zero_point",
    "k_proj.output_zero_point",
    "v_proj.output_zero_point",
)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bfloat16])
def test_zero_points_of_symmetric_scales_are_read_past(dtype, tmp_path):
    zeros = dict.fromkeys(("q_zero_point", "q_proj.output_zero_point"), torch.ones(1).to(dtype))
    zeros |= {"k_proj.output_zero_point": torch.zeros(1).to(dtype)}
    zeros |= {"v_zero_point": torch.zeros(2, 1, 1).to(dtype)}
    want = logits(checkpoint(tmp_path / "a", SPELLINGS["outputs"]))
    got = logits(checkpoint(tmp_path / "b", SPELLINGS["outputs"] | zeros))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("zero", [torch.tensor([3], dtype=torch.int8), torch.tensor([0.0, 1.0]),
                                  torch.tensor(torch.nan)])  # fmt: skip
def test_other_zero_points_are_refused_by_name(zero, name, tmp_path):
    folder = checkpoint(tmp_path, SPELLINGS["outputs"] | {name: zero})
    why = rf"layers\.\d\.self_attn\.{name}: zero points of the KV cache must be 0: .*symmetric"
    with pytest.raises(ModelLoadError, match=why):
        load(folder)


@pytest.mark.parametrize("scale", [0.0, torch.nan, torch.inf, [1.0, torch.nan]])
def test_what_is_no_scale_is_refused(scale, tmp_path):
    folder = checkpoint(tmp_path, {"k_scale": scale})
    with pytest.raises(
        ModelLoadError,
        match=r"layers\.\d\..*k_scale: scales of the KV cache must be finite numbers",
    ):
        load(folder)


def test_a_wrong_shape_is_refused(tmp_path):
    folder = checkpoint(tmp_path, {"v_scale": [1.0, 1.0, 1.0]})
    with pytest.raises(ModelLoadError, match="wrong shape"):
        load(folder)


def test_other_names_stay_what_they_are():
    for name in ("a.k_proj.weight_scale", "a.mlp.k_scale", "b.attn.k_scale", "scale",
                 "a.k_proj.weight_zero_point", "a.o_proj.output_zero_point"):  # fmt: skip
        assert our_names(name) == (name,)
        assert not is_unused(name)
