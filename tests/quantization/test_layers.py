"""Layers of quantised checkpoints as methods: products, stacks of different kinds, minima."""

import gguf
import numpy as np
import pytest
import torch

from gguf_blocks_kit import random_blocks
from quantised_writers import FORMATS
from quire.kernels.coded import CodedWeight
from quire.kernels.dispatch import default_ops
from quire.layers.linear_method import WEIGHT_FORMATS, LinearSpec
from quire.quantization.checkpoint import fitting
from quire.weights.bundles import StoredPart, StoredTensor
from quire.weights.gguf_blocks import BLOCK_TYPES
from quire.weights.names import grouped_qkv
from test_decoders import NAMES

K = 512


def blocks(kind, rows, seed=0):
    """Random blocks of a type as bytes `[N, bytes]`, and the weight by the reference package."""
    rng = np.random.default_rng(seed)
    raw = random_blocks(kind, rows * K, rng).reshape(rows, -1)
    value = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    return torch.from_numpy(raw), torch.from_numpy(value)


def gguf_layer(kinds, rows=64, bias=False, leaves=1, gated=False, change=None, name="a.up_proj"):
    """A loaded method for stacked layers of these types, and the whole weight and bias."""
    config = {"quant_method": "gguf"}
    spec = LinearSpec(
        name, default_ops(), torch.float32, K, (rows,) * len(kinds), bias, gated, leaves
    )
    method = WEIGHT_FORMATS.get("gguf")(config).linear_method(spec)
    found = method.parameters()
    parts, tensors, values = [], [], []
    for i, kind in enumerate(kinds):
        if kind == "F32":
            raw = value = torch.randn(rows, K, generator=torch.Generator().manual_seed(i))
        else:
            raw, value = blocks(kind, rows, i)
        header = StoredTensor(f"{name}{i}.weight", (rows, K), kind)
        parts.append(StoredPart(f"{name}{i}", rows, {"weight": header}, change))
        tensors.append({"weight": raw})
        values.append(value if change is None else change(value))
    found["weight"].bundle.choose(parts)
    found["weight"].bundle.load(tensors)
    shift = torch.zeros(rows * len(kinds))
    if bias:
        shift = torch.randn(rows * len(kinds), generator=torch.Generator().manual_seed(9))
        found["bias"].load(shift)
    return method, torch.cat(values), shift


def rows(count=5):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(7))


def error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_gguf_are_the_references_weights(kind, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")
    method, value, _ = gguf_layer([kind])
    assert torch.equal(method.rows(torch.arange(64), torch.float32), value)
    assert error(method.apply(rows()), rows() @ value.t()) < 1e-6


@pytest.mark.parametrize("leaves", [1, 8])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_gguf_with_int8_activations(kind, leaves):
    method, value, shift = gguf_layer([kind], bias=True, leaves=leaves)
    want = rows() @ value.t() + shift
    assert 1e-6 < error(method.apply(rows()), want) < 0.02
    assert error(method.rows(torch.arange(64), torch.float32), value) < 1e-6


MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "F32", "Q8_0"), ("Q4_K", "Q4_K", "Q4_K"),
         ("Q6_K", "Q6_K", "Q6_K"), ("Q5_K", "Q2_K", "Q4_1")]  # fmt: skip


@pytest.mark.parametrize("kinds", MIXED, ids="-".join)
def test_stacks_of_different_types(kinds):
    method, value, shift = gguf_layer(kinds, bias=True)
    got = method.apply(rows(), torch.float32)
    assert error(got, rows() @ value.t() + shift) < 0.02
    # Only floats beside codes are no part of one weight: all else can be in one call with the rest.
    assert (method.prepared is None) == ("F32" in kinds)
    # Each row of x on its own, and each layer on its own, gives the same bits.
    alone = torch.cat([method.apply(row) for row in rows().split(1)])
    assert torch.equal(got, alone)
    likeliest = method.likeliest(rows())
    assert torch.equal(likeliest, got.argmax(1))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0")])
def test_gates_of_different_types(kinds):
    method, value, _ = gguf_layer(kinds, gated=True)
    gate, up = (rows() @ value.t()).chunk(2, 1)
    got = method.gated(rows(), "silu")
    assert error(got, torch.nn.functional.silu(gate) * up) < 0.03


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0",), ("Q4_K",)])
def test_another_process_can_have_them(kinds):
    method, _, _ = gguf_layer(kinds)
    other, _, _ = gguf_layer(kinds)
    form = method.parameters()["weight"].kept
    if form is None:
        pytest.skip("these operations keep nothing")
    kept = form.keep()
    other.parameters()["weight"].kept.restore(kept)
    assert torch.equal(method.apply(rows()), other.apply(rows()))


def test_rows_in_the_familys_order():
    """GPT-NeoX and others keep queries, keys and values head by head."""
    change = grouped_qkv(4, 1)
    method, value, _ = gguf_layer(["Q4_K"], rows=96, change=change)
    assert error(method.apply(rows()), rows() @ value.t()) < 0.02


def test_experts_of_different_types_are_one_weight():
    method, value, _ = gguf_layer(["Q4_K", "Q6_K"], name="model.layers.0.mlp.experts.3.gate_up")
    assert method.prepared is not None
    assert error(method.rows(torch.arange(128), torch.float32), value) == 0
    assert error(method.apply(rows()), rows() @ value.t()) < 0.02


@pytest.mark.parametrize(("leaves", "group"), [(1, 96), (2, 32)])
def test_groups_that_fill_no_leaf_are_cut_where_there_are_leaves(leaves, group):
    codes = torch.randint(0, 16, (8, K), generator=torch.Generator().manual_seed(2)).byte()
    coded = CodedWeight("int4", codes, torch.rand(8, 6), None, 96, "int8")
    spec = LinearSpec("a.down_proj", default_ops(), torch.float32, K, (8,), False, leaves=leaves)
    fitted = fitting(coded, spec)
    assert fitted.group == group and torch.equal(fitted.dequantise(), coded.dequantise())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_as_a_stack(name, monkeypatch):
    """Two layers of different scales in one weight: the same as one by one."""
    config, write = FORMATS[name]()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(64, K, generator=generator) * scale for scale in (0.1, 3.0)]
    written = [write(weight) for weight in weights]
    spec = LinearSpec("a.gate_up", default_ops(), torch.float32, K, (64, 64), False, leaves=2)
    method = WEIGHT_FORMATS.get(config.get("quant_method", "mlx"))(config).linear_method(spec)
    parts = [
        StoredPart(f"a.{i}", 64, {
            rest: StoredTensor(f"a.{i}.{rest}", tuple(t.shape), NAMES[t.dtype])
            for rest, t in tensors.items()
        })
        for i, (tensors, _) in enumerate(written)
    ]  # fmt: skip
    bundle = method.parameters()["weight"].bundle
    chosen = bundle.choose(parts)
    bundle.load([
        {rest: tensors[rest] for rest in names}
        for names, (tensors, _) in zip(chosen, written, strict=True)
    ])  # fmt: skip
    assert method.prepared is not None, "one weight"
    want = rows() @ torch.cat([value for _, value in written]).t()
    got = method.apply(rows())
    assert error(got, want) < 0.02
    halves = [error(g, w) for g, w in zip(got.chunk(2, 1), want.chunk(2, 1), strict=True)]
    assert max(halves) < 0.02
