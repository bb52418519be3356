"""The sampler against an independent one: on the model's own logits, in a crowd, for outputs of
300 to 1,500 tokens; and alone, on vocabularies of real models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import wishes
from fuzz_kit import cases
from plain_text import banned_sequences, eos_ids, expected_end
from quire import LLM, RequestOutput, SamplingParams
from quire.kernels.dispatch import ops
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from recorder import Recorder, Row
from sampling_twin import Twin, philox

CONTEXT = 2048
LEAST, MOST = 300, 1500
CROWDS = (1, 5, 8, 12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_batched_tokens=256, max_num_seqs=32) as made:
        yield made


class Watch:
    """Twins of a crowd of requests; keeps what the engine did otherwise."""

    def __init__(self, prompts: list[list[int]], wanted: list[dict[str, Any]]) -> None:
        self.wrong: list[str] = []
        self.logits: dict[tuple[str, int], list[np.ndarray]] = {}
        self.twins = {
            (str(i), k): Twin(
                wish,
                prompt,
                (wish["seed"] + k) % 2**63,
                eos_ids(),
                wishes.VOCAB,
                banned_sequences(wish.get("bad_words") or []),
            )
            for i, (prompt, wish) in enumerate(zip(prompts, wanted, strict=True))
            for k in range(wish.get("n", 1))
        }

    def see(self, row: Row) -> None:
        """Compare one decision."""
        twin = self.twins[row.request_id, row.index]
        self.logits.setdefault((row.request_id, row.index), []).append(row.logits)
        where = f"{twin.params}: token {len(row.output)} of {row.request_id}.{row.index}"
        if not twin.may_follow(row.logits, row.output)(row.token):
            self.wrong.append(f"{where} must not be {row.token}")
        asked = twin.params.get("logprobs")
        if (asked is None) != (row.logprobs is None) and row.token is not None:
            self.wrong.append(f"{where}: asked {asked} log-probabilities, got {row.logprobs}")
        if asked is not None and row.logprobs is not None:
            ids, values, rank = row.logprobs
            wrong = twin.wrong_logprobs(row.logits, ids[0], asked, ids, values, rank)
            if wrong or ids[0] != row.token:
                self.wrong.append(f"{where}: {wrong}")


def run(llm: LLM, prompts: list[list[int]], wanted: list[dict[str, Any]]) -> list[RequestOutput]:
    """All at once, under their numbers as ids."""
    engine = llm.llm_engine
    for i, (prompt, wish) in enumerate(zip(prompts, wanted, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, SamplingParams(**wish))
    finished = {}
    while engine.has_unfinished_requests:
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    return [finished[str(i)] for i in range(len(prompts))]


def long_params(rng: random.Random) -> dict[str, Any]:
    """Most are not ended by anything but their length, so that outputs are long."""
    wish = wishes.params(rng, MOST, LEAST)
    if rng.random() < 0.7:
        wish = {k: v for k, v in wish.items() if k not in ("stop", "stop_token_ids")}
        wish["ignore_eos"] = True
    return wish


@cases(3)
def test_real_logits(llm: LLM, rng: random.Random) -> None:
    prompts = [wishes.prompt(rng) for _ in range(rng.choice(CROWDS))]
    wanted = [long_params(rng) for _ in prompts]
    watch = Watch(prompts, wanted)
    recorder = Recorder(llm, watch.see)
    try:
        outputs = run(llm, prompts, wanted)
    finally:
        recorder.stop()
    assert not watch.wrong, f"{len(watch.wrong)} decisions differ, first: {watch.wrong[0]}"
    for i, (prompt, wish, output) in enumerate(zip(prompts, wanted, outputs, strict=True)):
        for completion in output.outputs:
            tokens = recorder.outputs[str(i), completion.index]
            check_end(prompt, wish, output, completion, tokens)
    check_prompt_logprobs(llm, rng, prompts, recorder, watch)
    check_in_one_call(llm, prompts, wanted, outputs)


STEPS = {"logprobs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"}
"""What takes more than a pick."""


def check_in_one_call(
    llm: LLM,
    prompts: list[list[int]],
    wanted: list[dict[str, Any]],
    outputs: list[RequestOutput],
) -> None:
    """Steps that are one call, to which nobody can listen, put out the same: with the sampler's own
    steps after them, and, where all requests take no more than a pick, without."""
    picked = [i for i, wish in enumerate(wanted) if STEPS.isdisjoint(wish)]
    for some in (range(len(prompts)), picked):
        again = run(llm, [prompts[i] for i in some], [wanted[i] for i in some])
        for i, output in zip(some, again, strict=True):
            for one, other in zip(outputs[i].outputs, output.outputs, strict=True):
                assert one.token_ids == other.token_ids, wanted[i]
                assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
                assert one.logprobs == other.logprobs, wanted[i]


def check_end(
    prompt: list[int],
    wish: dict[str, Any],
    output: RequestOutput,
    completion: Any,
    tokens: list[int],
) -> None:
    """It ended where it must, with the text its tokens spell."""
    end = expected_end(wish, tokens, CONTEXT - len(prompt))
    if end is None:  # nothing but a failure may end it: the twin agreed that no token was left
        assert (completion.finish_reason, completion.token_ids) == ("error", tokens), wish
        assert output.error
        return
    got = completion.finish_reason, completion.stop_reason, len(completion.token_ids)
    assert got == (end.finish_reason, end.stop_reason, end.num_tokens), wish
    assert completion.token_ids == tokens[: end.num_tokens], wish
    assert completion.text == end.text, wish
    if "logprobs" in wish:
        chosen = [
            e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def check_prompt_logprobs(
    llm: LLM, rng: random.Random, prompts: list[list[int]], recorder: Recorder, watch: Watch
) -> None:
    """An output given back as a prompt scores as it did when it was sampled."""
    key, output = max(recorder.outputs.items(), key=lambda item: len(item[1]))
    whole = [*prompts[int(key[0])], *output][: CONTEXT - 1]
    asked = rng.choice([0, 1, 20])
    wish = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": asked}
    (scored,) = run(llm, [whole], [wish])
    twin = Twin({}, [], 0, eos_ids(), wishes.VOCAB)
    start = len(whole) - len(output)
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(whole)
    for position, raw in zip(range(start, len(whole)), watch.logits[key], strict=False):
        entry, token = scored.prompt_logprobs[position], whole[position]
        assert entry is not None
        likeliest = sorted(entry.items(), key=lambda item: (item[1].rank, -item[0]))[:asked]
        ids = [token, *(i for i, _ in likeliest)]
        values = [entry[i].logprob for i in ids]
        wrong = twin.wrong_logprobs(raw, token, asked, ids, values, entry[token].rank or 0)
        assert not wrong, f"prompt token {position}: {wrong}"


# ---- the sampler alone ---------------------------------------------------------------------------

VOCABS = (32_000, 128_256, 151_936)


def made_logits(rng: random.Random, vocab: int) -> np.ndarray:
    """Like a model's, flat, full of ties, or not finite."""
    draw = np.random.default_rng(rng.getrandbits(64))
    logits = draw.standard_normal(vocab, np.float32) * rng.choice([0.0, 0.3, 2.0, 5.0, 30.0])
    kind = rng.randrange(6)
    if kind == 0:
        logits = np.round(logits)
    elif kind == 1:
        logits[draw.integers(0, vocab, 5)] += np.float32(15)
    elif kind == 2:
        logits[: vocab // 2] = logits[0]
    elif kind == 3 and rng.random() < 0.3:
        logits[rng.randrange(vocab)] = rng.choice([np.inf, -np.inf, np.nan])
    return logits.astype(np.float32)


def likeliest(rng: random.Random, raw: np.ndarray) -> list[int]:
    """The ids that decisions turn on."""
    count = rng.choice([1, 5, 50])
    return np.argpartition(-np.nan_to_num(raw), count)[:count].tolist()  # type: ignore[no-any-return]


def some_ids(rng: random.Random, vocab: int, likely: list[int], most: int) -> list[int]:
    """Ids of the whole vocabulary, half of them likely ones."""
    count = rng.choice([1, 3, most])
    return [
        rng.choice(likely) if rng.random() < 0.5 else rng.randrange(vocab) for _ in range(count)
    ]


def history(rng: random.Random, vocab: int, likely: list[int]) -> list[int]:
    """An output so far: words often and once, more distinct ones than fit a first guess."""
    often = some_ids(rng, vocab, likely, 20)
    count = rng.choice([0, 1, 2, 63, 64, 65, 300, 1499])
    return [rng.choice(often) if rng.random() < 0.5 else rng.randrange(vocab) for _ in range(count)]


def large_params(
    rng: random.Random, vocab: int, likely: list[int], output: list[int]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Parameters that matter at this place, and banned sequences of ids."""
    wish = wishes.params(rng, MOST, LEAST)
    wish = {k: v for k, v in wish.items() if k not in ("n", "stop", "bad_words")}
    for name in ("allowed_token_ids", "stop_token_ids"):
        if name in wish:
            wish[name] = some_ids(rng, vocab, likely, 5000)
    if "logit_bias" in wish:
        biases = list(wish["logit_bias"].values())
        wish["logit_bias"] = {i: rng.choice(biases) for i in some_ids(rng, vocab, likely, 40)}
    if "min_tokens" in wish:
        wish["min_tokens"] = max(0, len(output) + rng.choice([-1, 0, 0, 1, 200]))
        wish["max_tokens"] = 2000
    if rng.random() < 0.03:
        wish["logprobs"] = -1
    banned = []
    for last in some_ids(rng, vocab, likely, 1000) if rng.random() < 0.4 else []:
        start = output[len(output) - rng.randint(0, min(2, len(output))) :]
        banned.append([*(start if rng.random() < 0.7 else some_ids(rng, vocab, likely, 2)), last])
    return wish, banned


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch in this process as it is in an engine that shares its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cases(32)
@pytest.mark.usefixtures("one_thread")
def test_large_vocabularies(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.exp  # noqa: B018 # the first use chooses the kernels
    if rng.random() < 0.3:  # the plain steps that define what the compiled ones do at once
        monkeypatch.setitem(ops.__dict__, "pick_tokens", None)
        monkeypatch.setitem(ops.__dict__, "top_logprobs", None)
    vocab, count = rng.choice(VOCABS), rng.choice([1, 1, 3, 6, 13])
    raw = np.stack([made_logits(rng, vocab) for _ in range(count)])
    twins, outputs, requests = [], [], []
    for row in raw:
        likely = likeliest(rng, row)
        outputs.append(history(rng, vocab, likely))
        wish, banned = large_params(rng, vocab, likely, outputs[-1])
        prompt = some_ids(rng, vocab, likely, 500)
        eos = some_ids(rng, vocab, likely, 2)
        twins.append(Twin(wish, prompt, wish["seed"], frozenset(eos), vocab, banned))
        filled = SamplingParams(**wish, eos_token_ids=eos, bad_words_token_ids=banned or None)
        requests.append(RequestSampling.from_params(filled, prompt, vocab))
    if rng.random() < 0.5:  # as in an engine, where the counts have followed the output
        early = [np.array(output[:-40], np.int32) for output in outputs]
        Sampler()(torch.from_numpy(raw.copy()), SamplingMetadata.build(requests, early))
    arrays = [np.array(output, np.int32) for output in outputs]
    got = Sampler()(torch.from_numpy(raw.copy()), SamplingMetadata.build(requests, arrays))
    for row, twin in enumerate(twins):
        token = None if row in got.failed else got.token_ids[row]
        assert twin.may_follow(raw[row], outputs[row])(token), f"{token} in {twin.params}"
        found, asked = got.logprobs[row], twin.params.get("logprobs")
        if asked is not None and token is not None:
            assert found is not None
            wrong = twin.wrong_logprobs(raw[row], token, asked, *found)
            assert not wrong, f"{wrong} in {twin.params}"


# ---- the twin itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_twins_random_numbers_are_the_published_ones(
    counter: list[int], key: list[int], words: str
) -> None:
    """Known answers that the authors of Philox publish with it."""
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == words
