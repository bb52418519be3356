"""Compiled sum over the experts of a mixture; plain twin: `moe.grouped_experts`. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels import moe
from quire.kernels.compiled import lib
from quire.kernels.dispatch import Ops
from quire.kernels.native_linear import CODES
from quire.kernels.packed import PackedLinear


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    layers: Sequence[moe.ExpertWeights],
    activation: Callable[[Tensor], Tensor],
    *,
    ops: Ops,
) -> Tensor:
    """See `moe.grouped_experts`.

    The down projections of all experts are one call that goes from tile to tile of columns: the
    sums of a tile, over all leaves and experts, stay in a cache until they are complete. Expert by
    expert, as in the twin, each of them would fetch the sums of all columns from memory and write
    them back.
    """
    if not _alike([layer.down for layer in layers]):
        return moe.grouped_experts(x, weights, experts, layers, activation, ops=ops)
    tokens, shares, counts = moe.by_expert(weights, experts, len(layers))
    inner, down, ends, begin = [], [], [], 0
    for layer, count in zip(layers, counts, strict=True):
        if count:
            mine = tokens[begin : begin + count]
            inner.append(activation(ops.linear(x[mine], layer.gate_up)))
            down.append(layer.down.handle)
            begin += count
            ends.append(begin)
    rows = torch.cat(inner) if inner else x.new_empty(0, 1)
    out = torch.empty(len(x), layers[0].down.out_features, dtype=torch.float32)
    lib.sum_experts(
        down,
        ends,
        rows.data_ptr(),
        CODES[rows.dtype],
        rows.stride(0),
        tokens.data_ptr(),
        shares.contiguous().data_ptr(),
        out.data_ptr(),
        len(x),
    )
    return out


def _alike(downs: Sequence[object]) -> bool:
    """Whether one call can sum them: codes of rows are made once for all."""
    first = downs[0]
    if not isinstance(first, PackedLinear):
        return False
    layout = first.layout
    return all(isinstance(down, PackedLinear) and down.layout is layout for down in downs)
