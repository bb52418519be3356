"""What leaves a step by an exception has not happened: the plain cases. tests/fuzz/test_step.py
tries it at every statement."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from fake_executor import FakeExecutor
from kept_frames import KeptFrames
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.facts import FactKind, Loss, unpack
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.core import EngineCore
from quire.engine.cores.core_process import EngineCoreProcess
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import EngineCoreRequest, Outputs
from quire.errors import InvalidRequest
from quire.params import RequestOutputKind

PROMPT = list(range(300, 364))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def alarms_anywhere(test: Any) -> Any:
    """Mark: it may come within `open()`, or where no exception can leave, as in a callback of the
    garbage collector (hypothesis has one)."""
    for ignored in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        test = pytest.mark.filterwarnings(f"ignore::{ignored}")(test)
    return test


class FailingExecutor(FakeExecutor):
    """Raises in the steps that are named, before or after its work."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, n: 400 + n)
        self.raises: dict[int, BaseException] = {}
        self.num_resets = 0
        self.num_steps = 0

    def execute(self, batch: Any) -> Any:
        self.num_steps += 1
        error = self.raises.pop(self.num_steps, None)
        if error is not None:
            raise error
        return super().execute(batch)

    def reset(self) -> None:
        self.num_resets += 1
        self.known.clear()


def request(name: str, prompt: list[int] = PROMPT, **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(name, name, 0, prompt, GREEDY, 0.0, **more)


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(EngineConfig.from_options(), executor=FailingExecutor())


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_requests:
        for output in core.step()[0]:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    core.scheduler.check_integrity()
    assert core.kv.usage == 0.0
    return tokens


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), TimeoutError()])
def test_blocks_that_were_never_computed_are_never_found(core: EngineCore, error) -> None:  # type: ignore[no-untyped-def]
    core.executor.raises[1] = error  # type: ignore[attr-defined]
    core.add_request(request("a"))
    with pytest.raises(type(error)):
        core.step()
    core.scheduler.check_integrity()
    assert core.kv.usage == 0.0
    told = core.call("explain_prefix", {"prompt_token_ids": PROMPT})
    assert told["num_cached_tokens"] == 0
    core.abort_requests(["a"])
    core.add_request(request("b"))
    assert core.step()[1].num_prompt_tokens == len(PROMPT), "nothing was there to be reused"


def test_what_was_computed_before_is_still_found(core: EngineCore) -> None:
    core.add_request(request("a"))
    run(core)
    core.executor.raises[core.executor.num_steps + 1] = KeyboardInterrupt()  # type: ignore[attr-defined]
    core.add_request(request("b"))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.step()[1].prefix_hits == len(PROMPT) - 1


def test_the_step_after_gives_what_this_one_would_have_given(core: EngineCore) -> None:
    for name in ("a", "b"):
        core.add_request(request(name, PROMPT + [ord(name)]))
    core.executor.raises = {1: MemoryError(), 5: MemoryError(), 9: MemoryError()}  # type: ignore[attr-defined]
    tokens: dict[str, list[int]] = {}
    errors = 0
    while core.has_requests:
        try:
            outputs = core.step()[0]
        except MemoryError:
            errors += 1
            core.scheduler.check_integrity()
            continue
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert errors == 3
    assert tokens == {name: list(range(400, 412)) for name in "ab"}
    assert core.kv.usage == 0.0


def test_an_ended_request_is_not_ended_if_nobody_got_to_know(core: EngineCore) -> None:
    core.add_request(request("a"))
    for _ in range(11):
        core.step()

    def fail(outputs: list[EngineCoreOutput], stats: StepStats) -> None:
        assert outputs[0].finish_reason is not None
        raise OSError("nobody there")

    with pytest.raises(OSError):
        core.step_into(fail)
    [output] = core.step()[0]
    assert output.new_token_ids == [411] and str(output.finish_reason) == "length"


def test_the_records_tell_it(core: EngineCore) -> None:
    core.add_request(request("a"))
    core.step()
    core.executor.raises[2] = MemoryError()  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        core.step()
    facts = list(unpack(core.step()[1].facts))
    assert [f.kind for f in facts if f.kind != FactKind.WAITS] == [
        FactKind.PREEMPTED, FactKind.STEP, FactKind.ADMITTED,
    ]  # fmt: skip
    assert facts[0].reason == Loss.UNDONE


def test_a_refused_verb_disturbs_nobody(core: EngineCore) -> None:
    core.add_request(request("a"))
    core.step()
    with pytest.raises(InvalidRequest):
        core.call("set_limits", {"max_num_seqs": 0})
    assert core.executor.num_resets == 0  # type: ignore[attr-defined]
    assert len(core.scheduler.running) == 1


class TestTheProcess:
    """The engine-core process tries a step once more before it gives up."""

    @pytest.fixture
    def sent(self, core: EngineCore) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = EngineCoreProcess(theirs)
            process._sender = KeptFrames()
            core.add_request(request("a"))
            yield process

    def test_what_passes_does_no_harm(self, sent: EngineCoreProcess, core: EngineCore) -> None:
        core.executor.raises = {1: MemoryError(), 3: MemoryError()}  # type: ignore[attr-defined]
        for _ in range(4):
            sent._step(core)
        frames = sent._sender.frames
        outputs = [msgspec.msgpack.decode(frame[4:], type=Outputs) for frame in frames]
        assert [o.outputs[0].new_token_ids for o in outputs] == [[400], [401]]

    def test_what_stays_ends_it(self, sent: EngineCoreProcess, core: EngineCore) -> None:
        core.executor.raises = {2: MemoryError(), 3: MemoryError()}  # type: ignore[attr-defined]
        sent._step(core)
        sent._step(core)
        with pytest.raises(MemoryError):
            sent._step(core)


def test_outputs_on_their_way_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(
        EngineConfig.from_options(disable_log_stats=True), executor=FailingExecutor()
    )
    params = GREEDY.replace(output_kind=RequestOutputKind.DELTA)
    for name in ("a", "b"):
        engine.add_request(name, {"prompt_token_ids": PROMPT}, params)
    process, record = engine.frontend.output.process, engine.frontend.sinks.record
    calls = 0

    def interrupted(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise KeyboardInterrupt
            done = act(*args, **options)
            if calls % 3 == 1:
                raise KeyboardInterrupt
            return done

        return call

    monkeypatch.setattr(engine.frontend.output, "process", interrupted(process))
    monkeypatch.setattr(engine.frontend.sinks, "record", interrupted(record))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_unfinished_requests:
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            engine.frontend.output.check_integrity()
            continue
        for output in outputs:
            tokens[output.request_id] += output.outputs[0].token_ids
    assert tokens == {name: list(range(400, 412)) for name in "ab"}


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(max_num_seqs=4, max_num_batched_tokens=64) as made:
        yield made


PROMPTS = ["The capital of France is", "Once upon a time there was a", "What is 23 + 45?"] * 2
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)


def texts(llm: LLM, prompts: list[str] = PROMPTS) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@alarms_anywhere
def test_real_signals_leave_nothing_behind(llm: LLM) -> None:
    expected = texts(llm)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    left = 0
    try:
        for delay in range(1, 21):
            llm.reset_prefix_cache()
            try:  # the signal may come when the work is done, too, before it is called off
                try:
                    signal.setitimer(signal.ITIMER_REAL, delay * 0.004)
                    texts(llm)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeoutError:
                left += 1
            assert texts(llm) == expected
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left, "no signal came while it worked"
    assert llm.llm_engine.core.kv.usage == 0.0
    llm.llm_engine.core.scheduler.check_integrity()
    gc.collect()  # files left open are closed here, not in another test


def test_threads_share_one_engine(llm: LLM) -> None:
    expected = {prompt: texts(llm, [prompt])[0] for prompt in PROMPTS}
    results: dict[int, list[tuple[int, ...]]] = {}
    steps = llm.llm_engine.core.scheduler.step

    def work(number: int) -> None:
        mine = PROMPTS[number % 3 :] + PROMPTS[: number % 3]
        results[number] = texts(llm, mine) + texts(llm, mine[:1])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == 6, "a thread lost its results"
    for number, got in results.items():
        mine = PROMPTS[number % 3 :] + PROMPTS[: number % 3]
        assert got == [expected[p] for p in [*mine, mine[0]]]
    assert llm.llm_engine.core.kv.usage == 0.0
    assert not llm._awaited and not llm._ended
    one_by_one = 6 * 7 * 40 / 4
    assert llm.llm_engine.core.scheduler.step - steps < one_by_one + 7 * 40, "no shared batches"


@alarms_anywhere
def test_a_thread_that_is_interrupted_takes_no_other_down(llm: LLM) -> None:
    expected = texts(llm)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append([texts(llm) for _ in range(4)]))
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    try:
        thread.start()
        while thread.is_alive():
            with suppress(TimeoutError):  # it may also come on the way out
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.02)
                    texts(llm)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(0.001)
        thread.join(timeout=120)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert other == [[expected] * 4]
    assert llm.llm_engine.core.kv.usage == 0.0
    gc.collect()  # files left open are closed here, not in another test


def test_a_change_left_behind_disturbs_no_later_one() -> None:
    """An alarm can come when a change has begun and its `with` is not yet entered."""
    options = EngineConfig.from_options(disable_log_stats=True)
    core = LLMEngine(options, executor=FailingExecutor()).core
    left = core._change()
    left.__enter__()
    with core._change():
        del left
        assert core.scheduler.is_changing
    assert not core.scheduler.is_changing


def test_an_alarm_is_no_fault_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to who set it, also where failures of single requests are contained."""
    engine = LLMEngine(
        EngineConfig.from_options(disable_log_stats=True), executor=FailingExecutor()
    )
    engine.add_request("a", {"prompt_token_ids": PROMPT}, GREEDY)
    append = engine.frontend.output._append_tokens

    def alarmed(*args: Any) -> Any:
        monkeypatch.setattr(engine.frontend.output, "_append_tokens", append)
        signal.raise_signal(signal.SIGALRM)

    def handler(*_: object) -> None:
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        monkeypatch.setattr(engine.frontend.output, "_append_tokens", alarmed)
        with pytest.raises(TimeoutError, match="mine"):
            engine.step()
    finally:
        signal.signal(signal.SIGALRM, before)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == list(range(400, 412))


def test_questions_of_another_thread_disturb_no_step(llm: LLM) -> None:
    """They go through the same books, so they wait for the step to end."""
    expected = texts(llm)
    resets = llm.llm_engine.core.executor.reset
    undone: list[int] = []

    def noticed() -> None:
        undone.append(1)
        resets()

    llm.llm_engine.core.executor.reset = noticed  # type: ignore[method-assign]
    done, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not done.is_set():
                llm.explain_prefix("The capital of France is")
                llm.reset_prefix_cache()
                llm.timeline(10)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert [texts(llm) for _ in range(5)] == [expected] * 5
    finally:
        done.set()
        thread.join(timeout=120)
        llm.llm_engine.core.executor.reset = resets  # type: ignore[method-assign]
    assert not failures and not undone
    assert llm.llm_engine.core.kv.usage == 0.0
