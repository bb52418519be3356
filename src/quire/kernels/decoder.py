"""A decoder as data, for kernels that compute all its layers in one call.

`ops.fuse_decoder` takes a `DecoderParts` and gives a function that runs it, or `None` if the
chosen kernels have no such thing: then the model goes layer by layer, with the same bits. Knows
no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, eq=False)
class NormParts:
    """Constants of a norm."""

    kind: str
    """`rms`, `rms_wide` or `layer`: the operation `rms_norm`, `rms_norm_wide` or `layer_norm`."""
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """Constants of grouped-query attention. Linear layers are as `prepare_linear` made them."""

    qkv: Any
    out: Any
    heads: tuple[int, int, int]
    """Query heads, KV heads, dimensions of a head."""
    spec: AttentionSpec
    q_norm: NormParts | None
    """Over each head."""
    k_norm: NormParts | None
    rope_table: Tensor | None
    interleaved: bool


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A layer of norm, attention, norm and gated MLP, both added to the stream."""

    before_attention: NormParts
    before_mlp: NormParts
    attention: AttentionParts
    gate_up: Any
    down: Any
    activation: str
    """As `gated_linear` calls it."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderParts:
    """All layers, and the norm after the last."""

    layers: Sequence[LayerParts]
    final_norm: NormParts
    size: int
    """Width of the residual stream."""
    dtype: torch.dtype
    """Of activations."""
    kv_caches: Sequence[KVCache]


DecoderRun = Callable[[Tensor, Tensor, "AttentionMetadata"], Tensor]
"""Embedded tokens `[T, H]` (overwritten), positions `[T]` and the step to `[W, H]` after the
final norm, `[T, H]` if the step wants all."""


def fuse_decoder(parts: DecoderParts) -> DecoderRun | None:
    """The plain kernels go layer by layer."""
    del parts
    return None
