"""Which sequence another begins like, against comparing it with all of them."""

from __future__ import annotations

import random

import pytest

from quire.workload.shared_prefixes import LEAST_SHARED, SharedPrefixes

SIZE = 16


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def told(count: int) -> int:
    """A few tokens of the last block are not told, because nothing depends on them."""
    return count if count % SIZE >= LEAST_SHARED else count - count % SIZE


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_common_beginning_is_found(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = SharedPrefixes(b"salt", SIZE)
    sequences: dict[int, list[int]] = {}
    for number in range(1, 150):
        base = rng.choice([[], *sequences.values()])
        tokens = base[: rng.randint(0, len(base))] + [
            rng.randrange(50_000) for _ in range(rng.randint(1, 70))
        ]
        sharing = prefixes.add(number, tokens)
        longest = max((common(tokens, other) for other in sequences.values()), default=0)
        assert sharing.length == told(longest)
        if sharing.number:
            assert common(tokens, sequences[sharing.number]) >= sharing.length
        assert len(sharing.block_hashes) == len(tokens) // SIZE
        sequences[number] = tokens


def test_hashes_are_equal_as_far_as_tokens_are_and_depend_on_the_salt() -> None:
    a, b = list(range(100)), [*range(40), *range(900, 960)]
    prefixes = SharedPrefixes(b"one", SIZE)
    first, second = prefixes.add(1, a).block_hashes, prefixes.add(2, b).block_hashes
    assert common([int(h, 16) for h in first], [int(h, 16) for h in second]) == 2
    assert not {*SharedPrefixes(b"two", SIZE).add(1, a).block_hashes} & {*first}


def test_other_keys_share_nothing() -> None:
    prefixes = SharedPrefixes(b"salt", SIZE)
    prefixes.add(1, list(range(100)), "a")
    assert prefixes.add(2, list(range(100)), "b").length == 0
    assert prefixes.add(3, list(range(100)), "a")[1:] == (1, 100)


def test_memory_is_bounded() -> None:
    prefixes = SharedPrefixes(b"salt", SIZE, most_blocks=50)
    for number in range(1, 200):
        prefixes.add(number, [number] * 100)
    assert len(prefixes) == 50 and len(prefixes._next) == 50
    assert prefixes.add(300, [199] * 100).length == 100
    assert prefixes.add(301, [1] * 100).length == 0
