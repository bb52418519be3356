"""Quantised weights: the canonical form, its checks, and the product that defines all others."""

from dataclasses import replace

import pytest
import torch

from quire.errors import ModelLoadError
from quire.kernels import reference
from quire.kernels.coded import KINDS, CodedWeight, concat
from quire.kernels.coded_linear import PreparedCoded, prepare_coded, quantise_rows
from quire.kernels.exact import sum_neighbours

N, K = 5, 96


def made(
    kind="int4",
    group=32,
    zeros=True,
    activations="int8",
    seed=0,
    n=N,
    k=K,
    order=None,
    minima=False,
):
    generator = torch.Generator().manual_seed(seed)
    row = KINDS[kind]
    groups = -(-k // group)
    if row.dtype.is_floating_point:
        codes = torch.randn(n, k, generator=generator).to(row.dtype)
    else:
        codes = torch.randint(row.lowest, row.highest + 1, (n, k), generator=generator)
        codes = codes.to(row.dtype)
    given = torch.randint(row.lowest, row.highest + 1, (n, groups), generator=generator)
    scales = torch.rand(n, groups, generator=generator) + 0.01
    if zeros is not True and zeros:
        given.fill_(zeros)  # one zero for all
    zeros = given.to(torch.int32) if zeros and not row.values else None
    least = torch.randn(n, groups, generator=generator) if minima else None
    return CodedWeight(kind, codes, scales, zeros, group, activations, order, least)


def test_dequantise_is_the_formula():
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    coded = made(group=40, order=order)
    weight = coded.dequantise()
    for n in range(N):
        for k in range(K):
            g = k // 40
            said = float(coded.codes[n, k]) - float(coded.zeros[n, g])
            want = torch.tensor(said) * coded.scales[n, g]
            assert weight[n, order[k]] == want


@pytest.mark.parametrize("kind", ["e2m1", "nf4", "iq4_nl"])
def test_tables_are_looked_up(kind):
    coded = replace(
        made(kind, activations="float"), codes=torch.arange(16).repeat(N, 6).to(torch.uint8)
    )
    assert coded.values()[0, :16].tolist() == list(torch.tensor(KINDS[kind].values))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "int5"}, "kind must be one of"),
        ({"codes": torch.zeros(N, K)}, "codes of kind int4 must be uint8"),
        ({"codes": torch.full((N, K), 16, dtype=torch.uint8)}, "codes must be 0 to 15, got 16"),
        ({"scales": torch.ones(N, 4)}, r"scales must be float32 \[5, 3\] for groups of 32"),
        ({"scales": torch.full((N, 3), torch.nan)}, "scales must be finite, got nan for row 0"),
        ({"scales": torch.full((N, 3), torch.inf)}, "scales must be finite, got inf"),
        ({"minima": torch.ones(N, 4)}, r"minima must be float32 \[5, 3\] for groups of 32"),
        ({"minima": torch.full((N, 3), -torch.inf)}, "minima must be finite, got -inf for row 0"),
        ({"zeros": torch.full((N, 3), 16)}, "zeros must be 0 to 15, got 16"),
        ({"zeros": torch.full((N, 3), -1)}, "zeros must be 0 to 15, got -1"),
        ({"zeros": torch.zeros(N, 2, dtype=torch.int32)}, "zeros must be integers"),
        ({"zeros": torch.zeros(N, 3)}, "zeros must be integers"),
        ({"group": 0}, "a group must have 1 to 96 columns"),
        ({"activations": "int4"}, "activations must be int8 or float"),
        ({"order": torch.zeros(K, dtype=torch.int64)}, "order must name each of the 96 columns"),
    ],
)
def test_what_is_no_weight_is_refused(change, said):
    with pytest.raises(ModelLoadError, match=said):
        replace(made(), **change)


def test_minima_are_taken_from_the_numbers():
    coded = made(minima=True)
    plain = replace(coded, minima=None).dequantise()
    assert torch.equal(coded.dequantise(), plain - coded.minima.repeat_interleave(32, 1))
    assert torch.equal(coded.in_groups_of(8).dequantise(), coded.dequantise())
    both = concat([coded, replace(coded, minima=None)])
    assert torch.equal(both.dequantise(), torch.cat((coded.dequantise(), plain)))


@pytest.mark.parametrize("kind", ["int8", "int4", "e2m1", "iq4_nl"])
def test_whole_numbers_fit_8_bits(kind):
    coded = made(kind, minima=True)
    assert torch.equal(coded.as_int8().dequantise(), coded.dequantise())
    with pytest.raises(ModelLoadError, match="kind nf4 are no whole numbers"):
        made("nf4", activations="float").as_int8()


def test_tables_that_are_no_whole_numbers_take_floats():
    with pytest.raises(ModelLoadError, match="activations must be float"):
        made("nf4")


def test_parts_become_one():
    one, other = made(group=32, seed=1), made(group=96, zeros=False, seed=2, n=3)
    both = concat((one, other))
    assert both.group == 32 and both.shape == (N + 3, K)
    want = torch.cat((one.dequantise(), other.dequantise()))
    assert torch.equal(both.dequantise(), want)
    with pytest.raises(ModelLoadError, match="the same kind"):
        concat((one, made("int8")))


def test_codes_of_rows():
    x = torch.tensor([[1.0, -2.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0], [1e-35, 0, 0, 0],
                      [1.0, torch.nan, 0, 0], [1.0, torch.inf, 0, 0]])  # fmt: skip
    codes, scales = quantise_rows(x)
    assert codes[0].tolist() == [64, -127, 32, 127]  # 63.5 and 31.75; ties to even
    assert codes[1:].count_nonzero() == 0
    assert scales[:3].tolist() == [torch.tensor(2.0).div(127).item(), 0, 0]
    assert scales[3:].isnan().all()


@pytest.mark.parametrize(
    ("kind", "group", "leaves"),
    [("int8", 96, 2), ("int8", 32, 1), ("int4", 16, 2), ("int4", 48, 2), ("e2m1", 32, 1),
     ("iq4_nl", 32, 1)],
)  # fmt: skip
def test_products_are_the_formula(kind, group, leaves):
    """With whole numbers of any length, in Python."""
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    coded = made(kind, group, order=order)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(9))
    layer = prepare_coded(coded, leaves=leaves)
    assert isinstance(layer, PreparedCoded)
    codes, row_scales = quantise_rows(x)
    step = KINDS[kind].step
    values = coded.values()
    length = K if group == K else K // leaves
    for t in range(3):
        for n in range(N):
            parts = []
            for first in range(0, K, length):
                total = torch.tensor(0.0)
                for begin in range(first, first + length, group):
                    whole = sum(
                        int(codes[t, order[k]]) * int(values[n, k] / step)
                        for k in range(begin, begin + group)
                    )
                    scale = coded.scales[n, begin // group] * step
                    total = total + torch.tensor(float(whole)) * scale
                parts.append(total * row_scales[t])
            want = sum_neighbours(parts)
            assert reference.linear(x, layer)[t, n] == want


def test_a_row_does_not_notice_others():
    coded = made("int8", 32)
    layer = prepare_coded(coded, torch.ones(N))
    x = torch.randn(70, K, generator=torch.Generator().manual_seed(9))
    whole = reference.linear(x, layer)
    assert all(torch.equal(reference.linear(x[i : i + 1], layer)[0], whole[i]) for i in range(70))


def test_a_row_that_is_not_finite_stays_so():
    layer = prepare_coded(made("int8", 96))
    x = torch.ones(2, K)
    x[1, 3] = torch.nan
    assert reference.linear(x, layer).isnan().all(1).tolist() == [False, True]
    assert reference.likeliest(x, layer)[1] == -1


def test_groups_across_leaves_are_refused():
    with pytest.raises(ModelLoadError, match="groups of 32 columns cross"):
        prepare_coded(made(group=32), leaves=2)


def test_float_activations_are_the_plain_product():
    coded = made("nf4", activations="float")
    x = torch.randn(3, K)
    plain = reference.prepare_linear(coded.dequantise())
    assert torch.equal(reference.linear(x, prepare_coded(coded)), reference.linear(x, plain))


def test_a_group_whose_sums_may_overflow_is_refused():
    prepare_coded(made("int8", 66_000, zeros=False, n=1, k=66_000))
    with pytest.raises(ModelLoadError, match="at most 66,000 columns.*got 66,001"):
        prepare_coded(made("int8", 66_001, zeros=False, n=1, k=66_001))
