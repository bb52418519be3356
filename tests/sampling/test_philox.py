"""Random words: published vectors, and the plain integers of the slow twin."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slow_sampler
from quire.sampling.philox import philox4x32

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
    got = philox4x32(torch.tensor([counter]), torch.tensor([key]))
    assert tuple(got[0].tolist()) == slow_sampler.philox(counter, key) == expected


@given(st.lists(st.tuples(*[word] * 6), min_size=1, max_size=20))
def test_many_words_at_once_are_those_of_each(rows):
    table = torch.tensor(rows)
    many = philox4x32(table[:, :4], table[:, 4:])
    assert [tuple(r) for r in many.tolist()] == [slow_sampler.philox(r[:4], r[4:]) for r in rows]
