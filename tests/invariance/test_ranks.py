"""A model whose row-parallel products are computed by ranks gives the bits of one that is whole."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paged_run import load, serve
from quire.kernels.dispatch import ops
from quire.kernels.exact import sum_neighbours
from quire.kernels.moe import Routing
from quire.layers.moe import MoE, MoEStyle
from quire.weights.dummy import random_checkpoint

SIZES = {"intermediate_size": 512, "attention_bias": True, "mlp_bias": True}
"""4 query heads, 2 KV heads and 8 tiles: 4 leaves and 8."""
STYLE = MoEStyle(Routing(6, 3), 256, expert_bias=True, shared_size=128, shared_gate=True)


@dataclass
class Shared:
    """A layer in parts, one per rank."""

    ranks: list[Any]
    bias: torch.Tensor | None

    @property
    def leaves(self):
        return sum(rank.leaves for rank in self.ranks)

    def pieces(self, x):
        return zip(x.chunk(len(self.ranks), 1), self.ranks, strict=True)


@pytest.fixture
def cut(monkeypatch):
    """Call it with a number of ranks: from then on they share the layers that are loaded."""
    prepare, linear, add_leaves = ops.prepare_linear, ops.linear, ops.add_leaves
    made = []

    def prepared(weight, bias=None, *, gated=False, dtype=None, leaves=1):
        if leaves == 1:
            return prepare(weight, bias, gated=gated, dtype=dtype)
        whole = weight if isinstance(weight, torch.Tensor) else torch.cat(list(weight))
        kind, count = dtype or whole.dtype, min(leaves, cut.ranks)
        parts = whole.to(kind).chunk(count, 1)
        made.append((leaves, count))
        ranks = [prepare(part, leaves=leaves // count) for part in parts]
        return Shared(ranks, None if bias is None else bias.to(kind).float())

    def product(x, layer, out_dtype=None, keep=None):
        if not isinstance(layer, Shared):
            return linear(x, layer, out_dtype, keep)
        out = sum_neighbours(
            [linear(piece, rank, torch.float32) for piece, rank in layer.pieces(x)]
        )
        return (out if layer.bias is None else out.add_(layer.bias)).to(out_dtype or x.dtype)

    def apart(x, layer, total, rows, shares):
        if not isinstance(layer, Shared):
            return add_leaves(x, layer, total, rows, shares)
        for (piece, rank), part in zip(layer.pieces(x), total.chunk(len(layer.ranks)), strict=True):
            add_leaves(piece, rank, part, rows, shares)

    def cut(ranks):
        cut.ranks = ranks
        for name, function in (
            ("prepare_linear", prepared), ("linear", product), ("add_leaves", apart),
        ):  # fmt: skip
            monkeypatch.setitem(ops.__dict__, name, function)
        made.clear()
        return made

    return cut


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dense_model_over_ranks(isa, dtype, tmp_path, cut):
    folder = random_checkpoint(tmp_path, SIZES | {"torch_dtype": dtype})
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (1, 30, 45)]
    want = serve(load(folder), prompts, random.Random(2))
    for ranks in (2, 4, 8):
        made = cut(ranks)
        got = serve(load(folder), prompts, random.Random(2), chunk=lambda: 11)
        assert sorted(made) == [(4, min(4, ranks))] * 2 + [(8, ranks)] * 2, (
            "two products of each layer are cut"
        )
        for one, other in zip(got, want, strict=True):
            assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mixture_over_ranks(isa, dtype, cut):
    def build():
        torch.manual_seed(0)
        layer = MoE(48, STYLE)
        for parameter in layer.parameters().values():
            parameter.load((torch.randn(parameter.shape) / 7).to(parameter.dtype or dtype))
        return layer

    x = torch.randn(19, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = build()(x)
    for ranks in (2, 4):
        made = cut(ranks)
        got = build()(x)
        assert sorted(made) == [(2, 2)] + [(4, ranks)] * 6, (
            "every expert and the shared one are cut"
        )
        assert torch.equal(bits(got), bits(want))
        assert torch.equal(bits(build()(x[5:6])), bits(want[5:6]))
