"""Attention over the paged KV cache, row by row in one fixed order.

The keys of a row are cut, by absolute position, into spans of 64 and segments of 16 spans. A
segment's scores are reduced to (maximum, sum, weighted values); segments are merged in ascending
order by the online-softmax rule (Milakov & Gimelshein 2018). Positions after the row's own count
as scores of `-inf`, so they and whole later spans add exact zeros. Block size, neighbours in the
batch and the cut between prefill steps appear nowhere in that arithmetic.

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
from quire.kernels.exact import exp_, tree_sum
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
    from quire.attention.metadata import AttentionMetadata

logger = get_logger(__name__)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> Tensor:
    """Causal attention of `q [T, H, D]` over each token's own request: `[T, H, D]`.

    Caches are `[num_blocks, block_size, KVH, D]` and already hold this step's keys and values.
    Raises:
        NotImplementedError: `spec` asks for more than a scale.

    What lies in a block beyond a request's length never matters, NaN included.
    """
    if not spec.is_plain:
        raise NotImplementedError("attention with a window, cap, slopes or sinks")
    kv_heads, head_dim = key_cache.shape[2:]
    group = q.shape[1] // kv_heads
    tile = tokens_per_tile(kv_heads, group, head_dim, q.device, torch.get_num_threads())
    sizes = Geometry(kv_heads, group, head_dim, tile)
    plan = metadata.scratch.get(sizes)
    if plan is None:
        plan = metadata.scratch[sizes] = make_plan(metadata, sizes)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in plan:
        rows = _attend(q, key_cache, value_cache, metadata.positions, spec.scale, chunk, sizes)
        out.index_copy_(0, chunk.tokens, rows.to(q.dtype).view(-1, *q.shape[1:]))
    return out


def _attend(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    scale: float,
    chunk: Chunk,
    sizes: Geometry,
) -> Tensor:
    """Rows of one chunk: float32 `[tiles, count, KVH, G, D]`."""
    queries = _query_tiles(q, scale, chunk, sizes)
    row_positions = positions.index_select(0, chunk.tokens).view(-1, chunk.count, 1, 1, 1)
    shape = (len(chunk.tiles), chunk.count, sizes.kv_heads, sizes.group)
    top = torch.full(shape, -torch.inf, device=q.device)
    total = torch.zeros(shape, device=q.device)
    acc = torch.zeros(*shape, sizes.head_dim, device=q.device)
    for segment in chunk.segments:
        on = slice(segment.first_tile, None)
        keys = _gather("keys", key_cache, segment, sizes)
        scores = _scores(queries[on], keys, segment, chunk.count, sizes)
        _mask(scores, row_positions[on], segment)
        new_top = torch.maximum(top[on], scores.amax(-1))
        weights = exp_(scores.sub_(new_top.unsqueeze(-1)))
        values = _gather("values", value_cache, segment, sizes)
        part = _weighted_values(weights, values, segment, chunk.count, sizes)
        keep = exp_(top[on] - new_top)
        total[on] = total[on] * keep + tree_sum(weights)
        acc[on] = acc[on] * keep.unsqueeze(-1) + part
        top[on] = new_top
    # Adding 0 turns -0 into 0: which zero a sum of nothing has is the only thing left open.
    return acc.div_(total.unsqueeze(-1)).add_(0.0)


def _query_tiles(q: Tensor, scale: float, chunk: Chunk, sizes: Geometry) -> Tensor:
    """`[tiles, unit, rows, width]`: scaled queries, zero-filled, once per span of a unit."""
    tiles, heads, dim = len(chunk.tiles), sizes.kv_heads, sizes.head_dim
    rows = q.index_select(0, chunk.tokens).to(torch.float32).mul_(scale)
    rows = rows.view(tiles, chunk.count, heads, sizes.group, dim).transpose(1, 2)
    out = torch.zeros(tiles, heads, sizes.tile, sizes.group, sizes.width, device=q.device)
    out[:, :, : chunk.count, :, :dim] = rows
    out = out.view(tiles, 1, heads, sizes.rows, sizes.width)
    out = out.expand(-1, sizes.spans_per_unit, -1, -1, -1)
    return out.reshape(tiles, sizes.unit, sizes.rows, sizes.width)


def _gather(kind: str, cache: Tensor, segment: Segment, sizes: Geometry) -> Tensor:
    """Keys or values of a segment as matrices: float32 `[U, spans * KVH, SPAN, width]`.

    Values beyond a request's end become 0, because `0 * NaN` is not 0. Keys there only reach
    scores that are masked.
    """
    count = segment.slots.shape[0]
    slots = segment.slots.view(-1)
    flat = cache.view(-1, *cache.shape[2:])
    picked = workspace.take("picked", (len(slots), *flat.shape[1:]), cache.dtype, cache.device)
    torch.index_select(flat, 0, slots, out=picked)
    if kind == "values":
        for one, reached in zip(
            picked.view(count, -1, *flat.shape[1:]), segment.reached, strict=True
        ):
            one[reached:] = 0
    picked = picked.view(count, segment.padded_spans, SPAN, sizes.kv_heads, sizes.head_dim)
    shape = (count, segment.padded_spans, sizes.kv_heads, SPAN, sizes.width)
    out = workspace.take(kind, shape, torch.float32, cache.device)
    out[..., : sizes.head_dim] = picked.transpose(2, 3)
    out[..., sizes.head_dim :] = 0
    return out.view(count, -1, SPAN, sizes.width)


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


def _mask(scores: Tensor, row_positions: Tensor, segment: Segment) -> None:
    """Set what a row must not see to `-inf`, whatever is there."""
    hidden = scores[..., segment.seen :]
    first = segment.start + segment.seen
    key_positions = torch.arange(first, first + hidden.shape[-1], device=scores.device)
    hidden.masked_fill_(key_positions > row_positions, -torch.inf)


def _weighted_values(
    weights: Tensor, values: Tensor, segment: Segment, count: int, sizes: Geometry
) -> Tensor:
    """Sum over the segment of weight times value: `[tiles, count, KVH, G, D]`."""
    tiles = weights.shape[0]
    shape = (tiles, segment.padded_spans * sizes.kv_heads, sizes.rows, SPAN)
    matrices = workspace.take("matrices", shape, torch.float32, weights.device)
    if count < sizes.tile or segment.spans < segment.padded_spans:
        matrices.zero_()
    rows = _as_rows(matrices, segment, count, sizes)
    rows.copy_(weights.view(rows.shape))
    shape = (*shape[:-1], sizes.width)
    out = workspace.take("weighted", shape, torch.float32, weights.device)
    for i, (kv, units) in enumerate(zip(segment.kv_of_tile, segment.units_of_tile, strict=True)):
        weight, value, result = matrices[i], values[kv], out[i]
        result[units * sizes.unit :] = 0
        for begin in range(0, units * sizes.unit, sizes.unit):
            end = begin + sizes.unit
            torch.bmm(weight[begin:end], value[begin:end], out=result[begin:end])
    summed = tree_sum(out.view(tiles, segment.padded_spans, -1), dim=1)
    summed = summed.view(tiles, sizes.kv_heads, sizes.tile, sizes.group, sizes.width)
    return summed[:, :, :count, :, : sizes.head_dim].transpose(1, 2)


@functools.cache
def tokens_per_tile(
    kv_heads: int, group: int, head_dim: int, device: torch.device, num_threads: int
) -> int:
    """Tokens that share one matrix product, after trying that none notices the others.

    If the library fails the trial the answer is 1: then a row has one place only. `num_threads`
    is part of the key because the library may act by it.
    """
    tile = max(1, TILE_ROWS // group)
    matrices, width = spans_per_unit(kv_heads) * kv_heads, align_up(head_dim, 16)
    shapes = ((width, SPAN, True), (SPAN, width, False))
    if tile > 1 and not all(_try_slots(matrices, tile, group, *s, device) for s in shapes):
        logger.warning(
            "this machine's batched matrix product depends on a row's place (%d KV heads of %d): "
            "attention goes token by token, which is slower but exact",
            kv_heads,
            head_dim,
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
