"""Slopes and rounded biases of ALiBi are those of transformers, for any number of heads."""

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from quire.layers.alibi import RoundedBiases, alibi_slopes


@pytest.mark.parametrize("heads", [*range(1, 20), 24, 25, 32, 40, 48, 64, 71, 96, 112])
def test_slopes(heads):
    want = modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(alibi_slopes(heads), want, rtol=1e-6, atol=0)
    for bias_max in (4, 8, 16):
        want = -build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]
        torch.testing.assert_close(alibi_slopes(heads, 1.0, bias_max), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(5, 5), (12, 12), (71, 71), (64, 64), (6, 2), (7, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_biases(heads, kv_heads, dtype):
    """The query of each head picks its own bias out of the key, bit for bit."""
    length = 3000
    want = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, dtype).squeeze(1)
    biases = RoundedBiases(heads, kv_heads)
    q = biases.queries(torch.zeros(1, heads, 4, dtype=dtype))
    k = biases.keys(torch.ones(length, kv_heads, 4, dtype=dtype), torch.arange(length))
    assert q.dtype == k.dtype == dtype
    assert k.shape[-1] == q.shape[-1] == 4 + biases.width and biases.width % 2 == 0
    q = q[0].view(kv_heads, heads // kv_heads, -1).double()
    got = torch.einsum("kgd,tkd->kgt", q, k.double()).flatten(0, 1)
    assert torch.equal(got, want.double())
