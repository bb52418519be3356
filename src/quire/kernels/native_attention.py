"""Compiled attention, rotary positions and KV cache; the plain twins are in `reference.py`.

Passes addresses, strides and lengths to `csrc/attention.h`. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.compiled import lib
from quire.kernels.kv_types import head_dim, scale_of
from quire.kernels.native_linear import CODES
from quire.kernels.rope import Rotation

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata

KEPT: Final = CODES | {torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5}
"""Element types of KV caches as csrc/isa.h numbers them."""
_STEP: Final = "native step"
_MOST_LAYERS: Final = 4096


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> Tensor:
    """See `paged.paged_attention`: `q [T, H, K]` to `[T, H, V]`."""
    tokens, heads, key_dim = q.shape
    kv_heads, value_dim = value_cache.shape[2], spec.latent_dim or head_dim(value_cache)
    q = _heads_together(q)
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype)
    lib.attention(
        layer_of(spec, heads, kv_heads, key_dim, value_dim),
        step_of(metadata),
        q.data_ptr(),
        *q.stride()[:2],
        CODES[q.dtype],
        cache_of(key_cache, spec.kv_scales[0]),
        cache_of(value_cache, spec.kv_scales[1]),
        head_dim(value_cache),
        out.data_ptr(),
    )
    return out


def step_of(metadata: AttentionMetadata, last_tokens: bool = False) -> Any:
    """The compiled module's view of a step's metadata, kept with it.

    `last_tokens`: queries are only the tokens in `metadata.wanted`.
    """
    key = (_STEP, last_tokens)
    step = metadata.scratch.get(key)
    if step is None:
        starts = metadata.wanted_start_loc if last_tokens else metadata.query_start_loc
        assert starts is not None, "comes with `wanted`"
        step = metadata.scratch[key] = _Step(metadata, starts)
    return step.handle


class _Step:
    """The view, and the tensors it points to."""

    def __init__(self, metadata: AttentionMetadata, query_start_loc: Tensor) -> None:
        starts, lengths = query_start_loc.contiguous(), metadata.seq_lens.contiguous()
        table = metadata.block_table
        table = table if table.stride(-1) == 1 else table.contiguous()
        self.keep = (starts, lengths, table)
        places = (t.data_ptr() for t in self.keep)
        self.handle = lib.make_attention_step(
            *places, table.stride(0), metadata.num_requests, metadata.block_size
        )


_layers: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def layer_of(spec: AttentionSpec, heads: int, kv_heads: int, key_dim: int, value_dim: int) -> Any:
    """The compiled module's view of a layer's constants, kept."""
    key = (id(spec), heads, kv_heads, key_dim, value_dim)
    found = _layers.get(key)
    if found is None:
        assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} KV heads"
        assert max(key_dim, value_dim) <= lib.MAX_HEAD_DIM, f"heads of {key_dim} and {value_dim}"
        if len(_layers) > _MOST_LAYERS:
            _layers.clear()
        extras = [
            None if x is None else x.to(torch.float32).contiguous()
            for x in (spec.alibi_slopes, spec.sinks)
        ]
        handle = lib.make_attention(
            heads,
            kv_heads,
            key_dim,
            value_dim,
            spec.scale,
            spec.softcap,
            spec.window or 0,
            *(0 if x is None else x.data_ptr() for x in extras),
        )
        # The specification is kept too, so that its id stays its own.
        found = _layers[key] = (handle, spec, extras)
    return found[0]


def _heads_together(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def cache_of(cache: Tensor, scale: float = 1.0) -> Any:
    """The compiled module's view of `[num_blocks, block_size, KVH, D + tail]`."""
    block, slot, head, _ = cache.stride()
    kind, scale = KEPT[cache.dtype], scale_of(cache, scale)
    return lib.make_cache(cache.data_ptr(), block, slot, head, kind, scale)


def write_kv(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """See `reference.write_kv`; negative slots are skipped, values may have no dimensions."""
    k, v, slots = _heads_together(k), _heads_together(v), slot_mapping.contiguous()
    lib.write_kv(_write(k, v, key_cache, value_cache, slots, scales))


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    rotation: Rotation,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `rope.rotary_write_kv`."""
    assert q.stride(2) == k.stride(2) == 1 and q.dtype == k.dtype, "turned where they are"
    v, slots, places = _heads_together(v), slot_mapping.contiguous(), positions.contiguous()
    table = rotation.table
    lib.rotary_write(
        _write(k, v, key_cache, value_cache, slots),
        q.data_ptr(),
        *q.stride()[:2],
        q.shape[1],
        places.data_ptr(),
        table.data_ptr(),
        table.shape[1],
        rotation.offset,
        rotation.interleaved,
    )
    return q, k


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.rotary`."""
    return rotary_partial(q, k, positions, cos_sin_table, False)


def rotary_partial(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_table: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """See `reference.rotary_partial`."""
    q, k = (
        q.clone(memory_format=torch.contiguous_format),
        k.clone(memory_format=torch.contiguous_format),
    )
    places, nowhere = positions.contiguous(), lib.make_cache(0, 0, 0, 0, CODES[k.dtype], 1.0)
    shape = (k.shape[0], *k.shape[1:], 0)
    lib.rotary_write(
        lib.make_kv_write(
            k.data_ptr(), *k.stride()[:2], 0, 0, 0, *shape, nowhere, nowhere, 1, 0, CODES[k.dtype]
        ),
        q.data_ptr(),
        *q.stride()[:2],
        q.shape[1],
        places.data_ptr(),
        cos_sin_table.data_ptr(),
        cos_sin_table.shape[1],
        0,
        interleaved,
    )
    return q, k


def _write(
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Any:
    assert k.dtype == v.dtype and key_cache.dtype == value_cache.dtype, "of one type each"
    return lib.make_kv_write(
        k.data_ptr(),
        *k.stride()[:2],
        v.data_ptr(),
        *v.stride()[:2],
        k.shape[0],
        *k.shape[1:],
        v.shape[2],
        cache_of(key_cache, scales[0]),
        cache_of(value_cache, scales[1]),
        key_cache.shape[1],
        slots.data_ptr(),
        CODES[k.dtype],
    )


OPS: Final[dict[str, Callable[..., Any]]] = {
    "paged_attention": paged_attention,
    "rotary": rotary,
    "rotary_partial": rotary_partial,
    "rotary_write_kv": rotary_write_kv,
    "write_kv": write_kv,
}
"""Operations that replace those of the reference."""
