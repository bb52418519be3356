"""Values that are the beginning of the keys: as if they were stored, but they are not."""

import torch

from quire.attention.kv_cache import allocate_kv_cache, kv_cache_bytes
from quire.attention.paged import PagedAttention
from quire.config.shape import LayerKV
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.dispatch import default_ops

HEADS, LATENT, ROPE, TOKENS = 4, 20, 8, 90


def attend(layer, spec, values):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(TOKENS, HEADS, LATENT + ROPE, generator=generator)
    k = torch.randn(TOKENS, 1, LATENT + ROPE, generator=generator)
    (cache,) = allocate_kv_cache([layer], 8, 16, "float32", "cpu")
    for tensor in cache:
        tensor.fill_(torch.nan)
    blocks = [[6, 2, 1, 7, 4, 3]]
    metadata = AttentionMetadata.build([TOKENS], [TOKENS], blocks, 16)
    return PagedAttention(default_ops()).forward(q, k, k[..., :values], cache, metadata, spec)


def test_the_beginning_of_keys_serves_as_values():
    stored = attend(LayerKV(1, LATENT + ROPE, LATENT), AttentionSpec(0.2), LATENT)
    latent = attend(LayerKV(1, LATENT + ROPE, 0), AttentionSpec(0.2, latent_dim=LATENT), 0)
    assert latent.shape == (TOKENS, HEADS, LATENT)
    assert latent.isfinite().all()
    assert torch.equal(latent, stored)


def test_only_the_keys_take_memory():
    layers = [LayerKV(1, 576, 0)] * 3
    caches = allocate_kv_cache(layers, 5, 16, "bfloat16", "cpu")
    assert [tuple(values.shape) for _, values in caches] == [(5, 16, 1, 0)] * 3
    assert sum(t.nbytes for pair in caches for t in pair) == 3 * 5 * 16 * 576 * 2
    assert kv_cache_bytes(layers, 5, 16, "bfloat16") == 3 * 5 * 16 * 576 * 2
