"""How the rows of a step are grouped for paged attention: tiles, chunks, segments.

Computed once per step from lengths and block tables, shared by all layers. Grouping decides what
is computed together, never a result; the arithmetic is in `paged.py`. Knows no requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from quire.utils.math import align_up, cdiv

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata

SPAN: Final = 64
"""Positions per key matrix."""
SEGMENT: Final = 16
"""Spans that are reduced together; segments are merged in order."""
TILE_ROWS: Final = 8
"""About how many rows (tokens times query heads per KV head) one product has."""
_UNIT: Final = 16
"""About how many matrices one call multiplies."""
_SCORE_BUDGET: Final = 1 << 19
"""Scores held at a time, unless a single tile needs more."""
_KV_BUDGET: Final = 1 << 20
"""Key numbers held at a time, unless a single segment needs more."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that are the same in every call of a model."""

    kv_heads: int
    group: int
    """Query heads per KV head."""
    key_dim: int
    value_dim: int
    tile: int
    """Tokens per tile."""
    window: int | None = None
    """Positions a token sees at most, itself included."""

    @property
    def key_width(self) -> int:
        """key_dim in whole cache lines, so that every row of a matrix is aligned."""
        return align_up(self.key_dim, 16)

    @property
    def value_width(self) -> int:
        """value_dim in whole cache lines."""
        return align_up(self.value_dim, 16)

    @property
    def spans_per_unit(self) -> int:
        """A power of two, so that units never cross a segment."""
        return spans_per_unit(self.kv_heads)

    @property
    def unit(self) -> int:
        """Matrices per product: a few spans of all KV heads."""
        return self.spans_per_unit * self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of a tile in one product."""
        return self.tile * self.group

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def spans_per_unit(kv_heads: int) -> int:
    """Spans whose matrices are multiplied in one call: 4, 2 or 1."""
    return next((n for n in (4, 2) if n * kv_heads <= _UNIT), 1)


class Tile(NamedTuple):
    """Consecutive tokens of one request. Sorts by length."""

    spans: int
    """Spans up to its last token."""
    request: int
    token: int
    """Index of its first token in the flat batch."""
    position: int
    """Absolute position of that token."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What the tiles of a chunk from `first_tile` on see of one segment of positions."""

    start: int
    """Absolute position of the first key."""
    spans: int
    padded_spans: int
    """Whole units."""
    first_tile: int
    kv_of_tile: list[int]
    units_of_tile: list[int]
    seen: int
    """So many positions from `start` come after no row: no causal mask is needed there."""
    out_of_window: int
    """So many positions from `start` may be before some row's window."""
    slots: Tensor
    """`[U, padded_spans * SPAN]` int64 cache slots of the U requests involved."""
    used: list[slice]
    """Of each such request, which of these positions its rows see; the others hold garbage."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tiles of equal token count, ordered by length, computed together."""

    tiles: list[Tile]
    count: int
    """Tokens in each tile."""
    tokens: Tensor
    """`[tiles * count]` indices into the flat batch."""
    segments: list[Segment] = field(default_factory=list)


SlotsOf = Callable[[tuple[int, ...], int, int], tuple[Tensor, list[slice]]]


def make_plan(metadata: AttentionMetadata, sizes: Geometry) -> list[Chunk]:
    """Cut the batch into tiles and the tiles into chunks that fit the budgets."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    by_count: dict[int, list[Tile]] = {}
    for request, length in enumerate(lengths):
        begin, end = starts[request], starts[request + 1]
        for token in range(begin, end, sizes.tile):
            count = min(sizes.tile, end - token)
            position = length - end + token
            spans = (position + count - 1) // SPAN + 1
            by_count.setdefault(count, []).append(Tile(spans, request, token, position))
    slots = functools.cache(functools.partial(_slots, metadata, sizes))
    return [
        _make_chunk(tiles, count, metadata.positions.device, sizes, slots)
        for count, all_tiles in sorted(by_count.items())
        for tiles in _within_budget(sorted(all_tiles), sizes)
    ]


def _within_budget(tiles: list[Tile], sizes: Geometry) -> Iterator[list[Tile]]:
    """Split an ordered list of tiles; the last tile of a part is its longest."""
    part: list[Tile] = []
    requests: set[int] = set()
    for tile in tiles:
        positions = align_up(min(tile.spans, SEGMENT), sizes.spans_per_unit) * SPAN
        scores = (len(part) + 1) * sizes.rows * sizes.kv_heads * positions
        keys = len(requests | {tile.request}) * positions * sizes.kv_heads * sizes.key_width
        if part and (scores > _SCORE_BUDGET or keys > _KV_BUDGET):
            yield part
            part, requests = [], set()
        part.append(tile)
        requests.add(tile.request)
    if part:
        yield part


def _make_chunk(
    tiles: list[Tile], count: int, device: torch.device, sizes: Geometry, slots: SlotsOf
) -> Chunk:
    first = torch.tensor([tile.token for tile in tiles], device=device)
    tokens = (first.unsqueeze(1) + torch.arange(count, device=device)).view(-1)
    lowest = min(sizes.first_seen(tile.position) for tile in tiles) // SPAN
    # A segment that no row sees would change nothing, so it may be left out.
    begins = range(lowest // SEGMENT * SEGMENT, tiles[-1].spans, SEGMENT)
    segments = [_make_segment(tiles, count, begin, sizes, slots) for begin in begins]
    return Chunk(tiles, count, tokens, segments)


def _make_segment(
    tiles: list[Tile], count: int, begin: int, sizes: Geometry, slots: SlotsOf
) -> Segment:
    """The segment that starts with span `begin`."""
    active = [tile for tile in tiles if tile.spans > begin]
    requests = tuple(sorted({tile.request for tile in active}))
    place = {request: i for i, request in enumerate(requests)}
    spans = min(active[-1].spans - begin, SEGMENT)
    padded = align_up(spans, sizes.spans_per_unit)
    start, width = begin * SPAN, spans * SPAN
    lowest = min(tile.position for tile in active)
    highest = max(tile.position for tile in active) + count - 1
    return Segment(
        start,
        spans,
        padded,
        len(tiles) - len(active),
        [place[tile.request] for tile in active],
        [cdiv(min(tile.spans - begin, SEGMENT), sizes.spans_per_unit) for tile in active],
        min(max(0, lowest + 1 - start), width),
        min(max(0, sizes.first_seen(highest) - start), width),
        *slots(requests, start, padded * SPAN),
    )


def _slots(
    metadata: AttentionMetadata,
    sizes: Geometry,
    requests: tuple[int, ...],
    start: int,
    length: int,
) -> tuple[Tensor, list[slice]]:
    """Cache slots of positions `start ..` of some requests, and which of them their rows see."""
    device = metadata.block_table.device
    rows = torch.tensor(requests, device=device)
    positions = torch.arange(start, start + length, device=device)
    lengths = metadata.seq_lens[rows]
    starts = metadata.query_start_loc
    first_rows = (lengths - (starts[rows + 1] - starts[rows])).tolist()
    first = [sizes.first_seen(position) for position in first_rows]
    unused = (positions >= lengths.unsqueeze(1)) | (
        positions < torch.tensor(first, device=device).unsqueeze(1)
    )
    # Neither columns past the table nor what stands in those a request does not use may be used.
    columns = (positions // metadata.block_size).expand(len(requests), -1)
    blocks = metadata.block_table[rows].long().gather(1, columns.masked_fill(unused, 0))
    slots = blocks * metadata.block_size + positions % metadata.block_size
    ends = (lengths - start).clamp_(max=length).tolist()
    used = [slice(min(max(0, f - start), e), e) for f, e in zip(first, ends, strict=True)]
    return slots.masked_fill_(unused, 0), used
