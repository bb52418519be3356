"""Random numbers: published vectors, both implementations, and the distribution they give."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.sampling.philox import philox4x32, philox4x32_many, uniform, uniforms

# Known-answer vectors of Random123 (kat_vectors, "philox4x32 10").
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

word = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


@given(st.lists(st.tuples(*[word] * 6), min_size=1, max_size=20))
def test_numpy_gives_the_same_words(rows):
    table = np.array(rows, dtype=np.uint64)
    many = philox4x32_many(table[:, :4], table[:, 4:])
    assert [tuple(r) for r in many.tolist()] == [philox4x32(r[:4], r[4:]) for r in rows]


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40)), min_size=12, max_size=40)
)
def test_many_uniforms_equal_single_ones(pairs):
    seeds, positions = zip(*pairs, strict=True)
    assert uniforms(seeds, positions) == [uniform(s, p) for s, p in pairs]


def test_uniforms_lie_in_the_half_open_unit_interval_and_use_53_bits():
    numbers = uniforms([7] * 5000, range(5000))
    assert min(numbers) >= 0.0
    assert max(numbers) < 1.0
    assert max(int(u * 2**53) & 0xFF for u in numbers) == 0xFF
    # Mean and spread of a uniform number: 1/2 and 1/12.
    assert abs(np.mean(numbers) - 1 / 2) < 0.02
    assert abs(np.var(numbers) - 1 / 12) < 0.005


def test_seed_and_position_both_matter():
    numbers = {uniform(s, p) for s in (0, 1, 2**32, 2**62) for p in (0, 1, 2**32)}
    assert len(numbers) == 12


def test_sampled_tokens_follow_the_probabilities():
    probabilities = torch.tensor([0.05, 0.4, 0.0, 0.15, 0.3, 0.1])
    draws = 20_000
    params = SamplingParams(temperature=1.0, seed=11)
    request = RequestSampling.from_params(params, [], 6)
    # Output position is the number of tokens so far, so each row stands for another position.
    longest = np.zeros(draws, dtype=np.int32)
    meta = SamplingMetadata.build([request] * draws, [longest[:i] for i in range(draws)])
    logits = probabilities.clamp(min=1e-30).log().expand(draws, -1).clone()
    counts = np.bincount(Sampler()(logits, meta).token_ids, minlength=6)
    assert counts[2] == 0
    expected = probabilities.numpy() * draws
    chi_square = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in (0, 1, 3, 4, 5))
    # 4 degrees of freedom: 18.5 has a probability of 0.1 %; the seed is fixed.
    assert chi_square < 18.5
