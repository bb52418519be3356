"""Operations of encoders against torch, and a row's bits in any batch."""

import pytest
import torch

from quire.kernels.dispatch import ops


def bits(x):
    return x.contiguous().view(torch.int32)


def request_of(length, heads=3, dim=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, length, heads, dim, generator=generator).unbind(0)


def attend(*requests, window=None):
    q, k, v = (torch.cat(parts) for parts in zip(*requests, strict=True))
    loc = torch.tensor([0, *(len(r[0]) for r in requests)]).cumsum(0).to(torch.int32)
    return ops.encoder_attention(q, k, v, loc, 0.3, window).split([len(r[0]) for r in requests])


@pytest.mark.parametrize("window", [None, 0, 5, 64, 700])
@pytest.mark.parametrize("length", [1, 33, 513, 1100])
def test_attention_matches(length, window):
    q, k, v = request_of(length)
    (got,) = attend((q, k, v), window=window)
    far = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    mask = None if window is None else far <= window
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(got, want.transpose(0, 1), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_company_does_not_show(window):
    requests = [request_of(n, seed=n) for n in (40, 1, 7, 600, 64)]
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 0)):
        together = attend(*(requests[i] for i in order), window=window)
        for i, got in zip(order, together, strict=True):
            (alone,) = attend(requests[i], window=window)
            assert torch.equal(bits(got), bits(alone))


def test_a_request_never_sees_another():
    mine, other = request_of(9), request_of(5, seed=1)
    spoiled = tuple(torch.full_like(x, torch.nan) for x in other)
    got = attend(spoiled, mine, spoiled)[1]
    assert torch.equal(bits(got), bits(attend(mine)[0]))


def test_elementwise_functions_match():
    x = torch.cat((torch.linspace(-8, 8, 40001), torch.tensor([0.0, -0.0, 1e-20, 50.0, -50.0])))
    torch.testing.assert_close(ops.gelu(x), torch.nn.functional.gelu(x), atol=2e-6, rtol=0)
    torch.testing.assert_close(ops.tanh(x), torch.tanh(x), atol=2e-7, rtol=0)
    assert ops.gelu(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 48, 100, 769])
def test_layer_norm_matches(size, bias):
    x, weight = torch.randn(5, size) * 3 + 1, torch.randn(size)
    shift = torch.randn(size) if bias else None
    want = torch.nn.functional.layer_norm(x, (size,), weight, shift, 1e-5)
    torch.testing.assert_close(ops.layer_norm(x, weight, shift, 1e-5), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", ["gelu", "tanh", "layer_norm"])
def test_the_place_of_a_row_does_not_show(op):
    rows = torch.randn(37, 51)
    weight = torch.randn(51)

    def run(x):
        return (
            ops.layer_norm(x, weight, weight, 1e-5) if op == "layer_norm" else getattr(ops, op)(x)
        )

    together = run(rows)
    for i in range(37):
        assert torch.equal(bits(run(rows[i : i + 1].clone())), bits(together[i : i + 1]))


def test_short_types_round_once():
    x = torch.randn(4, 32).to(torch.bfloat16)
    weight = torch.randn(32)
    want = ops.layer_norm(x.float(), weight, None, 1e-5).to(torch.bfloat16)
    assert torch.equal(ops.layer_norm(x, weight, None, 1e-5), want)
    assert torch.equal(ops.gelu(x), ops.gelu(x.float()).to(torch.bfloat16))
