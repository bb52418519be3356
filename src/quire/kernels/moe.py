"""Mixture of experts: which experts a token goes to, and the sum of what they say.

`Routing` is the choice as data. Experts of a token are always kept in ascending order and added
in that order in float32, leaf by leaf of their down projections, so a row's result depends on that
row alone and on no number of ranks. Each expert multiplies the rows that chose it with the
model's own kernels, whose rows do not notice each other.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quire.kernels.dispatch import Ops
from quire.kernels.exact import exp, sum_neighbours, tree_sum


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its experts and weighs them."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What a router's logits become: probabilities over all experts, or one gate per expert
    (DeepSeek-V3, section 2.1.2)."""
    normalise: bool = True
    """Weights of the chosen experts add up to 1. With `softmax` that is the softmax over the
    chosen logits: top-k before or after the softmax is the same then."""
    scale: float = 1.0
    """Factor of the weights (`routed_scaling_factor`)."""
    groups: int = 1
    """Consecutive experts form groups; only those of the best `top_groups` can be chosen."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group counts as its best expert (DeepSeek-V2), or its two best added (V3)."""


class ExpertWeights(NamedTuple):
    """One gated MLP, both weights as `prepare_linear` made them."""

    gate_up: Any
    down: Any


def route_experts(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights (float32) and experts (int64), both `[T, top_k]`, for float32 logits `[T, E]`.

    A row's experts are in ascending order. `bias` `[E]` counts in the choice but not in the
    weights. Of experts that score alike the first is chosen.
    """
    scores = exp(-logits).add_(1.0).reciprocal_() if routing.score == "sigmoid" else logits
    keys = scores if bias is None else scores + bias
    if routing.groups > routing.top_groups:
        keys = _only_best_groups(keys, routing)
    experts = _best(keys, routing.top_k).sort(-1).values
    weights = scores.gather(1, experts)
    if routing.score == "softmax":
        weights = _softmax_part(weights, weights if routing.normalise else logits)
    elif routing.normalise:
        weights = weights / (tree_sum(weights).add_(1e-20)).unsqueeze(-1)
    return weights * routing.scale, experts


def _best(keys: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest of each row; the sort is stable, so ties are settled."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _only_best_groups(keys: Tensor, routing: Routing) -> Tensor:
    grouped = keys.unflatten(-1, (routing.groups, -1))
    if routing.group_score == "max":
        of_group = grouped.amax(-1)
    else:
        best = grouped.sort(dim=-1, descending=True).values
        of_group = best[..., 0] + best[..., 1]
    out = torch.ones_like(of_group, dtype=torch.bool)
    out.scatter_(1, _best(of_group, routing.top_groups), False)
    return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)


def _softmax_part(chosen: Tensor, all_logits: Tensor) -> Tensor:
    """Softmax over `all_logits` `[T, N]`, of those entries that are `chosen` `[T, K]`."""
    top = all_logits.amax(-1, keepdim=True)
    return exp(chosen - top) / tree_sum(exp(all_logits - top)).unsqueeze(-1)


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    layers: Sequence[ExpertWeights],
    activation: Callable[[Tensor], Tensor],
    *,
    ops: Ops,
) -> Tensor:
    """Sum over a row's experts of weight * down(activation(gate_up(x))): float32 `[T, H]`.

    `x` is `[T, H]`; `weights` and `experts` `[T, K]` are as `route_experts` gives them. Each leaf
    of the down projections has a sum of its own that starts at 0 and goes in ascending order of
    the experts; these are added as `sum_neighbours` does, then the weighted biases, summed in the
    same order. Experts that nobody chose cost nothing.
    `ops` multiplies, and has prepared the weights.
    """
    tokens, shares, counts = by_expert(weights, experts, len(layers))
    down = layers[0].down
    total = torch.zeros(down.leaves, *x.shape, dtype=torch.float32, device=x.device)
    shift = None if down.bias is None else torch.zeros_like(total[0])
    begin = 0
    for layer, count in zip(layers, counts, strict=True):
        if count:
            mine = tokens[begin : begin + count], shares[begin : begin + count]
            inner = activation(ops.linear(x[mine[0]], layer.gate_up))
            # A token has an expert at most once, so no two rows are added to one.
            ops.add_leaves(inner, layer.down, total, *mine)
            if shift is not None:
                bias = layer.down.bias[: x.shape[1]]
                shift.index_add_(0, mine[0], bias * mine[1].unsqueeze(1))
            begin += count
    out = sum_neighbours(total.unbind())
    return out if shift is None else out.add_(shift)


def by_expert(
    weights: Tensor, experts: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, list[int]]:
    """The tokens of the first expert, in ascending order, then those of the next, and so on.

    Returns:
        Tokens `[T * K]` int64, their weights `[T * K]`, and how many each expert has.
    """
    order = experts.view(-1).argsort(stable=True)
    counts = torch.bincount(experts.view(-1), minlength=num_experts).tolist()
    return order // experts.shape[1], weights.view(-1)[order], counts


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` for `[T, 2 I]`, gate and up side by side (GPT-OSS).

    The gate is clamped to at most `limit`, `up` to within `limit`. Result `[T, I]`.
    """
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / exp(gate * -alpha).add_(1.0)).mul_(up.add_(1.0)).to(x.dtype)
