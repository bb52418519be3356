"""Codes of weights: against plain loops in float64."""

import pytest
import torch

from quantised_writers import packed
from quire.compress.codes import DAMPING, int4_codes, int8_codes
from quire.compress.writer import packed_codes

BF16 = torch.bfloat16


def weight(n=24, k=128, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(BF16).float()


def inputs(k=128, rows=400, seed=1):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    return torch.randn(rows, k, generator=generator) @ mixing


def value(codes):
    return codes.coded("int8").dequantise()


def test_int8_is_the_nearest_of_255_steps():
    w = weight()
    w[3] = 0
    codes = int8_codes(w, BF16)
    assert codes.scales.dtype == BF16 and codes.codes.abs().max() == 127
    # The scale is rounded to 8 bits: what is then beyond the last code is cut off.
    assert bool(((value(codes) - w).abs() <= codes.scales.float() * 0.5001 + 0.004 * w.abs()).all())
    assert not value(codes)[3].any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_has_the_least_error_of_the_scales_that_are_tried(group):
    w = weight()
    codes = int4_codes(w, group, BF16)
    assert codes.codes.min() >= -8 and codes.codes.max() <= 7
    error = (value(codes) - w).square().sum()
    scales = w.unflatten(1, (-1, group))
    largest = scales.gather(2, scales.abs().argmax(2, keepdim=True)) / -8
    plain = (scales / largest.to(BF16).float()).round().clamp(-8, 7) * largest.to(BF16).float()
    assert error < 0.95 * (plain.flatten(1) - w).square().sum()


def slow_gptq(w, hessian, group, scales):
    """As the paper has it: column by column, the whole rest of each row updated at once."""
    w, h = w.double().clone(), hessian.double().clone()
    k = w.shape[1]
    h += torch.eye(k) * DAMPING * h.diagonal().mean()
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    out = torch.empty_like(w)
    for j in range(k):
        s = scales[:, j // group].double()
        out[:, j] = (w[:, j] / s).round().clamp(-8, 7) * s
        w[:, j:] -= torch.outer((w[:, j] - out[:, j]) / upper[j, j], upper[j, j:])
    return out


@pytest.mark.parametrize("group", [32, 128])
def test_errors_are_carried_as_in_the_paper(group):
    w, x = weight(), inputs()
    hessian = x.t() @ x
    codes = int4_codes(w, group, BF16, hessian)
    wanted = slow_gptq(w, hessian, group, codes.scales.float())
    same = (value(codes).double() - wanted).abs() < 1e-6
    assert same.double().mean() > 0.995, "but for numbers halfway between two codes"


def test_the_product_is_nearer_with_errors_carried():
    w, x = weight(64, 256), inputs(256, 2000)
    want, held = x @ w.t(), inputs(256, 500, seed=1) @ w.t()
    hessian = x.t() @ x
    plain, carried = (value(int4_codes(w, 64, BF16, h)) for h in (None, hessian))
    assert (x @ carried.t() - want).square().sum() < 0.75 * (x @ plain.t() - want).square().sum()
    other = inputs(256, 500, seed=1)
    assert (other @ carried.t() - held).square().sum() < (other @ plain.t() - held).square().sum()


def test_inputs_that_are_always_zero_or_alike():
    w = weight()
    hessian = torch.zeros(128, 128)
    assert torch.isfinite(value(int4_codes(w, 32, BF16, hessian))).all()
    one = torch.ones(128, 128)
    assert torch.isfinite(value(int4_codes(w, 32, BF16, one))).all()


def test_packing_is_that_of_the_format():
    codes = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed_codes(codes.to(torch.int8), 4), packed(codes + 8, 4))


def test_packing_of_eight_bits_fills_the_last_word_up():
    codes = torch.randint(-128, 128, (5, 66), generator=torch.Generator().manual_seed(0))
    words = packed_codes(codes.to(torch.int8), 8)
    assert words.shape == (5, 17)
    found = (words.to(torch.int64)[..., None] >> torch.arange(0, 32, 8) & 255).flatten(1) - 128
    assert torch.equal(found[:, :66], codes)
