"""Paged attention: right against a dense one, and the same bits however a request is served."""

import dataclasses
import random

import pytest
import torch

from kernel_kit import same
from quire.kernels import paged
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.dispatch import ops

HEADS = {"MHA": (4, 4, 16), "GQA": (8, 2, 32), "MQA": (5, 1, 24), "wide": (8, 8, 64)}


class Request:
    """Random q, k, v of one request."""

    def __init__(self, length, heads, seed, dtype=torch.float32):
        h, kv, d = HEADS[heads]
        generator = torch.Generator().manual_seed(seed)

        def draw(n):
            return (torch.randn(length, n, d, generator=generator) * 2).to(dtype)

        self.length, self.q, self.k, self.v = length, draw(h), draw(kv), draw(kv)

    def dense(self):
        """Causal attention in float64."""
        q, k, v = (x.double().transpose(0, 1) for x in (self.q, self.k, self.v))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def serve(requests, rng, block_size, chunk, garbage=float("nan")):
    """Serve requests from scattered blocks of a cache full of garbage, `chunk()` tokens a time.

    Returns each request's rows.
    """
    needs = [-(-r.length // block_size) for r in requests]
    free = list(range(sum(needs) + 3))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in needs]
    kv, dim = requests[0].k.shape[1:]
    dtype = requests[0].q.dtype
    cache = torch.full((2, sum(needs) + 3, block_size, kv, dim), garbage, dtype=dtype)
    rows, done = [[] for _ in requests], [0] * len(requests)
    while any(d < r.length for d, r in zip(done, requests, strict=True)):
        open_ = [i for i, r in enumerate(requests) if done[i] < r.length]
        rng.shuffle(open_)
        parts = {i: slice(done[i], min(done[i] + chunk(), requests[i].length)) for i in open_}
        out = step(requests, tables, parts, cache, block_size)
        for i, got in out.items():
            rows[i].append(got)
            done[i] = parts[i].stop
    return [torch.cat(r) for r in rows]


def step(requests, tables, parts, cache, block_size):
    metadata = AttentionMetadata.build(
        [p.stop - p.start for p in parts.values()],
        [p.stop for p in parts.values()],
        # Table entries that are not the request's own must not be read.
        [tables[i][: -(-p.stop // block_size)] for i, p in parts.items()],
        block_size,
    )
    q, k, v = (
        torch.cat([getattr(requests[i], name)[p] for i, p in parts.items()]) for name in "qkv"
    )
    ops.write_kv(k, v, cache[0], cache[1], metadata.slot_mapping)
    out = ops.paged_attention(q, cache[0], cache[1], metadata, AttentionSpec(q.shape[-1] ** -0.5))
    lengths = [p.stop - p.start for p in parts.values()]
    return dict(zip(parts, out.split(lengths), strict=True))


def alone(request, block_size=16):
    return serve([request], random.Random(0), block_size, lambda: request.length)[0]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_dense_attention(heads, dtype):
    for length in (1, 5, 64, 65, 200):
        request = Request(length, heads, length, dtype)
        tolerance = 3e-5 if dtype == torch.float32 else 2e-2
        got = alone(request)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), request.dense(), atol=tolerance, rtol=tolerance)


def test_matches_dense_attention_over_several_segments():
    request = Request(1300, "GQA", 0)
    torch.testing.assert_close(alone(request).double(), request.dense(), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_however_it_is_served(heads, threads):
    """Blocks, strangers, cuts, garbage and thread counts change nothing."""
    rng = random.Random(heads)
    subject = Request(150, heads, 7)
    want = alone(subject)
    torch.set_num_threads(threads)
    for block_size in (8, 16, 64, 128) if threads == 1 else (32,):
        strangers = [Request(rng.choice([1, 20, 130]), heads, i) for i in range(3)]
        limit = rng.choice([15, 60, 200]) if threads == 1 else 60
        requests = [*strangers, subject]
        rng.shuffle(requests)
        garbage = rng.choice([float("nan"), float("inf"), 1e30])
        got = serve(requests, rng, block_size, lambda n=limit: rng.randint(1, n), garbage)
        assert same(got[requests.index(subject)], want), (block_size, limit)


def test_same_bits_token_by_token_across_segments():
    """Decode agrees with prefill where the online softmax rescales."""
    subject = Request(1100, "GQA", 3)
    want = alone(subject)
    rng = random.Random(1)
    tables = [list(range(200))]
    cache = torch.zeros(2, 200, 8, 2, 32)
    step([subject], tables, {0: slice(0, 1015)}, cache, 8)
    for position in range(1015, 1035):
        got = step([subject], tables, {0: slice(position, position + 1)}, cache, 8)[0]
        assert same(got[0], want[position]), position
    others = [Request(n, "GQA", n) for n in (30, 1090)]
    got = serve([*others, subject], rng, 32, lambda: rng.choice([100, 500, 37]))
    assert same(got[-1], want)


def test_bfloat16_rows_have_the_same_bits_too():
    subject = Request(130, "GQA", 5, torch.bfloat16)
    rng = random.Random(2)
    strangers = [Request(n, "GQA", n, torch.bfloat16) for n in (40, 129)]
    got = serve([strangers[0], subject, strangers[1]], rng, 32, lambda: rng.randint(1, 30))[1]
    assert same(got, alone(subject))


def test_table_entries_past_a_request_are_not_used():
    request = Request(20, "GQA", 4)
    metadata = AttentionMetadata.build([20], [20], [[1, 0, 2]], 8)
    cache = torch.full((2, 3, 8, 2, 32), float("nan"))
    ops.write_kv(request.k, request.v, cache[0], cache[1], metadata.slot_mapping)
    want = alone(request)
    for junk in (-1, 10**6):
        table = torch.tensor([[1, 0, 2, junk, junk]], dtype=torch.int32)
        wide = dataclasses.replace(metadata, block_table=table, scratch={})
        got = ops.paged_attention(request.q, cache[0], cache[1], wide, AttentionSpec(32**-0.5))
        assert same(got, want)


def test_a_strangers_nan_stays_with_the_stranger():
    subject, stranger = Request(70, "GQA", 1), Request(70, "GQA", 2)
    stranger.k[3], stranger.v[5] = float("nan"), float("inf")
    got = serve([stranger, subject], random.Random(3), 16, lambda: 23)
    assert same(got[1], alone(subject))
    assert got[0][-1].isnan().all()


def test_a_row_on_the_edge_of_memory_budgets(monkeypatch):
    """Tiny budgets split the batch differently; nothing may change."""
    from quire.kernels import paged_plan

    subject = Request(150, "GQA", 9)
    want = alone(subject)
    monkeypatch.setattr(paged_plan, "_SCORE_BUDGET", 1)
    monkeypatch.setattr(paged_plan, "_KV_BUDGET", 1)
    got = serve([Request(90, "GQA", 8), subject], random.Random(4), 16, lambda: 64)
    assert same(got[1], want)


def test_a_fickle_library_is_called_token_by_token(monkeypatch):
    honest, said = torch.bmm, []

    def bmm(a, b, *, out):
        honest(a, b, out=out)
        place = torch.arange(out.shape[1], dtype=torch.int32).view(1, -1, 1)
        return out.copy_((out.view(torch.int32) + place).view(torch.float32))

    monkeypatch.setattr(paged.torch, "bmm", bmm)
    monkeypatch.setattr(paged.logger, "warning", lambda text, *a: said.append(text % a))
    paged.tokens_per_tile.cache_clear()
    try:
        assert paged.tokens_per_tile(2, 4, 32, 32, torch.device("cpu"), 1) == 1
        assert "2 KV heads of 32" in said[0]
        subject = Request(90, "GQA", 1)
        got = serve([Request(40, "GQA", 2), subject], random.Random(5), 8, lambda: 17)[1]
        assert same(got, alone(subject))
        torch.testing.assert_close(got.double(), subject.dense(), atol=1e-5, rtol=1e-5)
    finally:
        paged.tokens_per_tile.cache_clear()
