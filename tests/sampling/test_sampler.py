"""The sampler against its slow twin, alone against in a batch, and at its edges."""

import math
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import slow_sampler
from quire.errors import NOT_A_NUMBER
from quire.kernels.dispatch import ops
from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.sampling.masks import permits
from quire.sampling.sampler import NOTHING_LEFT, OVERFLOW

sampler = Sampler()


@pytest.fixture(autouse=True, scope="module", params=["steps", "at once"])
def kernels(request):
    """The plain steps, and the compiled operation that does several of them at once."""
    ops.exp  # noqa: B018 # the first use chooses the kernels
    chosen = dict(ops.__dict__)
    if request.param == "steps":
        ops.__dict__.update(pick_tokens=None, top_logprobs=None)
    elif ops.pick_tokens is None:
        pytest.skip("the native kernels are not built")
    yield request.param
    ops.__dict__.update(chosen)


def ids_array(ids):
    return np.array(ids, dtype=np.int32)


def run(rows):
    """Sample rows of (logits, params, prompt, output)."""
    logits = torch.tensor([r[0] for r in rows], dtype=torch.float32)
    requests = [RequestSampling.from_params(p, prompt, logits.shape[1]) for _, p, prompt, _ in rows]
    return sampler(logits, SamplingMetadata.build(requests, [ids_array(r[3]) for r in rows]))


def one(logits, output=(), prompt=(), **params):
    """Token of one row, or the reason why there is none."""
    params.setdefault("seed", 1)
    result = run([(logits, SamplingParams(**params), list(prompt), list(output))])
    return result.failed.get(0, result.token_ids[0])


@st.composite
def row(draw, vocab, exact=True):
    """Logits on a coarse grid (ties are common), parameters, prompt, output."""
    token = st.integers(0, vocab - 1)
    eighths = st.integers(-40, 40).map(lambda i: i / 8)
    element = eighths if exact else st.floats(-30, 30, width=32)
    history = st.lists(token, max_size=6)
    params = SamplingParams(
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.99])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0, 1.25])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.0, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -2.0])),
        logit_bias=draw(st.none() | st.dictionaries(token, eighths, max_size=3)),
        allowed_token_ids=draw(st.none() | st.none() | st.lists(token, min_size=1, max_size=5)),
        bad_words_token_ids=draw(
            st.none() | st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)
        ),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        max_tokens=100,
        stop_token_ids=draw(st.lists(token, max_size=2)),
        eos_token_ids=draw(st.lists(token, max_size=1)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 1, 3, -1])),
    )
    logits = draw(st.lists(element, min_size=vocab, max_size=vocab))
    return logits, params, draw(history), draw(history)


ROUNDED_APART = (
    [3.0, 0.0, 3.25],
    SamplingParams(
        seed=0, temperature=0.5, min_p=1.0, frequency_penalty=0.5, repetition_penalty=1.25,
        logit_bias={2: 3.25, 0: 1.625},
    ),
    [],
    [0, 2, 2, 2, 2],
)  # fmt: skip
"""Two logits become 3.2 in float64, and differ in float32."""


@settings(max_examples=1000, deadline=None)
@given(st.integers(2, 24).flatmap(row))
@example(ROUNDED_APART)
def test_chooses_as_the_slow_twin_does(case):
    try:
        expected = slow_sampler.sample(*case)
    except slow_sampler.Unclear:
        assume(False)
    result = run([case])
    if expected is None:
        assert result.failed == {0: NOTHING_LEFT}
    else:
        assert result.failed == {}
        assert result.token_ids[0] == expected


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([3, 16, 33, 300]).flatmap(
        lambda vocab: st.lists(row(vocab, exact=False), min_size=2, max_size=9)
    )
)
def test_a_row_does_not_feel_the_others(rows):
    together = run(rows)
    for i, case in enumerate(rows):
        alone = run([case])
        assert alone.failed.get(0) == together.failed.get(i)
        if i not in together.failed:
            assert alone.token_ids[0] == together.token_ids[i]
            assert alone.logprobs[0] == together.logprobs[i]  # equal floats: equal bits


def test_large_vocabulary_random_rows_do_not_feel_the_others():
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(37, 5003, generator=generator) * 3).tolist()
    rows = [
        (x, SamplingParams(seed=i, temperature=0.9, top_p=(1.0, 0.999, 0.5)[i % 3],
                           top_k=(0, 900)[i % 2], logprobs=i % 4), [], [1] * i)
        for i, x in enumerate(logits)
    ]  # fmt: skip
    together = run(rows)
    for i in range(37):
        alone = run([rows[i]])
        assert (alone.token_ids[0], alone.logprobs[0]) == (
            together.token_ids[i],
            together.logprobs[i],
        )


def test_slabs_do_not_change_anything(monkeypatch):
    filters = [{}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.01}, {"temperature": 0.0}]
    rows = [
        ([0.1 * j for j in range(50)], SamplingParams(seed=i, **filters[i // 3 % 4]), [], [])
        for i in range(20)
    ]
    expected = run(rows).token_ids
    monkeypatch.setattr("quire.sampling.metadata.SLAB", 150)
    assert run(rows).token_ids == expected
    assert len(set(expected)) > 1


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 24).flatmap(row))
def test_logprobs_are_those_of_the_raw_logits(case):
    logits, params, _, _ = case
    result = run([case])
    asked = params.logprobs
    if asked is None:
        assert result.logprobs == [None]
        return
    if result.failed:
        return
    ids, values, rank = result.logprobs[0]
    total = math.fsum(map(math.exp, logits))
    ranking = slow_sampler.by_rank(logits)
    assert ids == [result.token_ids[0], *ranking[: len(logits) if asked < 0 else asked]]
    assert values == pytest.approx([logits[i] - math.log(total) for i in ids], abs=1e-5)
    assert rank == ranking.index(ids[0]) + 1


def test_the_docstring_lists_the_steps_in_order():
    named = re.findall(r"^\s*\d+\. `(\w+)`", Sampler.__doc__, re.MULTILINE)
    assert named == [step.__name__ for step in Sampler.steps]
    # The order users rely on (semantics of vLLM's sampler).
    order = ["raw_logprobs", "allowed_token_ids", "token_mask", "bad_words", "min_tokens",
             "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty",
             "greedy_pick", "temperature", "min_p", "top_k", "top_p", "random_pick",
             "pick_logprobs"]  # fmt: skip
    assert [name for name in named if name in order] == order


class TestEdges:
    def test_ties_go_to_the_lowest_id(self):
        assert one([1.0, 5.0, 5.0, 5.0], temperature=0) == 1
        assert one([1.0, 5.0, 5.0, 5.0], temperature=2.0, top_k=1) == 1
        assert one([1.0, 5.0, 5.0, 5.0], temperature=2.0, top_p=1e-9) == 1
        picks = {one([5.0] * 8, temperature=2.0, top_k=3, seed=s) for s in range(60)}
        assert picks == {0, 1, 2}

    def test_top_p_keeps_the_smallest_set_that_reaches_it(self):
        logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
        picks = [
            {one(logits, temperature=1.0, top_p=p, seed=s) for s in range(200)}
            for p in (0.49, 0.51, 0.74, 0.76, 0.91)
        ]
        assert picks == [{1}, {1, 3}, {1, 3}, {1, 2, 3}, {0, 1, 2, 3}]

    def test_top_p_beyond_the_first_look(self):
        # A flat row: half the mass needs half of 2000 tokens, more than the first look takes.
        logits = [(-1e-4) * i for i in range(2000)]
        picks = [one(logits, temperature=1.0, top_p=0.5, seed=s) for s in range(100)]
        assert 256 < max(picks) < 1000
        mixed = run([(logits, SamplingParams(seed=s, top_p=(0.5, 1e-3)[s % 2]), [], [])
                     for s in range(100)]).token_ids  # fmt: skip
        assert mixed[::2] == picks[::2]
        assert max(mixed[1::2]) <= 2

    def test_top_p_needs_nearly_all_of_a_large_flat_vocabulary(self):
        logits = [(-1e-6) * i for i in range(9000)]
        picks = [one(logits, temperature=1.0, top_p=0.9, seed=s) for s in range(60)]
        assert 7000 < max(picks) < 8110
        few = [one(logits, temperature=1.0, top_p=0.1, seed=s) for s in range(60)]
        assert 500 < max(few) < 910

    @pytest.mark.parametrize("word", [0, 2**32 - 1])
    def test_the_ends_of_the_random_numbers_pick_allowed_tokens(self, word, monkeypatch, kernels):
        if kernels != "steps":
            pytest.skip("the compiled operation makes its own numbers")
        same = "quire.sampling.race.philox4x32"
        monkeypatch.setattr(same, lambda counter, key: torch.full((len(counter), 4), word))
        token = one([9.0, 1.0, 1.0, 9.0], temperature=1.0, allowed_token_ids=[1, 2])
        assert token == 1  # all arrive at once: the lowest id
        assert one([9.0, 1.0, 1.0, 9.5], temperature=1.0, allowed_token_ids=[1, 2, 3]) == 3

    def test_top_k_larger_than_the_vocabulary(self):
        assert one([0.0, 9.0], temperature=1.0, top_k=2**31 - 1) in (0, 1)

    def test_everything_excluded_fails_with_a_reason(self):
        reason = one([1.0, 2.0], allowed_token_ids=[1], bad_words_token_ids=[[1]])
        assert reason == NOTHING_LEFT
        assert one([1.0, 2.0], allowed_token_ids=[7], temperature=0) == NOTHING_LEFT

    def test_min_tokens_yields_when_nothing_else_is_left(self):
        params = {"eos_token_ids": [1], "min_tokens": 2, "temperature": 0}
        assert one([1.0, 2.0], **params) == 0
        assert one([1.0, 2.0], allowed_token_ids=[1], **params) == 1
        assert one([1.0, 2.0], output=[0, 0], **params) == 1

    def test_bad_words_look_at_the_output_only(self):
        words = {"bad_words_token_ids": [[0, 1]], "temperature": 0}
        assert one([1.0, 2.0, 0.0], **words) == 1
        assert one([1.0, 2.0, 0.0], prompt=[0], **words) == 1
        assert one([1.0, 2.0, 0.0], output=[0], **words) == 0

    def test_repetition_counts_the_prompt_frequency_only_the_output(self):
        assert one([2.0, 1.9], prompt=[0], temperature=0, repetition_penalty=2.0) == 1
        assert one([2.0, 1.9], prompt=[0], temperature=0, frequency_penalty=2.0) == 0
        assert one([2.0, 1.9], output=[0], temperature=0, frequency_penalty=2.0) == 1
        assert one([2.0, 1.9], prompt=[0], temperature=0, presence_penalty=2.0) == 0

    def test_ids_outside_the_vocabulary_touch_nothing(self):
        token = one(
            [1.0, 2.0], temperature=0, logit_bias={9: 100.0}, stop_token_ids=[9], min_tokens=1,
            bad_words_token_ids=[[9]], prompt=[9], output=[9], repetition_penalty=2.0,
            presence_penalty=1.0, frequency_penalty=1.0, allowed_token_ids=[0, 9],
        )  # fmt: skip
        assert token == 0

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_only_the_row_with_a_bad_number_fails(self, value, temperature):
        params = SamplingParams(seed=3, temperature=temperature, logprobs=1, top_p=0.9, top_k=2)
        good, bad = [0.5, 1.0, 3.0], [0.5, value, 3.0]
        result = run([(x, params, [], []) for x in (good, bad, good)])
        assert result.failed == {1: NOT_A_NUMBER}
        alone = run([(good, params, [], [])])
        for i in (0, 2):
            assert result.token_ids[i] == alone.token_ids[0]
            assert result.logprobs[i] == alone.logprobs[0]

    def test_extreme_logits_at_the_smallest_temperature(self):
        assert one([-3e38, 3e38, 1.0], temperature=0.01) == 1

    def test_a_penalty_that_overflows_fails_only_its_request(self):
        reason = one([3e38, 1.0], prompt=[0], repetition_penalty=1e-30, temperature=0)
        assert reason.startswith("numerical:")

    def test_a_seed_is_required(self):
        with pytest.raises(ValueError, match="seed"):
            RequestSampling.from_params(SamplingParams(), [], 4)

    def test_position_and_seed_decide_not_the_call(self):
        logits = [0.0] * 100
        first = [one(logits, output=[1] * i, seed=5) for i in range(20)]
        assert first == [one(logits, output=[1] * i, seed=5) for i in range(20)]
        assert first != [one(logits, output=[1] * i, seed=6) for i in range(20)]
        assert len(set(first)) > 10

    def test_a_negative_seed_is_that_plus_2_to_the_63rd(self):
        logits = [0.0] * 100
        for seed in (-2, -(2**63), -(2**40)):
            found = [one(logits, output=[1] * i, seed=seed) for i in range(20)]
            plain = seed + 2**63
            assert found == [one(logits, output=[1] * i, seed=plain) for i in range(20)]


# ---- masks ---------------------------------------------------------------------------------------


class Fixed:
    """The same mask after every output."""

    def __init__(self, ids, vocab):
        self.words = None if ids is None else pack(ids, vocab)

    def allowed(self, output):
        return self.words


class Asked(Fixed):
    """The same, asked about tokens after the pick."""

    asked_first = True

    def permits(self, output, tokens):
        return self.words is None or all(permits(self.words, token) for token in tokens)

    @staticmethod
    def make_together(asked):
        pass


def pack(ids, vocab, dtype=np.uint32):
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(dtype)


def run_masked(logits, cases, num_drafts=()):
    """Sample rows of (params, prompt, output, mask)."""
    requests = [RequestSampling.from_params(p, h, logits.shape[1], m) for p, h, _, m in cases]
    outputs = [ids_array(case[2]) for case in cases]
    meta = SamplingMetadata.build(requests, outputs, num_drafts)
    return sampler(logits.clone(), meta)


@settings(max_examples=500, deadline=None)
@given(st.integers(2, 70).flatmap(lambda v: st.tuples(row(v), st.sets(st.integers(0, v - 1)))))
def test_a_mask_is_that_of_the_slow_twin(case):
    (logits, params, prompt, output), ids = case
    try:
        expected = slow_sampler.sample(logits, params, prompt, output, ids)
    except slow_sampler.Unclear:
        assume(False)
    for kind in (Fixed, Asked):
        mask = kind(ids, len(logits))
        result = run_masked(torch.tensor([logits]), [(params, prompt, output, mask)])
        if expected is None:
            assert result.failed == {0: NOTHING_LEFT}
        else:
            assert (result.failed, result.token_ids[0]) == ({}, expected)


LARGE = 151_936
CHOICES = {
    "masked": [False, True],
    "temperature": [0.0, 0.8],
    "top_k": [0, 3, 40],
    "top_p": [1.0, 0.9],
    "min_p": [0.0, 0.02],
    "repetition_penalty": [1.0, 1.2],
    "frequency_penalty": [0.0, 0.4],
    "presence_penalty": [0.0, -0.4],
    "logit_bias": [None, {7: 4.0, 150_001: 9.0}],
    "bad_words_token_ids": [None, [[9], [5, 150_001]]],
    "min_tokens": [0, 20],
    "logprobs": [None, 3],
}


def pairwise(rng, count):
    """Random rows, more until every value of every parameter has met every other's."""
    wanted = {
        ((a, x), (b, y))
        for a in CHOICES for b in CHOICES if a < b
        for x in range(len(CHOICES[a])) for y in range(len(CHOICES[b]))
    }  # fmt: skip
    rows = []
    while wanted or len(rows) < count:
        picked = {name: rng.randrange(len(values)) for name, values in CHOICES.items()}
        wanted -= {(x, y) for x in picked.items() for y in picked.items()}
        rows.append({name: CHOICES[name][i] for name, i in picked.items()})
    return rows


def test_masks_over_a_large_vocabulary_with_every_other_parameter():
    """A mask does what `allowed_token_ids` does with the same ids, row by row and in a batch."""
    rng = random.Random(6)
    cases, twins = [], []
    for number, values in enumerate(pairwise(rng, 40)):
        masked = values.pop("masked")
        kind = rng.choice(["few", "many", "all but some", "none"])
        ids = {
            "few": rng.sample(range(LARGE), 5),
            "many": rng.sample(range(LARGE), 60_000),
            "all but some": sorted({*range(LARGE)} - {*rng.sample(range(LARGE), 3)}),
            "none": [],
        }[kind]
        output = [rng.choice([5, 9, rng.randrange(LARGE)]) for _ in range(rng.randint(0, 12))]
        params = SamplingParams(
            seed=number, max_tokens=50, stop_token_ids=[7], eos_token_ids=[2], **values
        )
        make = (Fixed, Asked)[number % 3 % 2]
        mask = make(ids if kind != "none" or number % 2 else None, LARGE) if masked else None
        plain = params
        if masked and mask.words is not None:
            plain = params.replace(allowed_token_ids=ids or [LARGE + 5])
        cases.append((params, [5, 6], output, mask))
        twins.append((plain, [5, 6], output, None))
    logits = torch.randn(len(cases), LARGE, generator=torch.Generator().manual_seed(1)) * 4
    together = run_masked(logits, cases)
    expected = run_masked(logits, twins)
    assert together.failed == expected.failed
    assert set(together.failed.values()) == {NOTHING_LEFT}
    for i, case in enumerate(cases):
        if i in together.failed:
            continue
        assert together.token_ids[i] == expected.token_ids[i]
        assert together.logprobs[i] == expected.logprobs[i]
        alone = run_masked(logits[i : i + 1], [case])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97])
def test_masks_of_any_length_and_sign(vocab, dtype):
    mask = Fixed([vocab - 1], vocab)
    mask.words = mask.words.view(dtype)
    result = run_masked(torch.zeros(1, vocab), [(SamplingParams(seed=1), [], [], mask)])
    assert result.token_ids == [vocab - 1] and not result.failed


def test_min_tokens_yields_where_a_mask_leaves_only_the_end():
    params = SamplingParams(seed=1, min_tokens=3, stop_token_ids=[4], max_tokens=9)
    result = run_masked(torch.zeros(1, 65), [(params, [], [], Fixed([4], 65))])
    assert (result.failed, result.token_ids) == ({}, [4])


def test_a_mask_for_another_vocabulary_is_our_bug():
    with pytest.raises(ValueError, match=r"a mask over 65 tokens has 3 words, got \(2,\)"):
        run_masked(torch.zeros(1, 65), [(SamplingParams(seed=1), [], [], Fixed([1], 64))])


class Counting:
    """After n tokens only token n; it must never see anything else."""

    def allowed(self, output):
        assert output.tolist() == list(range(len(output)))
        return pack([len(output)], 40)


class CountingAsked(Asked, Counting):
    """The same, asked about tokens after the pick."""

    allowed = Counting.allowed

    def __init__(self):
        pass

    def permits(self, output, tokens):
        return all(permits(self.allowed(output), token) for token in tokens)


@pytest.mark.parametrize("Counting", [Counting, CountingAsked])
def test_drafts_that_a_mask_refuses_are_not_shown_to_it(Counting):
    params = SamplingParams(seed=1, temperature=0)
    drafts = [0, 1, 7, 3]
    cases = [(params, [], drafts[:n], Counting()) for n in range(5)]
    result = run_masked(torch.zeros(5, 40), cases, num_drafts=range(5))
    assert result.token_ids[:3] == [0, 1, 2] and not result.failed
    other = (params, [], [0, 1, 2], Counting())
    result = run_masked(torch.zeros(6, 40), [*cases, other], num_drafts=[*range(5), 0])
    assert result.token_ids[5] == 3, "the next request's rows are its own"


def test_a_mask_that_allows_what_was_picked_is_not_made(kernels):
    class Counted(Asked):
        made = 0

        def allowed(self, output):
            self.made += 1
            return super().allowed(output)

    greedy, drawn = SamplingParams(seed=1, temperature=0), SamplingParams(seed=1)
    filtered = SamplingParams(seed=1, top_k=20, top_p=0.9)
    moved = SamplingParams(
        seed=1, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1,
        logit_bias={7: 1.0}, bad_words_token_ids=[[3]], top_p=0.9,
    )  # fmt: skip
    waits = SamplingParams(seed=1, min_tokens=1, stop_token_ids=[5])
    rows = [(greedy, [3, 7]), (drawn, [3, 7]), (greedy, [7, 8]), (drawn, [7, 8]),
            (filtered, [3, 7]), (moved, [3, 7]), (waits, [3, 7])]  # fmt: skip
    masks = [Counted(ids, 40) for _, ids in rows]
    logits = torch.zeros(7, 40)
    logits[:, 3], logits[:, 7] = 60.0, 29.0
    cases = [(params, [], [], mask) for (params, _), mask in zip(rows, masks, strict=True)]
    assert run_masked(logits, cases).token_ids == [3, 3, 7, 7, 3, 7, 3]
    at_once = [0, 0, 1, 1, 0, 0, 1]  # how many tokens are left, min_tokens has to know
    assert [mask.made for mask in masks] == (at_once if kernels == "at once" else [1] * 7)


def test_a_mask_hides_what_a_bias_pushes_out_of_range(kernels):
    """Only if it allows that token is the request at fault."""
    largest = 3.4e38
    logits = torch.zeros(4, 40)
    logits[:, 3], logits[:, 7] = largest, 9.0
    params = SamplingParams(seed=1, repetition_penalty=0.5)
    for kind in (Fixed, Asked):
        cases = [(params, [], [3], kind(ids, 40)) for ids in ([7, 8], [3, 7], [7, 8], [])]
        cases[2] = (params, [], [], cases[2][3])
        result = run_masked(logits, cases)
        assert result.failed == {1: OVERFLOW, 3: NOTHING_LEFT}
        assert [result.token_ids[row] for row in (0, 2)] == [7, 7]


def test_masks_asked_after_the_pick_give_the_same_tokens():
    """Rows of both kinds in all parts of a batch; often the likeliest token is not allowed."""
    rng = random.Random(8)
    logits = torch.randn(60, 500, generator=torch.Generator().manual_seed(2)) * 3
    cases, twins = [], []
    for row in range(60):
        ids = rng.sample(range(500), rng.choice([1, 250, 490, 499]))
        ids += [int(logits[row].argmax())] * rng.randrange(2)
        params = SamplingParams(
            seed=row,
            temperature=rng.choice([0, 0.7, 1, 2]),
            min_p=rng.choice([0.0, 0.1]),
            top_k=rng.choice([0, 4, 30]),
            top_p=rng.choice([1.0, 0.5, 0.9]),
            presence_penalty=rng.choice([0.0, 1.5]),
            logit_bias=rng.choice([None, {4: 3.0, 7: -9.0}]),
        )
        for made, kind in ((cases, Asked if rng.random() < 0.7 else Fixed), (twins, Fixed)):
            made.append((params, [], [4] * rng.randrange(9), kind(ids, 500)))
        twins[-1] = (*cases[-1][:3], twins[-1][3])
    found, expected = run_masked(logits, cases), run_masked(logits, twins)
    assert (found.token_ids, found.failed) == (expected.token_ids, {})
