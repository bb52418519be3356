"""The seam of draft proposers: a row in `PROPOSERS`, and outputs that no proposer can change.

The proposer here is as hostile as one can be. Whatever it says, tokens, log-probabilities and ends
are byte for byte those without it, with everything else going on at once: chunked prompts,
preemption, swapping, prefix hits, aborts, failures, and every sampling parameter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_model import VOCAB as FAKE_VOCAB
from fake_model import FakeModel, fake_caches
from quire import LLM, SamplingParams
from quire.config import EngineConfig, ModelShape
from quire.core.batch import ScheduledBatch, ScheduledCachedRequests, ScheduledNewRequest
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.executor.inline import InlineExecutor
from quire.sampling import RequestSampling
from quire.weights.dummy import random_checkpoint
from quire.worker.device import CpuDevice
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner
from quire.worker.proposer import PROPOSERS, Drafting

EOS, LARGE = 3, 151_000
TOKENS = "tokens"
"""What is compared of each request: tokens, log-probabilities, the prompt's, how it ended."""


class LastPair:
    """The whole of a toy proposer: what followed the last pair of tokens when it stood before."""

    def propose(
        self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Sequence[Sequence[int]]:
        return [self._after(known.tolist()) for known in tokens]

    def _after(self, known: list[int]) -> list[int]:
        for end in range(len(known) - 1, 1, -1):
            if known[end - 2 : end] == known[-2:]:
                return known[end : end + 4]
        return []


class Hostile:
    """Proposes anything at all; `truth` has what requests will say, `counts` how often it did
    what."""

    truth: dict[str, list[int]] = {}
    vocab = 0

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.counts: dict[str, int] = {}

    def propose(
        self, req_ids: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Sequence[Sequence[int]]:
        assert len(req_ids) == len(tokens)
        for known in tokens:
            assert known.dtype == np.int32 and not known.flags.writeable
        trick = self._rng.choice(["raises", "too few", "words", *["none"] * 12])
        self.counts[trick] = self.counts.get(trick, 0) + 1
        if trick == "raises":
            raise MemoryError("hostile")
        if trick == "too few":
            return [[1]] * (len(req_ids) - 1)
        if trick == "words":
            return ["abc"] * len(req_ids)  # type: ignore[list-item]
        return [self._draft(i, t) for i, t in zip(req_ids, tokens, strict=True)]

    def _draft(self, req_id: str, tokens: np.ndarray) -> Any:
        rng = self._rng
        rest = next(
            (
                w[len(tokens) :]
                for w in (self.truth.get(req_id, []),)
                if w[: len(tokens)] == tokens.tolist()
            ),
            [],
        )
        guess = [rng.randrange(self.vocab) for _ in range(6)]
        kind = rng.choice(["random", "perfect", "half", "endless", "beyond", "stop", "none"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind == "perfect":
            return [*rest, *guess]
        if kind == "half":
            right = rng.randint(0, 4)
            return [*rest[:right], *guess, *rest[right:]]
        if kind == "endless":
            return itertools.cycle(rest or guess)
        if kind == "beyond":
            return [*rest[: rng.randint(0, 2)], rng.choice([-1, self.vocab, 2**40, 1.5]), *guess]
        if kind == "stop":
            return [*rest[: rng.randint(0, 3)], EOS, *rest]
        return [] if kind == "none" else guess


asked: list[Hostile] = []


def _hostile(config: EngineConfig, shape: ModelShape) -> Hostile:
    Hostile.vocab = shape.vocab_size
    asked.append(Hostile(len(asked)))
    return asked[-1]


PROPOSERS.register("hostile", _hostile)
PROPOSERS.register("last pair", lambda config, shape: LastPair())


@dataclass
class Said:
    """All that a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    end: tuple[Any, ...] = ()


def drive(
    core: EngineCore,
    requests: dict[str, tuple[list[int], SamplingParams]],
    rng: random.Random,
    aborts: float = 0.0,
) -> tuple[dict[str, Said], set[str], int]:
    """Everything through the core, with requests coming at any time and some aborted.

    Returns:
        What each was told, who was aborted, and how many drafts were accepted.
    """
    said = {name: Said() for name in requests}
    waiting, gone, accepted = list(requests), set(), 0
    while waiting or core.has_requests:
        while waiting and rng.random() < 0.5:
            name = waiting.pop(0)
            prompt, params = requests[name]
            core.add_request(EngineCoreRequest(name, name, 0, prompt, params, 0.0))
        if rng.random() < aborts and core.scheduler.requests:
            name = rng.choice(sorted(core.scheduler.requests))
            core.abort_requests([name])
            gone.add(name)
        outputs, stats = core.step()
        accepted += stats.num_accepted_tokens
        core.scheduler.check_integrity()
        for output in outputs:
            one = said[output.request_id]
            one.tokens += output.new_token_ids
            one.logprobs += output.new_logprobs or []
            one.prompt_logprobs += output.new_prompt_logprobs or []
            if output.finish_reason is not None:
                one.end = (output.finish_reason, output.stop_reason, output.error)
    assert core.kv.usage == 0.0
    return said, gone, accepted


def make_core(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], proposer: str | None
) -> EngineCore:
    monkeypatch.setattr(
        "quire.engine.core.make_executor",
        lambda config, shape, name: InlineExecutor(config, shape, proposer),
    )
    return EngineCore(EngineConfig.from_options(**options))


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Every parameter with every other."""
    some = [rng.randrange(vocab) for _ in range(20)]
    return SamplingParams(
        seed=rng.getrandbits(53),
        max_tokens=rng.randint(1, 30),
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.5]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.5, -0.5]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        eos_token_ids=[EOS],
        stop_token_ids=rng.choice([[], some[:2]]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 1]),
        logit_bias=rng.choice([None, None, {EOS: 3.0, some[0]: 2.0}]),
        allowed_token_ids=rng.choice([None, None, None, [*some, EOS]]),
        bad_words_token_ids=rng.choice([None, [[some[0]], some[:2], some[1:4]]]),
    )


def random_requests(
    rng: random.Random, vocab: int, count: int
) -> dict[str, tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(vocab) for _ in range(48)]
    found = {}
    for number in range(count):
        head = shared[: rng.choice([0, 16, 33, 48])]
        prompt = head + [rng.randrange(vocab) for _ in range(rng.randint(1, 30))]
        found[f"r{number}"] = (prompt, random_params(rng, vocab))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a vocabulary of the size people use."""
    return random_checkpoint(tmp_path_factory.mktemp("large"), {"vocab_size": LARGE})


CROWDED: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 40},
    {"num_gpu_blocks_override": 13, "swap_space": 0.01, "preemption_mode": "swap"},
    {"enable_prefix_caching": False, "num_gpu_blocks_override": 13},
    {"scheduling_policy": "prefill_first", "long_prefill_token_threshold": 9},
]


@pytest.mark.parametrize("model", ["quire-demo", "large"])
@pytest.mark.parametrize("crowd", CROWDED, ids=str)
def test_no_proposer_changes_an_output(
    folder: Path, crowd: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(str(crowd) + model)
    options: dict[str, Any] = {"max_model_len": 96}
    if model == "large":
        options["model"] = str(folder)
    plain_core = make_core(monkeypatch, options, None)
    vocab = plain_core.info.vocab_size
    requests = random_requests(rng, vocab, 24 if model == "large" else 60)
    plain, _, none = drive(plain_core, requests, rng)
    plain_core.shutdown()
    assert not none
    Hostile.truth = {name: requests[name][0] + one.tokens for name, one in plain.items()}
    total = 0
    for aborts in (0.0, 0.1):
        core = make_core(monkeypatch, options | crowd, "hostile")
        said, gone, accepted = drive(core, requests, rng, aborts)
        core.shutdown()
        total += accepted
        assert bool(gone) == bool(aborts)
        for name, one in said.items():
            if name not in gone:
                assert one == plain[name], name
            else:
                count = len(one.tokens)
                assert one.tokens == plain[name].tokens[:count]
                assert one.logprobs == plain[name].logprobs[: len(one.logprobs)]
    assert total > 50, "some drafts were right"


def test_a_row_makes_a_proposer_and_the_toy_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(monkeypatch, {"max_model_len": 256}, "last pair")
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = [300, 301, 302, 303, 304, 305] * 8
    _, _, accepted = drive(core, {"a": (prompt, params)}, random.Random(0))
    assert accepted > 10
    with pytest.raises(ConfigError, match="unknown draft proposer 'lastpair'"):
        InlineExecutor(core.config, core.config.model.read_shape(), "lastpair")


def test_several_choices_stop_strings_and_streams_of_the_embedded_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the whole of `LLM`: text, stop strings, `n`, sums of log-probabilities."""
    prompts = ["The capital of France is", "Once upon a time there was a", "2 + 3 ="]
    params = [
        SamplingParams(seed=5, n=3, temperature=0.9, max_tokens=24, logprobs=2, stop=[" a", "."]),
        SamplingParams(seed=6, n=2, temperature=0.1, max_tokens=24, stop=["the"],
                       include_stop_str_in_output=True),
        SamplingParams(seed=7, temperature=1.3, max_tokens=16, repetition_penalty=1.2),
    ]  # fmt: skip
    told = []
    for proposer in (None, "last pair", "hostile"):
        monkeypatch.setattr(
            "quire.engine.core.make_executor",
            lambda config, shape, name, proposer=proposer: InlineExecutor(config, shape, proposer),
        )
        with LLM(max_model_len=128) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        told.append([_plain(output) for output in outputs])
        Hostile.truth = {}
    assert told[1] == told[0]
    assert told[2] == told[0]


def _plain(output: Any) -> list[tuple[Any, ...]]:
    return [
        (c.index, c.text, c.token_ids, c.cumulative_logprob, c.logprobs, c.finish_reason,
         c.stop_reason)
        for c in output.outputs
    ]  # fmt: skip


# ---- the worker alone ----------------------------------------------------------------------------


def alone(model: Any = None, **params: Any) -> tuple[ModelRunner, ScheduledNewRequest]:
    """A runner on the fake model, and a request for it."""
    state = InputBatch(4, 64, 8, FAKE_VOCAB)
    runner = ModelRunner(model or FakeModel(), fake_caches(12, 8), state, CpuDevice())
    sampling = SamplingParams(**{"seed": 4, "temperature": 0.9, **params})
    return runner, ScheduledNewRequest("a", [1, 2, 3], [], sampling, ([1, 2, 3],), 0)


def batch(
    new: Sequence[ScheduledNewRequest] = (), drafts: Sequence[int] = (), known: int = 3
) -> ScheduledBatch:
    cached = ScheduledCachedRequests() if new else ScheduledCachedRequests(["a"], [()], [known - 1])
    count = known if new else 1 + len(drafts)
    return ScheduledBatch(
        1, list(new), cached, {"a": count}, count, [], [],
        scheduled_spec_tokens={"a": list(drafts)} if drafts else {},
    )  # fmt: skip


def plain_tokens(count: int, **params: Any) -> list[int]:
    runner, new = alone(**params)
    tokens = runner.execute(batch([new])).sampled_token_ids["a"]
    for done in range(1, count):
        tokens = tokens + runner.execute(batch(known=3 + done)).sampled_token_ids["a"]
    return tokens


@pytest.mark.parametrize("right", range(6))
def test_a_step_gives_the_accepted_drafts_and_one_token_more(right: int) -> None:
    truth = plain_tokens(8, logprobs=1, frequency_penalty=0.7)
    runner, new = alone(logprobs=1, frequency_penalty=0.7)
    runner.execute(batch([new]))
    drafts = truth[1:6]
    if right < 5:
        drafts[right] = (drafts[right] + 1) % FAKE_VOCAB
    result = runner.execute(batch(drafts=drafts, known=4))
    assert result.sampled_token_ids["a"] == truth[1 : right + 2]
    assert len(result.logprobs["a"]) == right + 1
    again = runner.execute(batch(known=5 + right))
    assert again.sampled_token_ids["a"] == [truth[right + 2]], "what was rejected left no trace"


class Failing(FakeModel):
    """Raises at one token, or makes its row no number."""

    def __init__(self, poison: int, raises: bool) -> None:
        super().__init__()
        self.poison, self.raises = poison, raises

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        hit = input_ids == self.poison
        if self.raises and bool(hit.any()):
            raise RuntimeError("poison")
        hidden = super().forward(input_ids, positions, kv_caches, metadata)
        hidden[metadata.select(hit)] = -1.0
        return hidden

    def compute_logits(self, hidden: Any, keep: Any = None) -> Any:
        logits = super().compute_logits(hidden)
        logits[hidden.flatten() < 0] = float("nan")
        return logits


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_breaks_the_model_fails_nobody(raises: bool, temperature: float) -> None:
    truth = plain_tokens(4, temperature=temperature)
    poison = next(t for t in range(FAKE_VOCAB) if t not in (1, 2, 3, *truth))
    runner, new = alone(Failing(poison, raises), temperature=temperature)
    runner.execute(batch([new]))
    result = runner.execute(batch(drafts=[truth[1], poison, 5], known=4))
    assert not result.failed
    expected = truth[1:2] if raises else truth[1:3]
    assert result.sampled_token_ids["a"] == expected


def test_an_accepted_draft_that_breaks_the_model_fails_when_it_would_have() -> None:
    """The tokens before it are output; the failure comes with the step that would have had it."""
    truth = plain_tokens(4, temperature=0.0)
    runner, new = alone(Failing(truth[2], raises=False), temperature=0.0)
    assert truth[2] not in truth[:2]
    runner.execute(batch([new]))
    result = runner.execute(batch(drafts=truth[1:4], known=4))
    assert not result.failed and result.sampled_token_ids["a"] == truth[1:3]
    result = runner.execute(batch(known=6))
    assert list(result.failed) == ["a"]


def test_a_signal_in_the_proposer_is_no_fault_of_it() -> None:
    class Interrupted:
        def propose(self, req_ids: Any, tokens: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Drafting(Interrupted(), 10, 10).drafts(["a"], [np.zeros(3, np.int32)])


def test_without_a_proposer_a_greedy_step_makes_no_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts of greedy requests need no logits either, and no draft costs nothing."""
    monkeypatch.setattr(
        "quire.worker.sampling_head.SamplingMetadata.build", lambda *a, **k: pytest.fail("built")
    )
    truth = plain_tokens(4, temperature=0.0)
    runner, new = alone(temperature=0.0)
    runner.execute(batch([new]))
    assert runner.execute(batch(drafts=truth[1:3], known=4)).sampled_token_ids["a"] == truth[1:4]


class EvenOdd:
    """A grammar of sorts: an even token follows an odd number of tokens, and it refuses to look at
    what broke that rule."""

    def allowed(self, output: np.ndarray) -> np.ndarray:
        assert all(token % 2 == place % 2 for place, token in enumerate(output.tolist()))
        bits = np.zeros(64, dtype=np.uint8)
        bits[len(output) % 2 :: 2] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("right", range(5))
def test_a_mask_holds_at_each_position_of_the_drafts(right: int, temperature: float) -> None:
    def masked() -> ModelRunner:
        runner, new = alone(temperature=temperature)
        runner.input_batch.add(new)
        row = runner.input_batch.row_of["a"]
        runner.input_batch.sampling[row] = RequestSampling.from_params(
            new.sampling_params, [1, 2, 3], FAKE_VOCAB, EvenOdd()
        )
        cached = ScheduledCachedRequests(["a"], [()], [0])
        first = runner.execute(ScheduledBatch(1, [], cached, {"a": 3}, 3, [], []))
        truth[:1] = first.sampled_token_ids["a"]
        return runner

    truth: list[int] = []
    runner = masked()
    for done in range(1, 7):
        truth += runner.execute(batch(known=3 + done)).sampled_token_ids["a"]
    assert [token % 2 for token in truth] == [0, 1, 0, 1, 0, 1, 0]
    drafts = truth[1:6]
    drafts[right] = (drafts[right] + 1) % FAKE_VOCAB
    result = masked().execute(batch(drafts=drafts, known=4))
    assert not result.failed and result.sampled_token_ids["a"] == truth[1 : right + 2]
