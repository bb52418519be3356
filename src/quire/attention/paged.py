"""Attention by the model's kernels: their `write_kv` and `paged_attention`.

Runs wherever torch runs. Knows nothing of models.
"""

from __future__ import annotations

from torch import Tensor

from quire.attention.base import FEATURES, Capabilities
from quire.config.shape import KV_DTYPES
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import KVCache
from quire.kernels.dispatch import Ops


class PagedAttention:
    """Paged causal attention with the same bits for a row in any batch."""

    name = "paged"
    can_fuse = True
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset(FEATURES),
        cache_dtypes=frozenset(KV_DTYPES),
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        key_cache, value_cache = kv_cache.key, kv_cache.value
        slots, scales = metadata.slot_mapping, spec.kv_scales
        self._ops.write_kv(k, v, key_cache, value_cache, slots, scales)
        if spec.latent_dim is not None:
            value_cache = key_cache
        return self._ops.paged_attention(q, key_cache, value_cache, metadata, spec)
