"""The contract of an attention backend, with its capabilities as data.

Knows no implementation; `select.py` holds the table of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache
from quire.kernels.dispatch import Ops

FEATURES: Final = ("window", "softcap", "alibi", "sinks", "value_dim", "latent")
"""What attention may do besides softmax(q k) v; `value_dim`: values narrower than keys; `latent`:
values that are the beginning of the keys, so that the value cache is empty."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What a model asks of attention on a device."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Type of activations, and of KV caches that have none of their own."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: frozenset[str] = frozenset()
    """Of `FEATURES`."""
    cache_dtypes: frozenset[str] = frozenset()
    """Types of KV caches that are not the model's (`LayerKV.dtype`)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. `None` means no limit."""

    devices: frozenset[str]
    dtypes: frozenset[str]
    head_dims: frozenset[int] | None = None
    features: frozenset[str] = frozenset()
    """What of `AttentionNeed.features` there is."""
    cache_dtypes: frozenset[str] = frozenset()
    """What of `AttentionNeed.cache_dtypes` there is."""

    def refusal(self, need: AttentionNeed) -> str | None:
        """Why the backend cannot serve `need`, or `None` if it can."""
        if need.device not in self.devices:
            return f"runs on {_listed(self.devices)}, not on {need.device}"
        if need.dtype not in self.dtypes:
            return f"computes with {_listed(self.dtypes)}, not with {need.dtype}"
        if self.head_dims is not None and need.head_dim not in self.head_dims:
            return f"has heads of {_listed(self.head_dims)}, not of {need.head_dim}"
        if missing := need.features - self.features:
            return f"does not do {_listed(missing)}"
        if others := need.cache_dtypes - self.cache_dtypes:
            return f"reads no KV cache in {_listed(others)}"
        return None


class AttentionBackend(Protocol):
    """One way to compute attention. Backends hold no state between steps."""

    name: str
    can_fuse: bool
    """Whether `ops.fuse_decoder` computes the same, so that a step may do without the backend."""
    capabilities: Capabilities

    def __init__(self, ops: Ops) -> None:
        """`ops` are the model's."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """Store `k [T, KVH, K]`, `v [T, KVH, V]`, then attend with `q [T, H, K]`: `[T, H, V]`.

        Every token sees its own request up to and including itself, within the window of `spec`.
        """
        ...


def _listed(values: frozenset[str] | frozenset[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))
