"""A step that is left by an exception has not happened, at whichever statement that was.

An engine with a worker whose tokens follow from the KV it reads does some work. The same work is
done again and left, by an exception that nobody expects, at one statement of it; then it is gone
on with. Books and cache must be whole at once, the results the same to the last token, and equal
prompts afterwards must find nothing that was never computed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire
from fuzz_kit import cases
from honest_worker import HonestWorker
from late_executor import LateExecutor
from quire import LLM
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

SOURCE = Path(quire.__file__).parent
ENGINE_FILES = (
    *(SOURCE / "core").rglob("*.py"),
    SOURCE / "engine" / "core.py",
    SOURCE / "engine" / "llm_engine.py",
    SOURCE / "engine" / "cores" / "inline.py",
    SOURCE / "engine" / "cores" / "obey.py",
    *(SOURCE / "engine" / "frontend").rglob("*.py"),
    SOURCE / "tokenizer" / "detokenizer.py",
    Path(__file__).with_name("honest_worker.py"),
)
assert all(file.is_file() for file in ENGINE_FILES), "nothing would follow one that has moved"
ENGINE = frozenset(map(str, ENGINE_FILES))
WORKER = frozenset(
    str(p) for part in ("worker", "sampling", "structured") for p in (SOURCE / part).rglob("*.py")
)

Place = tuple[str, int]


class Boom(BaseException):
    """As little expected as a `KeyboardInterrupt`."""


class Tripwire:
    """Follows the statements of the engine, and raises `Boom` at some of them.

    Args:
        at: Numbers of statements, counted from 0, ascending. The count goes on after a `Boom`.
        files: What is followed.
    """

    def __init__(self, *at: int, files: frozenset[str] = ENGINE) -> None:
        self.at = list(at)
        self.files = files
        self.places: list[Place] = []
        self.fired: list[Place] = []

    def __enter__(self) -> Tripwire:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        # What is raised while a value is being returned takes the value with it: its caller must
        # know what to do. `LLMEngine.step` does nothing else itself.
        returns = code.co_qualname == "LLMEngine.step"
        return self._line if code.co_filename in self.files and not returns else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.places.append(place)
            if self.at and len(self.places) > self.at[0]:
                self.at.pop(0)
                self.fired.append(place)
                raise Boom
        return self._line

    def rearm(self) -> None:
        """Python stops following once the following has raised."""
        if self.at:
            sys.settrace(self._call)


class TickingClock:
    """A millisecond goes by with every look at it: the same on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 0.001
        return self._now


@dataclass
class Work:
    """Requests for an engine, and when they come or are given up."""

    prompts: dict[str, list[int]]
    params: dict[str, SamplingParams]
    priority: dict[str, int]
    arrival: dict[str, int]
    """Steps done when it comes."""
    given_up: dict[str, int]
    options: dict[str, Any]
    worker: dict[str, Any]
    depth: int = 1
    """Batches that the executor takes at once."""
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)


def work_of(rng: random.Random) -> Work:
    """A few requests that share prefixes, in a pool too small for them."""
    stem = [300 + rng.randrange(5) for _ in range(40)]
    names = [f"r{i}" for i in range(rng.randint(4, 6))]
    kinds = list(RequestOutputKind)
    prompts = {
        n: stem[: rng.randint(0, 40)] + [rng.randrange(300, 340) for _ in range(rng.randint(1, 30))]
        for n in names
    }
    params = {
        n: SamplingParams(
            temperature=1.0,
            max_tokens=rng.randint(1, 24),
            n=1 if rng.random() < 0.8 else 2,
            logprobs=rng.choice([None, None, 1]),
            stop=rng.choice([[], [], ["ing"], ["a", "e"]]),
            ignore_eos=True,
            output_kind=rng.choice(kinds),
            seed=7,
        )
        for n in names
    }
    windows = rng.choice([(None,), (None,), (20, None)])
    room = rng.randint(7, 11) * len(windows)
    policy = rng.choice(["fcfs", "priority", "sjf", "fair", "prefill_first"])
    return Work(
        prompts,
        params,
        {n: rng.randrange(3) if policy == "priority" else 0 for n in names},
        {n: rng.choice([0, 0, 0, rng.randrange(8)]) for n in names},
        {names[0]: rng.randint(1, 8)} if rng.random() < 0.4 else {},
        {
            "scheduling_policy": policy,
            "priority_preemption": policy == "priority",
            "max_num_seqs": rng.choice([2, 3, 8]),
            "max_num_batched_tokens": rng.choice([16, 48, 256]),
            "scheduler_delay_factor": rng.choice([0.0, 0.0, 0.5]),
            "preemption_mode": "auto",
            "max_model_len": 96,
        },
        {
            "num_blocks": room,
            "windows": windows,
            "num_swap_blocks": rng.choice([0, 0, 3, 12]),
        },
        rng.choice([1, 1, 2, 3]),
    )


def do(work: Work, wire: Tripwire) -> tuple[LLMEngine, HonestWorker]:
    """Do the work; whoever is hit by a `Boom` looks at the books and does it again."""
    worker = HonestWorker(**work.worker)
    executor = worker if work.depth == 1 else LateExecutor(worker, work.depth)
    engine = LLMEngine(
        EngineConfig.from_options(disable_log_stats=True, **work.options),
        executor=executor,
        clock=TickingClock(),
    )
    work.outputs = {name: [] for name in work.prompts}
    with wire:
        _run(work, engine, wire)
    return engine, worker


def _run(work: Work, engine: LLMEngine, wire: Tripwire) -> None:
    coming = dict(work.arrival)
    leaving = dict(work.given_up)
    steps = 0
    while coming or _insist(engine, wire, lambda: engine.has_unfinished_requests):
        assert steps < 2000, "the work never ends"
        for name in [n for n, at in coming.items() if at <= steps]:
            _insist(engine, wire, lambda name=name: _add(work, engine, name))  # type: ignore[misc]
            del coming[name]
        for name in [n for n, at in leaving.items() if at <= steps and n not in coming]:
            give_up = lambda name=name: engine.abort_request([name])  # type: ignore[misc]  # noqa: E731
            _insist(engine, wire, give_up, half_way=True)
            del leaving[name]
        for output in _insist(engine, wire, engine.step) or []:
            work.outputs[output.request_id].append(output)
        steps += 1


def _add(work: Work, engine: LLMEngine, name: str) -> None:
    if engine.frontend.internal_ids(name):
        return  # it was left when all was done
    engine.add_request(
        name,
        {"prompt_token_ids": work.prompts[name]},
        work.params[name],
        priority=work.priority[name],
        client=name[-1],
    )


def _insist(
    engine: LLMEngine, wire: Tripwire, act: Callable[[], Any], half_way: bool = False
) -> Any:
    """`half_way`: one that is left has partly happened, and is only done again."""
    while True:
        try:
            return act()
        except Boom:
            # If even the undoing was left, it is done again before anything else.
            if not engine.core.scheduler.is_changing:
                engine.core.scheduler.check_integrity()
                if not half_way and not wire.fired[1:]:
                    engine.frontend.output.check_integrity()
            wire.rearm()


def told(work: Work) -> dict[str, Any]:
    """What the callers got of each request, however it was cut into outputs."""
    return {name: _joined(outputs, work.params[name]) for name, outputs in work.outputs.items()}


def _joined(outputs: list[RequestOutput], params: SamplingParams) -> Any:
    if params.output_kind is not RequestOutputKind.DELTA:
        last = outputs[-1:]
        return [
            (c.index, c.text, list(c.token_ids), c.logprobs, c.cumulative_logprob, c.finish_reason)
            for output in last
            for c in output.outputs
        ]
    parts: dict[int, list[Any]] = {}
    for output in outputs:
        for c in output.outputs:
            text, ids, logprobs, _ = parts.setdefault(c.index, ["", [], [], None])
            parts[c.index] = [
                text + c.text,
                ids + list(c.token_ids),
                logprobs + (c.logprobs or []),
                c.finish_reason,
            ]
    return parts


def afterwards(work: Work, engine: LLMEngine, worker: HonestWorker) -> None:
    """Nothing is held; the same prompts again find nothing that is not theirs."""
    for _ in range(2):
        engine.core.scheduler.check_integrity()
        engine.frontend.output.check_integrity()
        assert engine.core.kv.usage == 0.0, "blocks are held for nobody"
        assert not engine.frontend.output.num_unfinished
        for name in work.prompts:
            engine.add_request(name, {"prompt_token_ids": work.prompts[name]}, work.params[name])
        while engine.has_unfinished_requests:
            engine.step()
    assert not worker.num_known, "the worker was not told who ended"
    assert not worker.stale, f"read what was never computed: {worker.stale[:3]}"


def compare(work: Work, expected: dict[str, Any], wire: Tripwire) -> None:
    """Except who was given up at some step, of which there may be more now."""
    got = told(work)
    for name in work.given_up:
        got.pop(name), expected.pop(name, None)
    assert got == expected, f"left at {_said(wire)}"


def _said(wire: Tripwire) -> str:
    return ", ".join(f"{Path(f).name}:{n}" for f, n in wire.fired) or "no statement"


@cases(40)
def test_a_step_left_at_any_statement_has_not_happened(rng: random.Random) -> None:
    work = work_of(rng)
    plain = Tripwire()
    do(work, plain)
    expected = told(work)
    by_place: dict[Place, list[int]] = {}
    for number, place in enumerate(plain.places):
        by_place.setdefault(place, []).append(number)
    for place in rng.sample(sorted(by_place), 3):
        wire = Tripwire(rng.choice(by_place[place]))
        engine, worker = do(work, wire)
        assert wire.fired == [place]
        assert not worker.stale, f"left at {_said(wire)}: {worker.stale[:3]}"
        compare(work, expected, wire)
        afterwards(work, engine, worker)


@cases(10)
def test_so_has_one_whose_undoing_is_interrupted_too(rng: random.Random) -> None:
    work = work_of(rng)
    plain = Tripwire()
    do(work, plain)
    expected = told(work)
    for _ in range(3):
        first = rng.randrange(len(plain.places))
        gaps = [int(rng.expovariate(1 / 60)) + 1 for _ in range(4)]
        wire = Tripwire(*(first + sum(gaps[:i]) for i in range(5)))
        engine, worker = do(work, wire)
        assert not worker.stale, f"left at {_said(wire)}: {worker.stale[:3]}"
        compare(work, expected, wire)
        afterwards(work, engine, worker)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        max_num_seqs=4, max_num_batched_tokens=48, num_gpu_blocks_override=12, max_model_len=128
    ) as made:
        yield made


FORMS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"kind": {"enum": ["a fox", "an owl"]}},
              "required": ["kind"], "additionalProperties": False}},
    {"regex": "[a-z]{2,9}-[0-9]{4}"},
    {"choice": ["an extraordinary day", "an extravagant evening"]},
    {"grammar": 'root ::= "(" root ")" | [a-f]{2}'},
    {"structural_tag": {"type": "structural_tag", "format": {
        "type": "tag", "begin": "<tool_call>", "end": "</tool_call>",
        "content": {"type": "regex", "pattern": "[a-z ]{3,9}"}}}},
)  # fmt: skip
MARKS = {"opening": "Hm:", "closing": ".", "is_open": True}


@cases(12)
def test_a_real_worker_forgets_what_it_was_left_with(rng: random.Random, llm: LLM) -> None:
    words = ["The capital of France is", "Once upon a time", "What is 23 + 45?", "Hello, how are"]
    prompts = [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(5)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 12),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            ignore_eos=True,
        )
        for _ in prompts
    ]

    dice = random.Random(params[0].seed)
    for i in range(len(params)):
        if dice.random() < 0.6:
            form = dice.choice(FORMS) | ({"reasoning": MARKS} if dice.random() < 0.3 else {})
            params[i] = params[i].replace(structured_outputs=StructuredOutputsParams(**form))

    def results() -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]

    results()  # compiles the grammars, which is done once
    llm.reset_prefix_cache()
    plain = Tripwire(files=WORKER)
    with plain:
        expected = results()
    for number in rng.sample(range(len(plain.places)), 2):
        llm.reset_prefix_cache()
        wire = Tripwire(number, files=WORKER)
        with pytest.raises(Boom), wire:
            results()
        llm.llm_engine.core.scheduler.check_integrity()
        assert llm.llm_engine.core.kv.usage == 0.0
        for _ in range(2):  # from what the cache kept, too
            assert results() == expected, f"left at {_said(wire)}"
