"""A decoder as data, for kernels that compute all its layers in one call.

`ops.fuse_decoder` takes a `DecoderParts` and gives a function that runs it, or `None` if the
chosen kernels have no such thing: then the model goes layer by layer, with the same bits. Knows
no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata
    from quire.kernels.request_rows import LastTokens


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
    embedding: Any = None
    """What tokens become before the first layer: rows of this linear layer, or of this tensor
    `[V, H]`; `None`: something else."""


Penalties = tuple[int, int, int, float, float, float]
"""Of the tokens that a request has seen: addresses of their ids (int64, each once) and of how often
each stands in the output (float32), how many they are; repetition, frequency, presence."""
Pick = tuple[tuple[float, float, float, float], int, int, Penalties]
"""How a token is picked, as `pick_tokens` takes it: numbers, seed, output tokens so far; and what
is done to its logits before."""
NOT_FINITE: Final = -1
OUT_OF_RANGE: Final = -2
"""In place of a token: some logit is not finite; after penalties, no largest one is."""


@dataclass(frozen=True, slots=True)
class NextTokens:
    """What comes after a step in which each request computes one token."""

    token_ids: list[int]
    """Of each request, or what is wrong with its logits."""
    head_seconds: float
    """Part of the step's time."""


@dataclass(frozen=True, slots=True)
class NextLogits:
    """The same before anything is picked."""

    logits: Tensor
    """float32 `[requests, vocab]`, valid until the next step."""
    head_seconds: float


class DecoderRun(Protocol):
    """All layers in one call."""

    def __call__(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Embedded tokens `[T, H]` (overwritten) and positions `[T]` to `[W, H]` after the final
        norm, `[T, H]` if the step wants all."""
        ...

    def tokens_after(
        self, last: LastTokens, head: Any, picks: list[Pick] | None
    ) -> NextTokens | None:
        """The next token of each of some requests: the last one's embedding, all layers, the head
        and the pick in one call. `None`: not with these parts.

        Args:
            last: After which tokens.
            head: As `prepare_linear` made it.
            picks: Of each; `None`: the likeliest of all, whose logits are never in memory.

        Raises:
            IndexError: a request has no token or no block there, or the token no embedding.
        """
        ...

    def logits_after(self, last: LastTokens, head: Any) -> NextLogits | None:
        """`tokens_after` without the pick."""
        ...


def fuse_decoder(parts: DecoderParts) -> DecoderRun | None:
    """The plain kernels go layer by layer."""
    del parts
    return None
