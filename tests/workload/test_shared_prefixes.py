"""Which sequence another begins like, against comparing it with all of them."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.workload.shared_prefixes import LEAST_SHARED, Branches, SharedPrefixes

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


def test_hundreds_that_part_within_one_block() -> None:
    """A system prompt that ends within a block: thousands of sequences have its beginning, and
    some go on together for a few tokens more."""
    rng, system = random.Random(7), list(range(1000, 1022))
    prefixes, sequences = SharedPrefixes(b"salt", SIZE), []
    for number in range(1, 2500):
        question = [
            rng.choice((3, 5)) if rng.random() < 0.9 else rng.randrange(9) for _ in range(30)
        ]
        tokens = [*system, *question[: rng.randint(1, 30)]]
        sharing = prefixes.add(number, tokens)
        longest = max((common(tokens, other) for other in sequences), default=0)
        assert sharing.length == told(longest)
        assert not sharing.number or common(tokens, sequences[sharing.number - 1]) >= sharing.length
        sequences.append(tokens)


def test_of_blocks_that_begin_alike_the_oldest_go() -> None:
    branches = Branches(most=100)
    for number in range(1, 301):
        branches.add(number, array("q", [7, 7, 7, 7, number]))
        branches.add(1000 + number, array("q", [7, 7, 7, 7, number]))
        branches.add(1000 + number, array("q", [7, 7, 7]))
    assert len(branches) == 100
    assert branches.best(array("q", [7, 7, 7, 7, 201, 9])) == (201, 5)
    assert branches.best(array("q", [7, 7, 7, 7, 200, 9]))[1] == 4


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
    assert len(prefixes) == 50 and len(prefixes._next) == prefixes._num_blocks == 50
    assert prefixes.add(300, [199] * 100).length == 100
    assert prefixes.add(301, [1] * 100).length == 0
    for number in range(400, 600):  # all of them begin alike
        prefixes.add(number, [1, 1, 1, 1, number])
    held = sum(len(branches) for branches in prefixes._next.values())
    assert held == prefixes._num_blocks <= 50
