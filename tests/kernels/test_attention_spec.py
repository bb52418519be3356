"""Windows, caps, slopes, sinks and narrow values: right, and the same bits however served."""

import random

import pytest
import torch

from quire.attention.base import FEATURES, AttentionNeed
from quire.attention.select import select_backend
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.dispatch import ops

HEADS, KV_HEADS, KEY = 6, 2, 24
SCALE = KEY**-0.5
NOWHERE = 10**6
SLOPES = torch.linspace(0.02, 0.9, HEADS)
SINKS = torch.linspace(-2.0, 5.0, HEADS)
SPECS = {
    "window": (AttentionSpec(SCALE, window=40), KEY),
    "window of one": (AttentionSpec(SCALE, window=1), KEY),
    "window of a span": (AttentionSpec(SCALE, window=64), KEY),
    "softcap": (AttentionSpec(SCALE, softcap=2.0), KEY),
    "alibi": (AttentionSpec(SCALE, alibi_slopes=SLOPES), KEY),
    "sinks": (AttentionSpec(SCALE, sinks=SINKS), KEY),
    "narrow values": (AttentionSpec(SCALE), 10),
    "wide values": (AttentionSpec(SCALE), 40),
    "all": (
        AttentionSpec(SCALE, window=30, softcap=3.0, alibi_slopes=SLOPES, sinks=SINKS),
        20,
    ),
}


def bits(x):
    return x.contiguous().view(torch.int32)


class Request:
    def __init__(self, length, value_dim, seed):
        g = torch.Generator().manual_seed(seed)
        self.length = length
        self.q = torch.randn(length, HEADS, KEY, generator=g) * 2
        self.k = torch.randn(length, KV_HEADS, KEY, generator=g) * 2
        self.v = torch.randn(length, KV_HEADS, value_dim, generator=g)

    def dense(self, spec):
        """In float64, from the formulas."""
        q, k, v = (x.double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * spec.scale
        place = torch.arange(self.length)
        distance = place - place.unsqueeze(1)
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if spec.alibi_slopes is not None:
            scores = scores + spec.alibi_slopes.double().view(-1, 1, 1) * distance
        hidden = distance > 0
        if spec.window:
            hidden |= distance <= -spec.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.double().view(-1, 1, 1).expand(-1, self.length, 1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., : self.length] @ v).transpose(0, 1)


def serve(requests, spec, rng, block_size, chunk, forget=False):
    """Serve from scattered blocks of a cache full of NaN, `chunk()` tokens of each a time.

    With `forget`, blocks that lie before the window of all coming rows are taken away.
    """
    tables, need = [], 0
    for r in requests:
        count = -(-r.length // block_size)
        tables.append(list(range(need, need + count)))
        need += count
    order = rng.sample(range(need), need)
    tables = [[order[b] for b in table] for table in tables]
    value_dim = requests[0].v.shape[2]
    keys = torch.full((need, block_size, KV_HEADS, KEY), torch.nan)
    values = torch.full((need, block_size, KV_HEADS, value_dim), torch.nan)
    rows, done = [[] for _ in requests], [0] * len(requests)
    while any(d < r.length for d, r in zip(done, requests, strict=True)):
        turn = [i for i, r in enumerate(requests) if done[i] < r.length]
        rng.shuffle(turn)
        parts = {i: slice(done[i], min(done[i] + chunk(), requests[i].length)) for i in turn}
        if forget:
            for i, part in parts.items():
                for block in range(max(0, part.start - spec.window + 1) // block_size):
                    if (gone := tables[i][block]) != NOWHERE:
                        keys[gone] = values[gone] = torch.nan
                        tables[i][block] = NOWHERE
        metadata = AttentionMetadata.build(
            [p.stop - p.start for p in parts.values()],
            [p.stop for p in parts.values()],
            [tables[i][: -(-p.stop // block_size)] for i, p in parts.items()],
            block_size,
        )
        q, k, v = (
            torch.cat([getattr(requests[i], name)[p] for i, p in parts.items()]) for name in "qkv"
        )
        ops.write_kv(k, v, keys, values, metadata.slot_mapping)
        out = ops.paged_attention(q, keys, values, metadata, spec)
        for (i, p), got in zip(
            parts.items(), out.split([p.stop - p.start for p in parts.values()]), strict=True
        ):
            rows[i].append(got)
            done[i] = p.stop
    return [torch.cat(r) for r in rows]


def alone(request, spec):
    return serve([request], spec, random.Random(0), 16, lambda: request.length)[0]


@pytest.mark.parametrize("name", SPECS)
def test_matches_dense_attention(name):
    spec, value_dim = SPECS[name]
    for length in (1, 39, 64, 65, 200, 1100):
        request = Request(length, value_dim, length)
        got = alone(request, spec)
        assert got.shape == (length, HEADS, value_dim)
        torch.testing.assert_close(got.double(), request.dense(spec), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", SPECS)
def test_same_bits_however_it_is_served(name):
    spec, value_dim = SPECS[name]
    rng = random.Random(name)
    subject = Request(150, value_dim, 1)
    want = alone(subject, spec)
    assert torch.equal(bits(serve([subject], spec, rng, 8, lambda: 1)[0]), bits(want))
    for block_size in (8, 32, 64):
        others = [Request(rng.choice([3, 70, 190]), value_dim, n) for n in (2, 3)]
        got = serve(
            [others[0], subject, others[1]], spec, rng, block_size, lambda: rng.choice([5, 33, 90])
        )
        assert torch.equal(bits(got[1]), bits(want)), block_size


@pytest.mark.parametrize("name", ["window", "all"])
def test_several_segments_give_the_same_bits(name):
    spec, value_dim = SPECS[name]
    subject = Request(1150, value_dim, 5)
    want = alone(subject, spec)
    rng = random.Random(6)
    others = [Request(40, value_dim, 7), Request(1300, value_dim, 8)]
    got = serve([others[0], subject, others[1]], spec, rng, 32, lambda: rng.choice([100, 37, 400]))
    assert torch.equal(bits(got[1]), bits(want))


@pytest.mark.parametrize("name", ["window", "window of one", "all"])
@pytest.mark.parametrize("block_size", [8, 32])
def test_blocks_before_the_window_are_not_needed(name, block_size):
    spec, value_dim = SPECS[name]
    subjects = [Request(n, value_dim, n) for n in (150, 1100)]
    rng = random.Random(9)
    got = serve(subjects, spec, rng, block_size, lambda: rng.choice([7, 60, 200]), forget=True)
    for subject, rows in zip(subjects, got, strict=True):
        assert torch.equal(bits(rows), bits(alone(subject, spec)))


def test_the_reference_backend_has_all_features():
    need = AttentionNeed("cpu", "float32", 4, 2, 24, frozenset(FEATURES))
    assert select_backend(need).backend.name == "paged"
