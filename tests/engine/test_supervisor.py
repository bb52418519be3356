"""`AsyncLLM` over a core that fails in every way, on a manual clock: what callers get is the same.

One driver plays the event loop, the socket and the core, one small act after the other, and checks
after each that journal, streams, output processor and queue agree. What callers must get is
computed by `reference`, which knows nothing of cores.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest

from fake_core import FakeCore
from fake_executor import FakeExecutor
from known_streams import TOKENIZER, VOCABULARY, Caller
from quire.config import EngineConfig, RecoveryConfig
from quire.core.admission import LIVE_LIMITS
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import CoreHandle, OnExit, OnMessage
from quire.engine.cores.inline import InlineCore
from quire.engine.cores.pulse import Activity, Beat
from quire.engine.cores.restarts import RestartBudget
from quire.engine.cores.signs import Signs
from quire.engine.cores.supervisor import never
from quire.engine.cores.watchdog import LOOK_SECONDS, Observation
from quire.engine.frontend import front_end
from quire.engine.messages import AbortRequests
from quire.errors import POISON, EngineDead, ModelLoadError, QuireError, TooManyRequests
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams
from quire.utils.timing import ManualClock

DELTA = RequestOutputKind.DELTA


@pytest.fixture(autouse=True)
def _one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to read than a schedule takes to play."""
    monkeypatch.setattr("quire.engine.async_llm.load_tokenizer", lambda *_: TOKENIZER)
    assert front_end.load_tokenizer is not None


def always(error: QuireError) -> bool:
    return True


class World:
    """An engine, its cores, and everything between them."""

    def __init__(
        self,
        replaces: Callable[[QuireError], bool] | None = always,
        blames: bool = False,
        **options: Any,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.cores: list[FakeCore] = []
        options = {"max_num_seqs": 3, "record_steps": 64, **options}
        self.engine = AsyncLLM(
            EngineConfig.from_options(disable_log_stats=True, **options),
            entropy=b"",
            clock=self.clock,
            make_core=self._make,
            replaces=replaces,
        )
        if not blames:
            # Here cores die at any moment, of nothing: `test_quarantine.py` is about blame.
            self.engine.frontend._quarantine._judge = lambda unfinished: []  # type: ignore[method-assign]
        self.callers: list[Caller] = []
        self.calls: list[asyncio.Task[Any]] = []
        self.engine.supervisor.start()

    def _make(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> CoreHandle:
        core = FakeCore(epoch, on_message, on_exit)
        start = core.start

        def checked(config: EngineConfig) -> None:
            start(config)
            now = self.engine.config.scheduler
            assert core.limits == {name: getattr(now, name) for name in LIVE_LIMITS}

        core.start = checked  # type: ignore[method-assign]
        self.cores.append(core)
        return core

    @property
    def core(self) -> FakeCore:
        """The one that is there."""
        return self.cores[-1]

    async def submit(self, name: str, prompt: list[int], **params: Any) -> Caller:
        made = SamplingParams(**{"max_tokens": 6, "seed": 3, "output_kind": DELTA, **params})
        stream = await self.engine.submit(prompt, made, name)
        caller = Caller(name, prompt, made, stream)
        put, internal = stream.put, self.engine.frontend.internal_ids(name)
        journal = self.engine.frontend.journal
        assert journal is not None

        def put_what_is_written(item: RequestOutput | QuireError) -> None:
            put(item)
            written, sent = journal.tokens(), caller.sent()
            for index, name in enumerate(internal):
                assert name not in written or written[name] == sent[index], "sent, not written"

        stream.put = put_what_is_written  # type: ignore[method-assign]
        self.callers.append(caller)
        return caller

    async def abort(self, caller: Caller) -> None:
        caller.aborted = True
        await self.engine.abort(caller.name)

    def change(self, **limits: Any) -> None:
        self.calls.append(asyncio.ensure_future(self.engine.set_limits(**limits)))

    async def settle(self) -> None:
        """Let the event loop have its turns, and look at everything."""
        self.clock.advance(0.001)
        for _ in range(3):
            await asyncio.sleep(0)
        if self.engine.state != "dead":
            self.check()

    def check(self) -> None:
        self.engine.check_integrity()
        journal = self.engine.frontend.journal
        assert journal is not None
        written = journal.tokens()
        callers = {caller.name: caller for caller in self.callers}
        for one in self.engine.frontend.output.active():
            sent = callers[one.external_id].sent()[one.index]
            assert sent == written[one.internal_id], "not in the journal, or not on the wire"
        epochs = [row.epoch for row in self._rows()]
        assert epochs == sorted(epochs) and set(epochs) <= set(range(1, len(self.cores) + 1))

    def check_core(self) -> None:
        """It works on nothing that nobody waits for, unless the word of it is on its way."""
        told = [m.request_ids for m in self.core.inbox if isinstance(m, AbortRequests)]
        active = {one.internal_id for one in self.engine.frontend.output.active()}
        assert set(self.core.requests) <= active.union(*told)

    def _rows(self) -> list[Any]:
        recording = self.engine.frontend.records.snapshot()
        return [recording.row(i) for i in range(len(recording))]

    async def finish(self, patience: int = 500) -> None:
        """Do all that is left to do. A core that has nothing to do while callers wait has lost
        something on its way in: it is ended, as a watchdog would."""
        for _ in range(patience):
            core = self.core
            if core.outbox:
                core.give()
            elif core.state == "loading":
                core.load()
            elif core.inbox and core.state == "ready":
                core.take()
            elif core.is_busy:
                core.step()
            elif self.engine.num_unfinished or not all(call.done() for call in self.calls):
                core.die()
            else:
                break
            await self.settle()
            for caller in self.callers:
                await caller.read()
        else:
            raise AssertionError("it never ends")
        for caller in self.callers:
            while caller.stream.unread():
                await caller.read()
            caller.check()
        await self.engine.shutdown()
        assert all(core.stopped and core.reaped for core in self.cores)


Act = Callable[[World], Awaitable[Any] | None]


async def script(world: World, hurt: Act | None = None, at: frozenset[int] = frozenset()) -> int:
    """A fixed scenario: load, requests before and after, limits, an abort, a drain.

    Args:
        world: A new one.
        hurt: Done before some of its acts.
        at: Before which ones.

    Returns:
        The number of acts.
    """
    count = 0

    async def act(what: Callable[[], Any]) -> None:
        nonlocal count
        if hurt is not None and count in at:
            done = hurt(world)
            if done is not None:
                await done
            await world.settle()
        count += 1
        if world.engine.state == "dead":
            return
        done = what()
        if asyncio.iscoroutine(done):
            await done
        await world.settle()
        world.check_core()

    def run(times: int = 1) -> list[Callable[[], Any]]:
        return [once for _ in range(times) for once in (step, give)]

    def step() -> None:
        core = world.core
        if core.state == "loading":
            core.load()
        elif core.inbox and core.state == "ready":
            core.take()
        elif core.is_busy:
            core.step()

    def give() -> None:
        if world.core.outbox:
            world.core.give()

    async def read() -> None:
        for caller in world.callers:
            await caller.read()

    for what in [
        lambda: world.submit("early", [5, 6]),
        *run(5),
        lambda: world.submit("two", [7], n=2, max_tokens=9),
        lambda: world.submit("stopped", [9], stop=[" seven"], max_tokens=30),
        *run(4),
        lambda: world.change(max_num_seqs=2),
        read,
        *run(2),
        lambda: world.submit("gone", [8, 8], max_tokens=40),
        *run(4),
        lambda: world.abort(world.callers[-1]),
        *run(2),
        lambda: world.change(max_num_seqs=5, max_num_batched_tokens=64),
        *run(3),
        read,
        *run(8),
    ]:
        await act(what)
    return count


def kill(world: World) -> None:
    world.core.die()


def fail(world: World) -> None:
    """It says so, and is gone a moment later."""
    core = world.core
    core.outbox.clear()
    heard = core._said
    core.fail()
    if heard == world.engine.supervisor._number:
        core.give()
    core.die()


async def test_nothing_goes_wrong() -> None:
    world = World()
    assert await script(world) > 60
    await world.finish()
    assert len(world.cores) == 1
    assert world.engine.config.scheduler.max_num_seqs == 5
    assert all(call.result()["max_num_seqs"] for call in world.calls)


NUM_ACTS = 65
"""Of `script`."""


@pytest.mark.parametrize("hurt", [kill, fail])
@pytest.mark.parametrize("again", [0, 1, 4])
async def test_a_core_that_dies_at_any_message(hurt: Act, again: int) -> None:
    """Also twice: while it loads, and while it takes over. Callers get the same."""
    for point in range(NUM_ACTS):
        world = World()
        at = frozenset({point, point + again})
        assert await script(world, hurt, at) == NUM_ACTS
        deaths = len(world.cores) - 1
        await world.finish()
        assert deaths >= 1 and not any(caller.error for caller in world.callers)
        _check_limits(world)


def _check_limits(world: World) -> None:
    """What a call reported holds, in the core that is there, too; what failed has not happened."""
    expected: dict[str, Any] = {"max_num_seqs": 3}
    for call in world.calls:
        if call.exception() is None:
            expected = call.result()
    held = asdict(world.engine.config.scheduler)
    assert expected.items() <= held.items() and world.core.limits.items() <= held.items()


@pytest.mark.parametrize("hurt", [kill, fail])
async def test_without_replacement_the_engine_ends_with_its_core(hurt: Act) -> None:
    """Everybody who waits is told, once, and nobody waits for ever."""
    for point in range(NUM_ACTS):
        world = World(replaces=never)
        await script(world, hurt, frozenset({point}))
        engine = world.engine
        assert engine.state == "dead" and len(world.cores) == 1
        assert isinstance(engine.error, EngineDead)
        with pytest.raises(EngineDead):
            await engine.wait_ready()
        with pytest.raises(EngineDead):
            await world.submit("late", [1])
        with pytest.raises(EngineDead):
            await engine.check_health()
        for caller in world.callers:
            while caller.stream.unread() and caller.error is None:
                await caller.read()
            ended = bool(caller.got) and caller.got[-1].finished
            assert ended is (caller.error is None), "told both, or neither"
            assert not caller.stream.unread(), "something came after the end"
        assert all(call.done() for call in world.calls)
        await asyncio.gather(*world.calls, return_exceptions=True)
        await engine.shutdown()


# ---- how often, and whose fault --------------------------------------------------------------


async def work(world: World, kills: Callable[[FakeCore], bool]) -> None:
    """Have the core do all it can; it dies where `kills` says, before it does the next thing."""
    for _ in range(600):
        core = world.core
        if core.outbox:
            core.give()
        elif core.state == "ready" and kills(core):
            core.die()
        elif core.state == "loading":
            core.load()
        elif core.inbox and core.state == "ready":
            core.take()
        elif core.is_busy:
            core.step()
        else:
            return
        await world.settle()
        for caller in world.callers:
            await caller.read()


async def test_a_request_that_kills_cores_is_taken_out_and_the_others_go_on() -> None:
    """Whether it kills them before its first token or later."""
    for position in (0, 3):
        world = World(replaces=None, blames=True, max_num_seqs=64)
        for number in range(12):
            await world.submit(f"r{number}", [number])
        (culprit,) = world.engine.frontend.internal_ids("r5")

        def kills(core: FakeCore, culprit: str = culprit, position: int = position) -> bool:
            return culprit in core.requests and len(core.requests[culprit][1]) == position

        await work(world, kills)
        for caller in world.callers:
            if caller.name == "r5":
                assert caller.got[-1].error == POISON and caller.got[-1].finished
            else:
                caller.check()
        assert world.engine.state == "ready" and 3 <= len(world.cores) <= 10
        await world.engine.shutdown()


async def test_requests_are_accepted_while_a_core_is_replaced() -> None:
    world = World(replaces=None)
    await world.submit("before", [1])
    await work(world, lambda core: len(world.cores) == 1 and bool(core.requests))
    world.core.die()
    assert world.engine.state == "replacing"
    await world.submit("meanwhile", [2])
    await world.finish()
    assert world.engine.state == "dead" and len(world.cores) == 3  # ended by `finish`


async def test_the_budget_ends_an_engine_whose_cores_die_again_and_again() -> None:
    world = World(replaces=None, core_restart_limit=2, core_restart_window=10)
    await world.submit("a", [1])
    seen = []
    while world.engine.state != "dead":
        while world.core.state != "ready":
            world.core.load()
            world.core.give()
        seen.append(world.clock.now())
        world.core.die()
        world.clock.advance(4 if len(seen) < 5 else 0)
    # At 0, 4, (8 is the third within 10 s).
    assert len(seen) == 3 and isinstance(world.engine.error, EngineDead)
    with pytest.raises(EngineDead):
        await world.callers[0].stream.__anext__()
    await world.engine.shutdown()


def test_deaths_of_long_ago_do_not_count() -> None:
    clock = ManualClock(0.0)
    budget = RestartBudget(RecoveryConfig(core_restart_limit=2, core_restart_window=10), clock)
    for _ in range(20):
        assert budget(EngineDead("it died"))
        clock.advance(5.0)
    assert budget(EngineDead("it died"))
    assert not budget(EngineDead("it died"))


async def test_a_core_that_cannot_start_is_not_replaced() -> None:
    world = World(replaces=None)
    world.core.fail()
    world.core.give()
    assert world.engine.state == "dead" and len(world.cores) == 1
    await world.engine.shutdown()


async def test_no_budget_no_replacement() -> None:
    world = World(replaces=None, core_restart_limit=0)
    while world.core.state != "ready":
        world.core.load()
        world.core.give()
    world.core.die()
    assert world.engine.state == "dead" and len(world.cores) == 1
    await world.engine.shutdown()


# ---- the messages between ----------------------------------------------------------------------


async def busy_world() -> World:
    """Ready, with two requests in the middle."""
    world = World()
    for name in "ab":
        await world.submit(name, [ord(name)], max_tokens=12)
    while world.core.is_busy and len(world.callers[0].sent()[0]) < 3:
        core = world.core
        if core.outbox:
            core.give()
        elif core.state == "loading":
            core.load()
        elif core.inbox:
            core.take()
        else:
            core.step()
        await world.settle()
    return world


async def test_a_repeated_message_is_heard_once() -> None:
    world = await busy_world()
    world.core.step()
    world.core.outbox.append(world.core.outbox[0])
    world.core.step()
    await world.finish()
    assert len(world.cores) == 1


async def test_a_lost_message_costs_a_core_and_no_token() -> None:
    world = await busy_world()
    world.core.step()
    world.core.outbox.popleft()
    world.core.step()
    world.core.give()
    await world.settle()
    assert [core.epoch for core in world.cores] == [1, 2]
    await world.finish()


async def test_messages_in_the_wrong_order_cost_a_core_and_no_token() -> None:
    world = await busy_world()
    world.core.step()
    world.core.step()
    world.core.outbox.reverse()
    await world.finish()
    assert len(world.cores) == 2


async def test_words_of_a_core_that_was_replaced_are_dropped() -> None:
    world = await busy_world()
    old = world.core
    old.step()
    old.step()
    old.die()
    while old.outbox:
        old.give()
        await world.settle()
    old.die()
    await world.finish()
    assert len(world.cores) == 2


async def test_a_lost_request_is_found_in_the_journal() -> None:
    world = await busy_world()
    await world.submit("lost", [1])
    world.core.inbox.clear()
    await world.finish()
    assert len(world.cores) == 2


async def test_a_caller_that_reads_nothing_holds_nobody_up() -> None:
    world = await busy_world()
    slow = world.callers[0]
    slow.read, read = _nothing, slow.read  # type: ignore[method-assign]
    for _ in range(40):
        if world.core.outbox:
            world.core.give()
        elif world.core.is_busy:
            world.core.step()
        await world.settle()
        await world.callers[1].read()
    assert world.callers[1].got[-1].finished and not slow.got
    slow.read = read  # type: ignore[method-assign]
    await world.finish()


async def _nothing() -> None:
    """Reads nothing."""


async def test_an_abort_and_an_end_that_cross_each_other() -> None:
    world = await busy_world()
    world.core.step(9)
    await world.abort(world.callers[0])
    await world.finish()
    assert world.callers[0].got[-1].outputs[0].finish_reason == "abort"
    assert world.callers[1].got[-1].outputs[0].finish_reason == "length"


# ---- limits ------------------------------------------------------------------------------------


async def test_a_core_that_dies_right_after_its_reply_has_changed_the_limits() -> None:
    """The caller has not had its turn yet; its successor starts with the new ones all the same."""
    world = await busy_world()
    world.change(max_num_seqs=2)
    await world.settle()
    world.core.take()
    world.core.give()
    world.core.die()
    assert world.core.epoch == 2 and world.core.limits["max_num_seqs"] == 2
    await world.settle()
    assert world.calls[0].result()["max_num_seqs"] == 2
    await world.finish()


async def test_a_change_whose_caller_has_gone_holds() -> None:
    world = await busy_world()
    world.change(max_num_seqs=2)
    await world.settle()
    world.calls.pop().cancel()
    await world.settle()
    world.core.take()
    world.core.give()
    assert world.engine.config.scheduler.max_num_seqs == 2
    world.core.die()
    assert world.core.limits["max_num_seqs"] == 2
    await world.finish()


async def test_priorities_reach_the_next_core() -> None:
    world = World(scheduling_policy="priority")
    await world.submit("a", [1], n=2)
    for _ in range(3):
        world.core.load()
        world.core.give()
    world.change(priorities={"a": -5})
    await world.settle()
    for _ in range(2):
        world.core.take()
    world.core.give()
    await world.settle()
    assert world.calls[0].done()
    world.core.die()
    (replay,) = world.core.inbox
    assert [r.priority for r in replay.requests] == [-5, -5]  # type: ignore[union-attr]
    await world.finish()


# ---- the start ---------------------------------------------------------------------------------


async def test_a_core_that_cannot_start_says_why() -> None:
    world = World(replaces=never)
    world.core.fail("ModelLoadError")
    world.core.give()
    with pytest.raises(ModelLoadError, match="it does not work"):
        await world.engine.wait_ready()
    await world.engine.shutdown()


async def test_ready_means_the_core_that_is_there() -> None:
    world = World()
    world.core.load()
    for _ in range(2):  # while it loads, and when it was ready
        world.core.die()
        waiting = asyncio.ensure_future(world.engine.wait_ready())
        await world.settle()
        assert not waiting.done() and world.engine.progress == ("starting", 0, 0)
        for _ in range(3):
            world.core.load()
            world.core.give()
        await world.settle()
        assert waiting.done() and world.engine.state == "ready"
    await world.finish()


async def test_a_successor_that_cannot_be_started_ends_the_engine() -> None:
    world = await busy_world()

    def no_more(*_: Any) -> CoreHandle:
        raise OSError("no more processes")

    world.engine.supervisor._make_core = no_more
    world.core.die()
    assert world.engine.state == "dead"
    await world.engine.shutdown()


# ---- health and queue --------------------------------------------------------------------------


STOPPED = Signs(True, False, 0.0, 0.0, 0, False)


def stop(core: FakeCore, phase: Activity = Activity.STEP) -> None:
    core.seen = Observation(Beat(1, phase, 1, 1, 1, 0, 0), STOPPED, 0)


def watch(world: World, seconds: float) -> None:
    for _ in range(round(seconds / LOOK_SECONDS)):
        world.clock.advance(LOOK_SECONDS)
        world.engine.supervisor.check_progress()


def stalls(world: World) -> list[dict[str, int]]:
    """What is counted from now on."""
    counted: list[dict[str, int]] = []
    front = world.engine.frontend
    front.report = lambda _, told: counted.append(told.core_stalls)  # type: ignore[method-assign]
    return counted


async def test_a_core_that_is_stuck_is_replaced_and_heard_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await busy_world()
    caller, zombie, counted = world.callers[0], world.core, stalls(world)
    await world.engine.check_health()
    stop(zombie)
    watch(world, 1.6)
    assert world.engine.is_stalled and world.engine.state == "ready", "probes hear of it first"
    with pytest.raises(EngineDead, match="no progress"):
        await world.engine.check_health()
    watch(world, 0.6)
    assert world.engine.state == "replacing" and not world.engine.is_stalled
    assert zombie.condemned and zombie.stopped and world.core is not zombie
    assert "is stuck (stopped)" in caplog.text and counted == [{"stopped": 1}]
    sent = caller.sent()
    zombie.state = "ready"  # it wakes
    zombie.step()
    zombie.give()
    await world.settle()
    assert caller.sent() == sent
    await world.finish()


async def test_a_stuck_core_that_takes_anothers_place_is_replaced_if_it_is_stopped() -> None:
    world = await busy_world()
    world.core.die()
    loading = world.core
    stop(loading, Activity.LOADING)
    watch(world, 3)
    assert loading.condemned and world.core is not loading
    await world.finish()


async def test_the_first_core_is_not_watched_while_it_loads() -> None:
    world = World()
    stop(world.core, Activity.LOADING)
    watch(world, 100)
    assert world.engine.state == "loading" and not world.core.condemned
    await world.engine.shutdown()


async def test_a_timeout_of_zero_only_tells(caplog: pytest.LogCaptureFixture) -> None:
    world = World(core_stall_timeout=0)
    for _ in range(3):
        world.core.load()
        world.core.give()
    stop(world.core)
    counted = stalls(world)
    watch(world, 100)
    assert world.engine.is_stalled and world.engine.state == "ready" and not world.core.condemned
    assert counted == [{"stopped": 1}] and caplog.text.count("is stuck") == 1
    world.core.seen = None
    await world.finish()


async def test_a_stuck_core_that_is_not_replaced_ends_the_engine() -> None:
    world = World(replaces=lambda error: False)
    for _ in range(3):
        world.core.load()
        world.core.give()
    stop(world.core)
    watch(world, 3)
    assert world.engine.state == "dead" and world.core.condemned
    await world.engine.shutdown()


async def test_one_callers_stream_that_breaks_takes_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    for _ in range(3):
        world.core.load()
        world.core.give()
    first, second = await world.submit("a", [1]), await world.submit("b", [2])

    def broken(item: Any) -> None:
        raise RuntimeError("the stream is broken")

    first.stream.put = broken  # type: ignore[method-assign]
    while world.core.is_busy:
        world.core.take() if world.core.inbox else world.core.step()
    while world.core.outbox:
        world.core.give()
    assert len(second.sent()[0]) == 6 and "could not be handed on" in caplog.text
    assert not world.engine._streams
    await world.engine.shutdown()


async def test_the_queue_is_as_long_after_a_death_as_before() -> None:
    world = World(max_num_seqs=1, max_num_queued_reqs=1)
    await world.submit("a", [1])
    await world.submit("b", [2])
    for _ in range(2):
        with pytest.raises(TooManyRequests):
            await world.submit("c", [3])
        with pytest.raises(TooManyRequests, match=r"1 requests wait.*limit is 1 "):
            world.engine.check_room()
        await world.settle()
        world.core.die()
        await world.settle()
    await world.finish()
    world.engine.check_room()


# ---- anything at any time ----------------------------------------------------------------------


@pytest.mark.parametrize("block", range(6))
async def test_random_schedules(block: int) -> None:
    worlds = [await _play(random.Random(1000 * block + number)) for number in range(60)]
    deaths = sum(len(world.cores) - 1 for world in worlds)
    tokens = sum(len(t) for w in worlds for caller in w.callers for t in caller.sent().values())
    assert deaths > 60 and tokens > 2000, "little happened"


async def _play(rng: random.Random) -> World:
    world = World(max_num_seqs=rng.choice([1, 2, 8]))
    trouble = rng.choice([0.0, 0.02, 0.1])
    for _ in range(rng.randrange(20, 160)):
        if rng.random() < trouble:
            _hurt(rng, world)
        else:
            await _work(rng, world)
        await world.settle()
    await world.finish(2000)
    await asyncio.gather(*world.calls, return_exceptions=True)
    assert world.engine.config.scheduler.max_num_seqs == world.core.limits["max_num_seqs"]
    return world


async def _work(rng: random.Random, world: World) -> None:
    core = world.core
    choice = rng.random()
    if choice < 0.08 and len(world.callers) < 12:
        await world.submit(
            f"r{len(world.callers)}",
            [rng.randrange(5) for _ in range(rng.randint(1, 4))],
            max_tokens=rng.randint(1, 15),
            n=rng.choice([1, 1, 3]),
            stop=rng.choice([[], [], [" three"], [" four five"]]),
            seed=rng.randrange(50),
        )
    elif choice < 0.11 and world.callers:
        await world.abort(rng.choice(world.callers))
    elif choice < 0.13:
        world.change(max_num_seqs=rng.randint(1, 6))
    elif choice < 0.3 and world.callers:
        await rng.choice(world.callers).read()
    elif choice < 0.55 and core.outbox:
        core.give()
    elif core.state == "loading":
        core.load()
    elif core.inbox and core.state == "ready" and choice < 0.8:
        core.take()
    elif core.state == "ready" and core.requests:
        core.step(rng.choice([1, 1, 2]))


def _hurt(rng: random.Random, world: World) -> None:
    core, old = world.core, rng.choice(world.cores)
    match rng.randrange(7):
        case 0:
            core.die()
        case 1:
            core.fail()
        case 2 if core.outbox:
            del core.outbox[rng.randrange(len(core.outbox))]
        case 3 if core.outbox:
            core.outbox.append(rng.choice(core.outbox))
        case 4 if core.outbox:
            rng.shuffle(core.outbox)
        case 5 if core.inbox:
            del core.inbox[rng.randrange(len(core.inbox))]
        case 6 if old is not core and old.outbox:
            old.give()


# ---- the real core -----------------------------------------------------------------------------


async def test_a_real_core_goes_on_where_another_was() -> None:
    """The scheduler's own replay, under the same supervisor: `InlineCore` is a handle like any."""
    made: list[InlineCore] = []
    clock = ManualClock(1.0)

    def make(epoch: int, on_message: OnMessage, on_exit: OnExit) -> CoreHandle:
        executor = FakeExecutor(lambda prompt, n: VOCABULARY[(sum(prompt) + n) % 10])
        made.append(InlineCore(epoch, on_message, executor=executor, clock=clock))
        return made[-1]

    config = EngineConfig.from_options(disable_log_stats=True)
    engine = AsyncLLM(config, entropy=b"", clock=clock, make_core=make, replaces=always)
    engine.supervisor.start()
    params = SamplingParams(max_tokens=20, n=2, output_kind=DELTA, ignore_eos=True)
    stream = await engine.submit([3, 4], params, "a")
    for step in range(40):
        if engine.num_unfinished:
            made[-1].step()
            engine.check_integrity()
        if step in (0, 1, 7):
            engine.supervisor.respawn(EngineDead("for the test"))
    got: dict[int, list[int]] = {0: [], 1: []}
    async for output in stream:
        for piece in output.outputs:
            got[piece.index] += piece.token_ids
    expected = [VOCABULARY[(7 + n) % 10] for n in range(20)]
    assert got == {0: expected, 1: expected}
    assert [core.epoch for core in made] == [1, 2, 3, 4]
    assert (await engine.call("ping")) > 0
    await engine.shutdown()
