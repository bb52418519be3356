"""Attention over the paged KV cache, row by row in one fixed order.

The keys of a row are cut, by absolute position, into spans of 64 and segments of 16 spans. A
segment's scores are reduced to (maximum, sum, weighted values); segments are merged in ascending
order by the online-softmax rule (Milakov & Gimelshein 2018). Positions after the row's own or
before its window count as scores of `-inf`, so they, whole later spans and whole earlier segments
add exact zeros. Block size, neighbours in the batch and the cut between prefill steps appear
nowhere in that arithmetic.

Matrix products always have the same shape: `unit` key matrices of one span each against a tile of
`tile` consecutive tokens of one request (`tile * group` rows), zero-filled. A row's span and KV
head fix its place among the matrices; its place among the rows is tried out once
(`tokens_per_tile`).

Which rows are computed together is decided in `paged_plan.py`. Knows no requests.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import raw
from quire.kernels.exact import exp_, tanh, tree_sum
from quire.kernels.kv_types import head_dim, numbers, scale_of
from quire.kernels.paged_plan import (
    SPAN,
    TILE_ROWS,
    Chunk,
    Geometry,
    Segment,
    make_plan,
    spans_per_unit,
)
from quire.kernels.workspace import workspace
from quire.logger import get_logger
from quire.utils.math import align_up

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata

logger = get_logger(__name__)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention of `q [T, H, K]` over each token's own request: `[T, H, V]`.

    Caches are `[num_blocks, block_size, KVH, K]` and `[num_blocks, block_size, KVH, V]`, one cache
    twice where values are latents, and already hold this step's keys and values (`kv_types`). A
    score is `scale * q.k`, then capped, then biased by the slope times the distance; masked scores
    are `-inf`; a sink is one more score without a value.

    What lies in a block beyond a request's length, or before the windows of all its rows of this
    step, never matters, NaN included: such a block's number need not be valid either.
    """
    sizes = _geometry(q, key_cache, value_cache, spec)
    plan = metadata.scratch.get(sizes)
    if plan is None:
        plan = metadata.scratch[sizes] = make_plan(metadata, sizes)
    out = torch.empty(*q.shape[:2], sizes.value_dim, dtype=q.dtype, device=q.device)
    for chunk in plan:
        rows = _attend(q, key_cache, value_cache, metadata.positions, spec, chunk, sizes)
        of_values = scale_of(value_cache, spec.kv_scales[1])
        if of_values != 1.0:
            rows.mul_(of_values)
        out.index_copy_(0, chunk.tokens, rows.to(q.dtype).view(-1, *out.shape[1:]))
    return out


def _geometry(q: Tensor, key_cache: Tensor, value_cache: Tensor, spec: AttentionSpec) -> Geometry:
    kv_heads, key_dim = key_cache.shape[2], head_dim(key_cache)
    group, value_dim = q.shape[1] // kv_heads, spec.latent_dim or head_dim(value_cache)
    threads = torch.get_num_threads()
    tile = tokens_per_tile(kv_heads, group, key_dim, value_dim, q.device, threads)
    return Geometry(kv_heads, group, key_dim, value_dim, tile, spec.window)


def _attend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    spec: AttentionSpec,
    chunk: Chunk,
    sizes: Geometry,
) -> Tensor:
    """Rows of one chunk: float32 `[tiles, count, KVH, G, V]`."""
    scale = spec.scale * scale_of(key_cache, spec.kv_scales[0])
    queries = _query_tiles(q, scale, chunk, sizes)
    row_positions = positions.index_select(0, chunk.tokens).view(-1, chunk.count, 1, 1, 1)
    shape = (len(chunk.tiles), chunk.count, sizes.kv_heads, sizes.group)
    top, total = _before_any_key(shape, spec.sinks, q.device)
    acc = torch.zeros(*shape, sizes.value_dim, device=q.device)
    for segment in chunk.segments:
        on = slice(segment.first_tile, None)
        keys = _gather("keys", key_cache, segment, sizes)
        scores = _scores(queries[on], keys, segment, chunk.count, sizes)
        _cap_and_bias(scores, row_positions[on], segment, spec)
        _mask(scores, row_positions[on], segment, spec.window)
        new_top = torch.maximum(top[on], scores.amax(-1))
        base = new_top if spec.window is None else _finite(new_top)
        weights = exp_(scores.sub_(base.unsqueeze(-1)))
        values = _gather("values", value_cache, segment, sizes)
        part = _weighted_values(weights, values, segment, chunk.count, sizes)
        keep = exp_(top[on] - base)
        total[on] = total[on] * keep + tree_sum(weights)
        acc[on] = acc[on] * keep.unsqueeze(-1) + part
        top[on] = new_top
    # Adding 0 turns -0 into 0: which zero a sum of nothing has is the only thing left open.
    return acc.div_(total.unsqueeze(-1)).add_(0.0)


def _before_any_key(
    shape: tuple[int, ...], sinks: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Maximum and sum before the first segment: nothing, or the sink alone."""
    if sinks is None:
        return torch.full(shape, -torch.inf, device=device), torch.zeros(shape, device=device)
    top = sinks.view(shape[2:]).expand(shape).clone(memory_format=torch.contiguous_format)
    return top, torch.ones(shape, device=device)


def _finite(top: Tensor) -> Tensor:
    """0 instead of `-inf`: a segment before a row's window must give weights of 0, not NaN."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _cap_and_bias(
    scores: Tensor, row_positions: Tensor, segment: Segment, spec: AttentionSpec
) -> None:
    """Soft-cap and ALiBi, in place on `[tiles, count, KVH, G, S]`."""
    if spec.softcap:
        scores.copy_(tanh(scores.div_(spec.softcap)).mul_(spec.softcap))
    if spec.alibi_slopes is not None:
        distance = (_key_positions(scores, segment.start) - row_positions).to(torch.float32)
        scores.add_(spec.alibi_slopes.view(*scores.shape[2:4], 1) * distance)


def _query_tiles(q: Tensor, scale: float, chunk: Chunk, sizes: Geometry) -> Tensor:
    """`[tiles, unit, rows, width]`: scaled queries, zero-filled, once per span of a unit."""
    tiles, heads, dim = len(chunk.tiles), sizes.kv_heads, sizes.key_dim
    rows = q.index_select(0, chunk.tokens).to(torch.float32).mul_(scale)
    rows = rows.view(tiles, chunk.count, heads, sizes.group, dim).transpose(1, 2)
    out = torch.zeros(tiles, heads, sizes.tile, sizes.group, sizes.key_width, device=q.device)
    out[:, :, : chunk.count, :, :dim] = rows
    out = out.view(tiles, 1, heads, sizes.rows, sizes.key_width)
    out = out.expand(-1, sizes.spans_per_unit, -1, -1, -1)
    return out.reshape(tiles, sizes.unit, sizes.rows, sizes.key_width)


def _gather(kind: str, cache: Tensor, segment: Segment, sizes: Geometry) -> Tensor:
    """Keys or values of a segment as matrices: float32 `[U, spans * KVH, SPAN, width]`.

    Values that no row of a request sees become 0, because `0 * NaN` is not 0. Keys there only
    reach scores that are masked.
    """
    count = segment.slots.shape[0]
    slots = segment.slots.view(-1)
    flat = raw(cache).flatten(0, 1)
    picked = workspace.take("picked", (len(slots), *flat.shape[1:]), flat.dtype, cache.device)
    torch.index_select(flat, 0, slots, out=picked)
    if kind == "values":
        for one, used in zip(picked.view(count, -1, *flat.shape[1:]), segment.used, strict=True):
            one[: used.start] = 0
            one[used.stop :] = 0
    dim, width = sizes.key_dim, sizes.key_width
    if kind == "values":
        dim, width = sizes.value_dim, sizes.value_width
    picked = numbers(picked.view(cache.dtype), dim, head_dim(cache))
    picked = picked.view(count, segment.padded_spans, SPAN, sizes.kv_heads, dim)
    shape = (count, segment.padded_spans, sizes.kv_heads, SPAN, width)
    out = workspace.take(kind, shape, torch.float32, cache.device)
    out[..., :dim] = picked.transpose(2, 3)
    out[..., dim:] = 0
    return out.view(count, -1, SPAN, width)


def _scores(queries: Tensor, keys: Tensor, segment: Segment, count: int, sizes: Geometry) -> Tensor:
    """`[tiles, count, KVH, G, spans * SPAN]`; units that a tile does not need stay undefined."""
    shape = (len(queries), segment.padded_spans * sizes.kv_heads, sizes.rows, SPAN)
    matrices = workspace.take("matrices", shape, torch.float32, queries.device)
    turned = keys.transpose(-1, -2)
    for i, (kv, units) in enumerate(zip(segment.kv_of_tile, segment.units_of_tile, strict=True)):
        query, key, result = queries[i], turned[kv], matrices[i]
        for begin in range(0, units * sizes.unit, sizes.unit):
            end = begin + sizes.unit
            torch.bmm(query, key[begin:end], out=result[begin:end])
    rows = _as_rows(matrices, segment, count, sizes)
    out = workspace.take("scores", tuple(rows.shape), torch.float32, queries.device)
    return out.copy_(rows).view(*rows.shape[:4], -1)


def _as_rows(matrices: Tensor, segment: Segment, count: int, sizes: Geometry) -> Tensor:
    """View matrices `[tiles, padded_spans * KVH, rows, SPAN]` as
    `[tiles, count, KVH, G, spans, SPAN]`."""
    shape = (-1, segment.padded_spans, sizes.kv_heads, sizes.tile, sizes.group, SPAN)
    return matrices.view(shape)[:, : segment.spans, :, :count].permute(0, 3, 2, 4, 1, 5)


def _key_positions(scores: Tensor, start: int) -> Tensor:
    """Absolute positions of the last dimension."""
    return torch.arange(start, start + scores.shape[-1], device=scores.device)


def _mask(scores: Tensor, row_positions: Tensor, segment: Segment, window: int | None) -> None:
    """Set what a row must not see to `-inf`, whatever is there."""
    later = scores[..., segment.seen :]
    later.masked_fill_(
        _key_positions(later, segment.start + segment.seen) > row_positions, -torch.inf
    )
    if window is not None and segment.out_of_window:
        early = scores[..., : segment.out_of_window]
        early.masked_fill_(
            _key_positions(early, segment.start) <= row_positions - window, -torch.inf
        )


def _weighted_values(
    weights: Tensor, values: Tensor, segment: Segment, count: int, sizes: Geometry
) -> Tensor:
    """Sum over the segment of weight times value: `[tiles, count, KVH, G, V]`."""
    tiles = weights.shape[0]
    shape = (tiles, segment.padded_spans * sizes.kv_heads, sizes.rows, SPAN)
    matrices = workspace.take("matrices", shape, torch.float32, weights.device)
    if count < sizes.tile or segment.spans < segment.padded_spans:
        matrices.zero_()
    rows = _as_rows(matrices, segment, count, sizes)
    rows.copy_(weights.view(rows.shape))
    shape = (*shape[:-1], sizes.value_width)
    out = workspace.take("weighted", shape, torch.float32, weights.device)
    for i, (kv, units) in enumerate(zip(segment.kv_of_tile, segment.units_of_tile, strict=True)):
        weight, value, result = matrices[i], values[kv], out[i]
        result[units * sizes.unit :] = 0
        for begin in range(0, units * sizes.unit, sizes.unit):
            end = begin + sizes.unit
            torch.bmm(weight[begin:end], value[begin:end], out=result[begin:end])
    summed = tree_sum(out.view(tiles, segment.padded_spans, -1), dim=1)
    summed = summed.view(tiles, sizes.kv_heads, sizes.tile, sizes.group, sizes.value_width)
    return summed[:, :, :count, :, : sizes.value_dim].transpose(1, 2)


@functools.cache
def tokens_per_tile(
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
    num_threads: int,
) -> int:
    """Tokens that share one matrix product, after trying that none notices the others.

    If the library fails the trial the answer is 1: then a row has one place only. `num_threads`
    is part of the key because the library may act by it.
    """
    tile = max(1, TILE_ROWS // group)
    matrices = spans_per_unit(kv_heads) * kv_heads
    shapes = ((align_up(key_dim, 16), SPAN, True), (SPAN, align_up(value_dim, 16), False))
    if tile > 1 and not all(_try_slots(matrices, tile, group, *s, device) for s in shapes):
        logger.warning(
            "this machine's batched matrix product depends on a row's place (%d KV heads of %d): "
            "attention goes token by token, which is slower but exact",
            kv_heads,
            key_dim,
        )
        return 1
    return tile


def _try_slots(
    matrices: int,
    tile: int,
    group: int,
    inner: int,
    outer: int,
    turned: bool,
    device: torch.device,
) -> bool:
    """Compare tiles in another order and beside zeros, bit for bit.

    `turned`: the right matrices are stored transposed, as keys are.
    """
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(matrices, outer, inner, generator=generator).to(device).transpose(1, 2)
    right = right if turned else right.contiguous()
    left = torch.randn(matrices, tile, group, inner, generator=generator).to(device)

    def product(rows: Tensor) -> Tensor:
        out = torch.empty(matrices, tile * group, outer, device=device)
        torch.bmm(rows.reshape(matrices, tile * group, inner), right, out=out)
        return out.view(matrices, tile, group, outer)

    want = product(left)
    order = torch.randperm(tile, generator=generator).to(device)
    alone = torch.zeros_like(left)
    alone[:, 0] = left[:, -1]
    return torch.equal(product(left[:, order]), want[:, order]) and torch.equal(
        product(alone)[:, 0], want[:, -1]
    )
