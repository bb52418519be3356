"""Compiled sampling on every instruction set this machine has: token for token, and bit for bit,
what the sampler's plain steps give."""

import itertools
import math

import numpy as np
import pytest
import torch

from kernel_kit import needs_native
from quire.kernels import compiled, exact, native_sampling, rows
from quire.kernels.dispatch import ops
from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.sampling.logprobs import top_logprobs
from quire.sampling.race import arrivals, winners

pytestmark = needs_native

sampler = Sampler()
VOCABS = [2, 63, 64, 65, 1000, 33003]


@pytest.fixture(autouse=True)
def native_operations(isa, monkeypatch):
    ops.exp  # noqa: B018 # the first use chooses the kernels
    for name, function in native_sampling.OPS.items():
        monkeypatch.setitem(ops.__dict__, name, function)


def picked(logits, params, positions=None, plain=False):
    """Tokens of one row for each of `params`."""
    requests = [RequestSampling.from_params(p, [], logits.shape[1]) for p in params]
    outputs = [np.zeros(n, dtype=np.int32) for n in positions or [3] * len(params)]
    metadata = SamplingMetadata.build(requests, outputs)
    if not plain:
        return sampler(logits.clone(), metadata).token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ops.__dict__, "pick_tokens", None)
        return sampler(logits.clone(), metadata).token_ids


def check(logits, params, positions=None):
    want = picked(logits, params, positions, plain=True)
    assert picked(logits, params, positions) == want


def filters(rng):
    """Random parameters, with much that is at an edge."""
    return {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
        "top_k": int(rng.choice([0, 0, 1, 5, 50, 700])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999])),
        "min_p": float(rng.choice([0.0, 0.0, 0.01, 0.5, 1.0])),
        "seed": int(rng.integers(0, 2**63)),
    }


def made_logits(kind, count, vocab, generator):
    x = torch.randn(count, vocab, generator=generator)
    if kind == "usual":
        return x * 3
    if kind == "ties":
        return (x * 2).round()
    if kind == "flat":
        return x * 1e-3
    if kind == "banned":
        return (x * 3).masked_fill(torch.rand(x.shape, generator=generator) < 0.9, -math.inf)
    return x * 40  # peaked: most weights are 0


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", ["usual", "ties", "flat", "banned", "peaked"])
def test_the_same_tokens_as_the_steps(kind, vocab, monkeypatch):
    rng = np.random.default_rng(vocab)
    count = 40 if vocab < 10000 else 16
    generator = torch.Generator().manual_seed(vocab)
    logits = made_logits(kind, count, vocab, generator)
    logits[:, vocab // 2] = torch.clamp(logits[:, vocab // 2], min=-1.0)  # never all banned
    # Banned tokens come from processors, after the check of what the model gave.
    monkeypatch.setitem(ops.__dict__, "finite_rows", lambda x: torch.ones(len(x), dtype=torch.bool))
    params = [SamplingParams(**filters(rng)) for _ in range(count)]
    check(logits, params, rng.integers(0, 5000, count).tolist())


@pytest.mark.parametrize(
    "what",
    [{}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 2.0}, {"top_k": 50, "top_p": 0.8},
     {"min_p": 0.05}, {"top_k": 20000}, {"top_k": 20000, "top_p": 0.5}, {"temperature": 0.0}],
    ids=str,
)  # fmt: skip
def test_a_large_vocabulary(what):
    logits = torch.randn(6, 151936, generator=torch.Generator().manual_seed(1)) * 2.5
    check(logits, [SamplingParams(seed=i, **what) for i in range(6)])


def test_rows_do_not_feel_each_other():
    logits = torch.randn(23, 5003, generator=torch.Generator().manual_seed(2)) * 2
    params = [
        SamplingParams(seed=i, top_k=(0, 9)[i % 2], top_p=(1.0, 0.8, 0.99)[i % 3])
        for i in range(23)
    ]
    together = picked(logits, params)
    for threads in (1, 2):
        compiled.lib.set_num_threads(threads, [])
        assert [picked(logits[i : i + 1], params[i : i + 1])[0] for i in range(23)] == together


def test_words_of_seeds_and_positions_beyond_32_bits():
    seeds = [0, 1, 2**63, 2**64 - 1, *range(100, 160)]
    positions = [0, 2**32 + 5, 7, 2**31, *range(60)]
    logits = torch.randn(len(seeds), 4099, generator=torch.Generator().manual_seed(3))
    numbers = np.tile(np.array([1.0, 0.0, 1.0, -math.inf]), (len(seeds), 1))
    tokens = native_sampling.pick_tokens(
        logits, numbers, np.array(seeds, np.uint64), np.array(positions, np.int64)
    )
    want = winners(logits - logits.amax(1, keepdim=True), seeds, positions)
    assert tokens.tolist() == want.tolist()


def test_the_race_of_a_row_many_times():
    """Every time someone else wins, far down the vocabulary and near its top."""
    count, vocab = 1500, 1030
    scores = -torch.arange(float(vocab)).log() * 1.2
    scores[0] = 0.0
    logits = scores[torch.randperm(vocab, generator=torch.Generator().manual_seed(4))]
    logits = logits.expand(count, -1)
    params = [SamplingParams(seed=0)] * count
    found = picked(logits, params, list(range(count)))
    assert found == picked(logits, params, list(range(count)), plain=True)
    assert len(set(found)) > 200


def test_the_second_word_counts_where_the_first_leaves_little():
    """The smallest number of half a million: 13 bits of its first word are left. Weights that let
    its token arrive just before another's, and just after."""
    vocab, seed, position, other = 2**19, 1, 3, 100
    places = torch.tensor([[position, 0, seed, 0]]).expand(vocab, -1)
    exponential = arrivals(torch.zeros(vocab), places, torch.arange(vocab)) * 2.0**43
    rare = int(exponential.argmin())
    even = (exponential[rare] / exponential[other]).log()
    numbers = np.array([[1.0, 0.0, 1.0, -math.inf]])
    for nudge, winner in ((4e-6, rare), (-4e-6, other)):
        logits = torch.full((1, vocab), -100.0)
        logits[0, other], logits[0, rare] = 0.0, even + nudge
        got = native_sampling.pick_tokens(
            logits, numbers, np.array([seed], np.uint64), np.array([position])
        )
        assert got.tolist() == winners(logits, [seed], [position]).tolist() == [winner]


def test_tokens_with_hardly_any_weight_and_with_none():
    """Beside one of weight 2**43: weights of 1, and of 0."""
    numbers = np.tile(np.array([1.0, 0.0, 1.0, -math.inf]), (4, 1))
    seeds, positions = np.arange(4, dtype=np.uint64), np.zeros(4, np.int64)
    for least in (-29.8, -29.9, -100.0):
        logits = torch.full((4, 130), least)
        logits[:, 70] = 0.0
        got = native_sampling.pick_tokens(logits, numbers, seeds, positions)
        assert got.tolist() == winners(logits, range(4), [0] * 4).tolist() == [70] * 4


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(4, 300)
    logits[0, [77, 200]] = 5
    logits[1, 299] = 1e-30
    logits[2, :] = -3e38
    none = np.zeros(4, np.uint64), np.zeros(4, np.int64)
    assert native_sampling.pick_tokens(logits, None, *none).tolist() == [77, 299, 0, 0]
    wide = torch.randn(3, 900)[:, 100:800]
    none = np.zeros(3, np.uint64), np.zeros(3, np.int64)
    assert torch.equal(native_sampling.pick_tokens(wide, None, *none), wide.argmax(1))


@pytest.mark.parametrize(
    "vocab", [1, 2, 3, 64, 100, 128, 129, 255, 256, 257, 1025, 4096, 5003, 50257, 151_936, 200_001]
)
def test_log_softmax_bit_for_bit(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator) * torch.tensor([[0.1], [1], [5], [30], [0]])
    logits[1, :: max(2, vocab // 3)] = -math.inf
    logits[1, 0] = 0
    got, want = native_sampling.log_softmax(logits), exact.log_softmax(logits)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    logits[0, 0], logits[2, -1], logits[3] = math.nan, math.inf, -math.inf
    got = native_sampling.log_softmax(logits)
    assert got[[0, 2, 3]].isnan().all()
    assert torch.equal(got[4], want[4])


def test_log_softmax_in_memory_that_is_kept():
    first, other = torch.randn(9, 1000), torch.randn(4, 1000)
    kept = native_sampling.log_softmax(first, keep="of this test")
    assert torch.equal(kept, native_sampling.log_softmax(first))
    again = native_sampling.log_softmax(other, keep="of this test")
    assert torch.equal(again, native_sampling.log_softmax(other))
    assert again.data_ptr() == kept.data_ptr()


def test_finite_rows():
    logits = torch.randn(6, 1000)
    logits[1, 999], logits[2, 0], logits[4, 500] = math.nan, math.inf, -math.inf
    want = [True, False, False, True, False, True]
    assert native_sampling.finite_rows(logits).tolist() == want
    assert rows.finite_rows(logits).tolist() == want
    assert native_sampling.finite_rows(logits.bfloat16()).tolist() == want


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 1000, 33003])
def test_masks_on_some_rows(vocab):
    rng = np.random.default_rng(vocab)
    logits = torch.randn(7, vocab + 5, generator=torch.Generator().manual_seed(1))[:, :vocab]
    masks = rng.integers(-(2**31), 2**31, size=(4, -(-vocab // 32)), dtype=np.int32)
    masks[:, ::3] = rng.choice([0, -1], size=masks[:, ::3].shape)
    masks[3] = 0
    which = np.array([5, 0, 2, 6], np.int64)
    want = logits.clone()
    for row, mask in zip(which, masks, strict=True):
        for token in range(vocab):
            if not int(mask[token // 32]) >> token % 32 & 1:
                want[row, token] = -math.inf
    for keep_allowed in (rows.keep_allowed, native_sampling.keep_allowed):
        got = logits.clone() if keep_allowed is rows.keep_allowed else logits
        best = keep_allowed(got, which, masks)
        assert torch.equal(got, want)
        assert best.tolist() == want[which].amax(1).tolist()
    assert best[3] == -math.inf


def made_masks(count, vocab, rng):
    """Nothing, one token, few, whole words, anything, all but some, everything; over and over."""
    bits = np.zeros((count, -(-vocab // 32) * 32), np.uint8)
    for row, kind in zip(bits, itertools.cycle(range(7)), strict=False):
        if kind == 3:
            row[:] = np.repeat(rng.integers(0, 2, len(row) // 32), 32)
        elif kind >= 4:
            row[:] = rng.random(len(row)) < (0.5, 0.999, 2)[kind - 4]
        if kind:
            row[rng.integers(0, vocab, 5 if kind == 2 else 1)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab", [*VOCABS, 151936])
@pytest.mark.parametrize("kind", ["usual", "ties", "flat", "banned", "peaked"])
def test_masks_in_the_pick_are_masks_before_it(kind, vocab):
    rng = np.random.default_rng(vocab)
    count = 63 if vocab < 10000 else 21
    logits = made_logits(kind, count, vocab, torch.Generator().manual_seed(vocab))
    logits[:, 0] = torch.clamp(logits[:, 0], min=-1.0)  # never all banned
    which = np.arange(0, count, 3) if kind == "ties" else rng.permutation(count)[:-2].copy()
    masks = made_masks(len(which), vocab, rng)
    requests = [
        RequestSampling.from_params(SamplingParams(**filters(rng)), [], vocab) for _ in range(count)
    ]
    where = np.array([request.seed for request in requests], np.uint64), np.arange(count)
    for numbers in (None, np.array([request.numbers for request in requests])):
        before = logits.clone()
        empty = np.zeros(count, bool)
        empty[which] = (rows.keep_allowed(before, which, masks) == -math.inf).numpy()
        before[torch.from_numpy(empty)] = 0.0
        want = native_sampling.pick_tokens(before, numbers, *where).numpy()
        alone = native_sampling.pick_tokens(logits, numbers, *where).numpy()
        got = native_sampling.pick_tokens(logits.clone(), numbers, *where, (which, masks)).numpy()
        assert (got[empty] == -1).all() and empty.sum() >= len(which) // 7
        assert (got[~empty] == want[~empty]).all()
        others = np.setdiff1d(np.arange(count), which)
        assert (got[others] == alone[others]).all()


@pytest.mark.parametrize("vocab", [*VOCABS, 151936])
@pytest.mark.parametrize("kind", ["usual", "ties", "flat", "banned", "peaked"])
def test_masks_that_allow_the_witnesses_change_nothing(kind, vocab):
    """Whatever else they hide: the likeliest of the rest, those of least weight, half, all."""
    rng = np.random.default_rng(vocab + 1)
    count, most = (48, 16) if vocab < 100_000 else (24, 16)
    logits = made_logits(kind, count, vocab, torch.Generator().manual_seed(vocab + 1))
    logits[:, 0] = torch.clamp(logits[:, 0], min=-1.0)  # never all banned
    params = [SamplingParams(**filters(rng)) for _ in range(count)]
    requests = [RequestSampling.from_params(p, [], vocab) for p in params]
    where = np.array([request.seed for request in requests], np.uint64), np.arange(count)
    numbers = np.array([request.numbers for request in requests])
    witnesses = np.full((count, most), 99, np.int32)
    alone = native_sampling.pick_tokens(logits, numbers, *where, None, witnesses).numpy()
    assert (alone == native_sampling.pick_tokens(logits, numbers, *where).numpy()).all()
    some = [set(row) - {-1} for row in witnesses.tolist()]
    named = np.flatnonzero([bool(ids) for ids in some])
    unfiltered = [i for i, p in enumerate(params) if p.top_k == 0 and p.top_p == 1.0]
    assert {*unfiltered, *np.flatnonzero(numbers[:, 0] == 0)} <= {*named}
    ranking = logits.argsort(dim=1, descending=True, stable=True).numpy()
    for shares in range(5):
        bits = np.ones((len(named), -(-vocab // 32) * 32), np.uint8)
        for of_row, row in zip(bits, named, strict=True):
            first = len(some[row]) + int(rng.integers(0, 30))
            hidden = (ranking[row, :first], ranking[row, first:], ranking[row],
                      np.flatnonzero(rng.random(vocab) < 0.5),
                      rng.integers(0, vocab, 3))[shares]  # fmt: skip
            of_row[hidden] = 0
            of_row[list(some[row])] = 1
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        got = native_sampling.pick_tokens(logits, numbers, *where, (named, masks)).numpy()
        assert (got[named] == alone[named]).all(), f"hidden: {shares}"


def test_most_filters_have_witnesses():
    """Of logits as a trained model gives them, a few tokens decide."""
    rows, vocab = 300, 20_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(8)) * 1.8
    logits[:, 70] = 14.0
    where = np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)
    for least, filters in ((1.0, {}), (1.0, {"top_k": 5}), (0.9, {"top_k": 50}),
                           (0.6, {"top_p": 0.9}), (0.6, {"top_k": 20, "top_p": 0.8})):  # fmt: skip
        request = RequestSampling.from_params(SamplingParams(seed=1, **filters), [], vocab)
        witnesses = np.empty((rows, 16), np.int32)
        numbers = np.tile(np.array(request.numbers), (rows, 1))
        native_sampling.pick_tokens(logits, numbers, *where, None, witnesses)
        assert (witnesses[:, 0] >= 0).mean() >= least, filters


def test_weights_never_rise_as_logits_fall():
    """Witnesses rely on it: hiding a token leaves the others no more weight. Around each number at
    which the exponential's argument is split another way, and at random."""
    starts = [-(k + 0.5) * math.log(2) for k in range(44)] + [-30 * i / 97 for i in range(1, 98)]
    for start in starts:
        middle = torch.tensor(start).view(torch.int32)
        # Negative numbers fall as their bits rise.
        y = (middle + torch.arange(-(2**15), 2**15, dtype=torch.int32)).view(torch.float32)
        weights = (exact.exp(y) * 2.0**43).to(torch.int64)
        assert (weights.diff() <= 0).all(), start


def test_masks_for_other_rows_are_our_bug():
    for masks in (np.zeros((1, 2), np.int32), np.zeros((2, 1), np.int32), np.zeros((1, 1))):
        for keep_allowed in (rows.keep_allowed, native_sampling.keep_allowed):
            with pytest.raises(ValueError, match="masks over 32 tokens are"):
                keep_allowed(torch.zeros(2, 32), np.zeros(1, np.int64), masks)


@pytest.mark.parametrize("vocab", [2, 64, 1000, 20000])
@pytest.mark.parametrize("kind", ["usual", "ties", "flat"])
def test_top_logprobs(kind, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logprobs = exact.log_softmax(made_logits(kind, 12, vocab, generator))
    counts = [min(vocab, n) for n in (0, 1, 5, 20, 0, 2, 300, vocab, 7, 1, 0, 20)]
    chosen = torch.randint(0, vocab, (12,), generator=generator)
    chosen[:4] = logprobs[:4].argmax(1)
    want = top_logprobs(logprobs, chosen, counts)
    assert native_sampling.top_logprobs(logprobs, chosen, counts) == want


def test_top_logprobs_of_nothing_and_of_nan():
    logprobs, chosen = torch.full((2, 70), math.nan), torch.tensor([3, 4])
    ids, values, _ = native_sampling.top_logprobs(logprobs, chosen, [2, 0])
    assert len(ids[0]) == len(values[0]) <= 2
    assert ids[1] == []
