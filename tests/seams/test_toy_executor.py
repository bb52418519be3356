"""The seam of executors: a row in `EXECUTORS`, and one that takes several batches and answers late.

Whatever is in flight, outputs are those of one batch at a time: with chunked prompts, preemption,
swapping, prefix hits, aborts, requests and copies that fail, drafts, and exceptions at any submit
and any result. A worker whose tokens show what KV it read tells if a block was used too early.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from honest_worker import HonestWorker, next_token
from late_executor import LateExecutor
from quire import SamplingParams
from quire.config import EngineConfig, SchedulerConfig
from quire.core.batch import BatchResult, ScheduledBatch
from quire.core.facts import Follower
from quire.core.kv.manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.rules.in_flight import land
from quire.core.scheduler import Scheduler
from quire.engine.core import EngineCore
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.executor.base import EXECUTORS, PendingBatch
from quire.executor.inline import InlineExecutor

WRONG = 299
"""The token of a request that has read KV which was never computed for it."""


class Honest(HonestWorker):
    """Some requests fail, and some copies of the second tier: what they should have written holds
    something else."""

    def __init__(self, rng: random.Random, faults: float, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rng, self.faults, self.failed = rng, faults, 0

    def execute(self, batch: ScheduledBatch) -> BatchResult:
        rng, lost = self.rng, BatchResult({})
        spoilt: list[int] = []
        for moves, told in ((batch.swap_out, lost.unwritten), (batch.swap_in, lost.unread)):
            for move in [m for m in moves if rng.random() < self.faults]:
                moves.remove(move)
                told.append(move[1])
                self._spoil(move[1], parked=told is lost.unwritten)
        if batch.num_scheduled_tokens and rng.random() < self.faults:
            spoilt.append(rng.choice(list(batch.num_scheduled_tokens)))
        stale = len(self.stale)
        result = super().execute(batch)
        for said in self.stale[stale:]:
            name = said.split()[0]
            result.sampled_token_ids[name] = [WRONG]
            self._known[name][0][-1] = WRONG
        for name in spoilt:
            self.failed += 1
            result.sampled_token_ids.pop(name, None)
            result.failed[name] = "toy"
            tokens, computed, _ = self._known[name]
            for table in self._tables[name]:
                for p in range(computed - batch.num_scheduled_tokens[name], computed):
                    self._slots[table[p // 16], p % 16] = -1
        result.unwritten, result.unread = lost.unwritten, lost.unread
        return result

    def _spoil(self, block: int, *, parked: bool) -> None:
        if parked:
            self._parked[block] = [-1] * self.info.block_size
        else:
            self._slots |= {(block, i): -1 for i in range(self.info.block_size)}


class Raising(LateExecutor):
    """Raises at some submits and results, before or after the work."""

    raises = 0.0

    def submit(self, batch: ScheduledBatch) -> Any:
        self._maybe()
        late = super().submit(batch)
        self._maybe()
        return late

    def run_next(self) -> None:
        self._maybe()
        super().run_next()
        self._maybe()

    def _maybe(self) -> None:
        if self._rng.random() < self.raises:
            raise MemoryError("toy")


def requests_of(rng: random.Random, count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    stem = [300 + rng.randrange(5) for _ in range(60)]
    found = {}
    for number in range(count):
        prompt = stem[: rng.choice([0, 16, 40, 60])]
        prompt = prompt + [rng.randrange(300, 340) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            seed=1, max_tokens=rng.randint(1, 25), ignore_eos=True,
            logprobs=rng.choice([None, None, 1]),
            stop_token_ids=rng.choice([[], [], [rng.randrange(300, 340)]]),
        )  # fmt: skip
        found[f"r{number}"] = prompt, params
    return found


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < (params.max_tokens or 0):
        tokens.append(next_token(prompt + tokens))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens


def drive(
    core: EngineCore,
    requests: dict[str, tuple[list[int], SamplingParams]],
    rng: random.Random,
    aborts: float = 0.0,
    check: Callable[[Any], None] = lambda stats: None,
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Everything through the core; integrity after every step.

    Returns:
        Tokens and ends by request; who was aborted has the end "gone".
    """
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    ends: dict[str, str] = {}
    waiting, steps = list(requests), 0
    while waiting or core.has_requests:
        steps += 1
        assert steps < 60 * len(requests), "it never ends"
        while waiting and rng.random() < 0.4:
            prompt, params = requests[waiting[0]]
            name = waiting.pop(0)
            core.add_request(EngineCoreRequest(name, name, 0, prompt, params, 0.0))
        if rng.random() < aborts and core.scheduler.requests:
            name = rng.choice(sorted(core.scheduler.requests))
            core.abort_requests([name])
            ends[name] = "gone"
        try:
            outputs, stats = core.step()
        except MemoryError:
            core.scheduler.check_integrity()
            assert core.kv.usage == 0.0 and not core.scheduler.num_in_flight
            continue
        check(stats)
        core.scheduler.check_integrity()
        for output in outputs:
            assert output.request_id not in ends, "an output after the end"
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = output.error or str(output.finish_reason)
    assert core.kv.usage == 0.0 and not core.scheduler.num_in_flight
    return tokens, ends


OPTIONS: list[dict[str, Any]] = [
    {"scheduling_policy": "fcfs"},
    {"scheduling_policy": "prefill_first", "long_prefill_token_threshold": 11},
    {"scheduling_policy": "priority", "priority_preemption": True},
    {"scheduling_policy": "fair", "scheduler_delay_factor": 0.5},
]


def core_of(
    rng: random.Random,
    depth: int,
    faults: float = 0.0,
    raises: float = 0.0,
    room: Sequence[int] = (10, 14, 60),
) -> tuple[EngineCore, Honest, Raising]:
    windows = rng.choice([(None,), (None,), (20, None)])
    worker = Honest(
        rng, faults, num_blocks=rng.choice(room) * len(windows), windows=windows,
        num_swap_blocks=rng.choice([0, 4, 30]),
    )  # fmt: skip
    executor = Raising(worker, depth, seed=rng.randrange(1000))
    executor.raises = raises
    options = {
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([16, 40, 256]),
        "preemption_mode": rng.choice(["auto", "swap", "recompute"]),
        "max_model_len": 140,
        **rng.choice(OPTIONS),
    }
    return EngineCore(EngineConfig.from_options(**options), executor=executor), worker, executor


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_late_answers_change_nothing(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    core, worker, _ = core_of(rng, depth)
    requests = requests_of(rng, 12)
    tokens, ends = drive(core, requests, rng, aborts=rng.choice([0.0, 0.1]))
    assert not worker.stale, worker.stale[:3]
    assert worker.num_known == 0
    for name, (prompt, params) in requests.items():
        whole = expected(prompt, params)
        if ends[name] == "gone":
            whole = whole[: len(tokens[name])]
        assert tokens[name] == whole, name


@pytest.mark.parametrize("raises", [0.0, 0.03])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_nor_do_exceptions_and_failures(depth: int, seed: int, raises: float) -> None:
    rng = random.Random(1000 + seed)
    faults = rng.choice([0.0, 0.05]) if raises else rng.choice([0.1, 0.3])
    core, worker, _ = core_of(rng, depth, faults, raises, room=[9, 11, 14])
    requests = requests_of(rng, 20)
    tokens, ends = drive(core, requests, rng, aborts=rng.choice([0.0, 0.1]))
    assert sum(end == "toy" for end in ends.values()) <= worker.failed
    for name, (prompt, params) in requests.items():
        whole = expected(prompt, params)
        if ends[name] in ("gone", "toy"):
            whole = whole[: len(tokens[name])]
        assert tokens[name] == whole, (name, ends[name])


@pytest.mark.parametrize("raises", [0.0, 0.03])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_records_and_statistics_are_those_of_each_step(depth: int, raises: float) -> None:
    deepest = 0
    for seed in range(20):
        rng = random.Random(seed)
        core, _, executor = core_of(rng, depth, faults=raises, raises=raises)
        batches: dict[int, ScheduledBatch] = {}
        submit = executor.submit

        def keep(batch: ScheduledBatch, submit: Any = submit, batches: Any = batches) -> Any:
            batches[batch.step] = batch
            return submit(batch)

        executor.submit = keep  # type: ignore[method-assign]
        follower, names, steps, starts = Follower(), {}, [], []

        def check(stats: Any, f: Any = follower, n: Any = names, s: Any = steps, t: Any = starts,
                  batches: Any = batches) -> None:  # fmt: skip
            n.update(stats.names)
            told = {n[number]: count for number, count in f.follow(stats.facts).items()}
            batch = batches[stats.step]
            assert told == batch.num_scheduled_tokens
            assert stats.num_scheduled_tokens == batch.total_num_scheduled_tokens
            s.append(stats.step)
            t.append(stats.start)

        drive(core, requests_of(rng, 8), rng, aborts=0.1, check=check)
        assert steps == sorted(steps) and starts == sorted(starts)
        assert set(steps) <= set(batches) if raises else steps == list(batches)
        deepest = max(deepest, executor.deepest)
    assert deepest == depth


def test_nothing_of_a_dropped_request_is_left_in_a_result() -> None:
    """Not its drafts either: it may be back, with its next token in flight."""
    scheduler, batches = in_flight("a", "b")
    scheduler.books.in_flight[0].dropped.append("a")
    parts: list[Any] = [{"a": [7], "b": [7]} for _ in range(4)]
    result = BatchResult(parts[0], parts[1], parts[2], draft_token_ids=parts[3])
    land(scheduler.books, batches[0], result)
    assert parts == [{"b": [7]}] * 4


def in_flight(*names: str) -> tuple[Scheduler, list[ScheduledBatch]]:
    """A scheduler with a batch in flight for each request."""
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(20), max_in_flight=3)
    batches = []
    for name in names:
        scheduler.add_request(Request(name, [1, 2, 3], SamplingParams(seed=1, max_tokens=5)))
        batches.append(scheduler.schedule())
    return scheduler, batches


def test_after_a_failure_nothing_else_of_the_batch_counts() -> None:
    scheduler, batches = in_flight("a", "b")
    result = BatchResult({"c": [7]}, failed={"a": "toy"})
    outputs = scheduler.update(batches[0], result)
    assert [o.error for o in outputs] == ["toy"] and not result.sampled_token_ids
    assert scheduler.is_in_doubt
    scheduler.take_back()
    assert not scheduler.is_in_doubt and not scheduler.num_in_flight
    assert [r.request_id for r in scheduler.waiting] == ["b"]


def test_a_failure_of_an_aborted_request_takes_back_what_it_left() -> None:
    scheduler, batches = in_flight("a")
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    scheduler.update(batches[0], BatchResult({}, failed={"a": "toy"}))
    assert scheduler.is_in_doubt, "blocks that it was to fill can be found"


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_brought_back_may_be_written_over_by_the_next_batch(depth: int) -> None:
    """So undoing keeps it in the second tier only if there is no next batch."""
    kv = KVCacheManager(5, enable_caching=False, num_swap_blocks=8)
    scheduler = Scheduler(SchedulerConfig(preemption_mode="swap"), kv, max_in_flight=depth)
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 31, params))
    assert kv.swap is not None
    while not kv.swap.num_swapped:
        batch = scheduler.schedule()
        scheduler.update(batch, BatchResult({name: [5] for name in batch.num_scheduled_tokens}))
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    scheduler.begin()
    assert scheduler.schedule().swap_in
    scheduler.undo()
    assert kv.swap.num_swapped == (1 if depth == 1 else 0)
    scheduler.check_integrity()


def test_the_records_name_each_request_that_got_nothing() -> None:
    """Some of them end before the records are read: a mere number would count others."""
    config = SchedulerConfig(
        max_num_batched_tokens=3, max_num_seqs=3, long_prefill_token_threshold=1
    )
    scheduler = Scheduler(config, KVCacheManager(20), max_in_flight=2)
    for name, count in (("c", 40), ("a", 1), ("b", 1)):
        params = SamplingParams(seed=1, max_tokens=1)
        scheduler.add_request(Request(name, list(range(count)), params))
    follower, names = Follower(), {}
    first = scheduler.schedule()
    scheduler.set_limits(long_prefill_token_threshold=0)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"c": 3}
    for batch, tokens in ((first, {"a": [7], "b": [7]}), (second, {})):
        result = BatchResult(tokens)
        stats = scheduler.make_stats(batch, result, scheduler.update(batch, result))
        names.update(stats.names)
        told = {names[number]: count for number, count in follower.follow(stats.facts).items()}
        assert told == batch.num_scheduled_tokens


def test_an_id_that_is_used_again_gets_nothing_of_the_request_before() -> None:
    core = EngineCore(
        EngineConfig.from_options(max_num_batched_tokens=16),
        executor=(executor := LateExecutor(HonestWorker(num_blocks=40), 2)),
    )
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    core.add_request(EngineCoreRequest("a", "a", 0, list(range(300, 330)), params, 0.0))
    core.step()
    assert executor.taken[0].batch.num_scheduled_tokens == {"a": 14}, "its first token is in flight"
    core.abort_requests(["a"])
    prompt = [310, 311]
    core.add_request(EngineCoreRequest("a", "a", 0, prompt, params, 0.0))
    tokens: list[int] = []
    while core.has_requests:
        for output in core.step()[0]:
            tokens += output.new_token_ids
        core.scheduler.check_integrity()
    assert tokens == expected(prompt, params)


def test_a_request_whose_token_is_in_flight_waits_for_it() -> None:
    core = EngineCore(
        EngineConfig.from_options(max_num_batched_tokens=16),
        executor=(executor := LateExecutor(HonestWorker(num_blocks=40), 2)),
    )
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    core.add_request(EngineCoreRequest("a", "a", 0, list(range(300, 340)), params, 0.0))
    core.step()
    counts = [late.batch.num_scheduled_tokens for late in executor.taken]
    assert counts == [{"a": 16}], "the second chunk, while the first may still run"
    core.step()
    core.step()
    assert not executor.taken, "its token is needed before it goes on"
    core.add_request(EngineCoreRequest("b", "b", 0, [300, 301], params, 0.0))
    core.step()
    assert core.scheduler.num_in_flight == 0 or len(executor.taken) == 1


@pytest.mark.parametrize("proposer", [None, "last pair in flight"])
def test_a_real_worker_late_with_drafts_and_log_probabilities(
    proposer: str | None, rows: None
) -> None:
    rng = random.Random(5)
    prompts = {
        f"r{i}": [rng.randrange(300, 330) for _ in range(rng.randint(1, 50))] for i in range(14)
    }
    params = {
        name: SamplingParams(
            seed=number, max_tokens=rng.randint(1, 30), temperature=rng.choice([0.0, 0.9]),
            logprobs=rng.choice([None, 1]), prompt_logprobs=rng.choice([None, None, 1]),
            frequency_penalty=rng.choice([0.0, 0.6]), ignore_eos=True,
        )
        for number, name in enumerate(prompts)
    }  # fmt: skip
    told = []
    for name in ("inline", "late"):
        options = {"max_num_batched_tokens": 40, "max_model_len": 128}
        if name == "late":
            options["num_gpu_blocks_override"] = 14
        Rows.proposer = proposer if name == "late" else None
        core = EngineCore(EngineConfig.from_options(**options), executor=name)
        said: dict[str, Any] = {}
        for request in prompts:
            core.add_request(
                EngineCoreRequest(request, request, 0, prompts[request], params[request], 0.0)
            )
        while core.has_requests:
            for output in core.step()[0]:
                one = said.setdefault(output.request_id, ([], [], []))
                one[0].extend(output.new_token_ids)
                one[1].extend(output.new_logprobs or [])
                one[2].extend(output.new_prompt_logprobs or [])
            core.scheduler.check_integrity()
        core.shutdown()
        told.append(said)
    assert told[0] == told[1]


class Rows:
    proposer: str | None = None


@pytest.fixture
def rows() -> Iterator[None]:
    """The toy as a row of the table, as a plug-in has it."""
    from quire.worker.proposer import PROPOSERS

    if "late" not in EXECUTORS:
        EXECUTORS.register(
            "late",
            lambda config, shape: LateExecutor(InlineExecutor(config, shape, Rows.proposer), 3),
        )
        PROPOSERS.register("last pair in flight", lambda config, shape: Repeating())
    yield


class Repeating:
    """Proposes the last tokens again."""

    def propose(self, req_ids: Any, tokens: Any) -> Any:
        return [known[-4:].tolist() for known in tokens]


def test_an_unknown_executor_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown executor 'inlined'; did you mean 'inline'"):
        EngineCore(EngineConfig.from_options(), executor="inlined")


def test_one_batch_at_a_time_asks_in_the_order_it_always_did() -> None:
    """Depth 1: schedule, submit, result, update; no note of a flight is made."""
    calls: list[str] = []

    class Noting(HonestWorker):
        def submit(self, batch: ScheduledBatch) -> PendingBatch:
            calls.append("submit")
            assert not core.scheduler.num_in_flight
            return super().submit(batch)

    core = EngineCore(EngineConfig.from_options(), executor=Noting(num_blocks=40))
    schedule, update = core.scheduler.schedule, core.scheduler.update

    def noting_schedule() -> Any:
        calls.append("schedule")
        return schedule()

    def noting_update(batch: Any, result: Any) -> Any:
        calls.append("update")
        return update(batch, result)

    core.scheduler.schedule = noting_schedule  # type: ignore[method-assign]
    core.scheduler.update = noting_update  # type: ignore[method-assign]
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    core.add_request(EngineCoreRequest("a", "a", 0, [300, 301], params, 0.0))
    for _ in range(3):
        core.step()
    assert calls == ["schedule", "submit", "update"] * 3
