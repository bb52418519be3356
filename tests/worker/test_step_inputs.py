"""A step's flat inputs against a plain twin: steps of one token each, chunks, and both together."""

import random

import pytest

from quire.core.batch import ScheduledNewRequest
from quire.params import SamplingParams
from quire.worker.input_batch import ROOM, InputBatch

BLOCK = 4


def filled(rng):
    """Requests with random tokens, blocks and progress; by name their tokens, blocks, computed."""
    state, known = InputBatch(8, 64, BLOCK, 1000), {}
    for number in range(6):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(2, 20))]
        output = [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
        blocks = [rng.randrange(1, 500) for _ in range(16)]
        tokens = prompt + output
        computed = rng.choice([len(tokens) - 1, rng.randrange(len(tokens) - 1)])
        params = SamplingParams(seed=1)
        state.add(ScheduledNewRequest(f"r{number}", prompt, output, params, (blocks,), computed))
        known[f"r{number}"] = tokens, blocks, computed
    return state, known


@pytest.mark.parametrize("kind", ["one each", "chunks", "both"])
def test_inputs_are_those_of_the_plain_twin(kind):
    rng, stalled = random.Random(kind), 0
    for _ in range(200):
        state, known = filled(rng)
        ids = rng.sample(sorted(known), rng.randint(1, 6))
        left = [len(known[i][0]) - known[i][2] for i in ids]
        one = [1] * len(ids)
        chunks = [rng.randint(1, n) for n in left]
        both = [rng.choice(pair) for pair in zip(one, chunks, strict=True)]
        counts = {"one each": one, "chunks": chunks, "both": both}[kind]
        got = state.select(ids, counts)
        ids_of, positions, request, slots, starts, wanted, wanted_starts = (
            [],
            [],
            [],
            [],
            [0],
            [],
            [0],
        )
        unfinished = []
        for index, (name, count) in enumerate(zip(ids, counts, strict=True)):
            tokens, blocks, computed = known[name]
            for position in range(computed, computed + count):
                ids_of.append(tokens[position])
                positions.append(position)
                request.append(index)
                slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
            starts.append(len(ids_of))
            wanted.append(len(ids_of) - 1)
            wanted_starts.append(len(wanted))
            if computed + count < len(tokens):
                unfinished.append(index)
        assert got.input_ids.tolist() == ids_of and got.positions.tolist() == positions
        assert got.token_request.tolist() == request and got.query_start_loc.tolist() == starts
        assert got.slot_mappings[0].tolist() == slots
        assert got.seq_lens.tolist() == [known[i][2] + n for i, n in zip(ids, counts, strict=True)]
        assert got.wanted.tolist() == wanted and got.wanted_start_loc.tolist() == wanted_starts
        assert got.chunks.tolist() == unfinished
        ended = [known[i][2] + n == len(known[i][0]) for i, n in zip(ids, counts, strict=True)]
        assert got.samples == [int(end) for end in ended]
        assert got.rows == [state.row_of[i] for i in ids]
        width = max(got.seq_lens.tolist() + [1])
        tables = [known[i][1][: -(-width // BLOCK)] for i in ids]
        assert got.block_tables[0].tolist() == tables
        sampled = [index for index in range(len(ids)) if index not in unfinished]
        assert (got.sampled is None) == (not unfinished)
        assert got.sampled is None or got.sampled.tolist() == sampled
        stalled += 0 < len(unfinished) < len(ids)
    assert stalled > 20, "some sample and some do not"


@pytest.mark.parametrize("computed", [3, 4])
def test_a_last_token_without_a_block_is_our_bug(computed):
    state = InputBatch(8, 64, BLOCK, 1000)
    prompt, params = [7] * (computed + 1), SamplingParams(seed=1)
    state.add(ScheduledNewRequest("r", prompt, [], params, ([9],), computed))
    if computed < BLOCK:
        assert state.select(["r"], [1]).slot_mappings[0].tolist() == [9 * BLOCK + computed]
    else:
        with pytest.raises(AssertionError, match="null block"):
            state.select(["r"], [1])


def test_no_more_rows_at_first_than_memory_could_hold() -> None:
    batch = InputBatch(2**20, 2**17, 16, 100)
    rows = len(batch.sampling)
    assert rows == ROOM // (2**17 + 1) == len(batch.token_ids) < 2**20
    assert len(InputBatch(7, 2**31 - 1, 2**20, 100).sampling) == 1
    assert len(InputBatch(7, 100, 16, 100).sampling) == 7
