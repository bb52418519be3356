"""Each policy as a story: who is admitted next, who gives way, who never starves, what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.scheduler import POLICIES
from quire.core.policies import FCFS, Fair
from quire.core.request import Request, RequestStatus
from work import lines_of

Make = Callable[..., Any]


def test_every_row_is_a_policy() -> None:
    for name in POLICIES:
        assert POLICIES.get(name).__module__ == "quire.core.policies", name


# ---- shortest and longest first -----------------------------------------------------------------


@pytest.mark.parametrize(("policy", "order"), [("sjf", "bca"), ("ljf", "acb")])
def test_jobs_by_length(make: Make, policy: str, order: str) -> None:
    bench = make(seqs=1, scheduling_policy=policy)
    for name, length in (("a", 90), ("b", 10), ("c", 40)):
        bench.add(name, [ord(name)] * length, max_tokens=1)
    assert "".join(bench.drain()) == order


def test_cached_tokens_do_not_make_a_job_long(make: Make) -> None:
    bench = make(seqs=1, scheduling_policy="sjf")
    bench.add("first", 160, max_tokens=1)
    bench.drain()
    bench.add("short", [7] * 40, max_tokens=1)
    bench.add("known", [*range(1, 161), 5], max_tokens=1)  # 160 of 161 tokens are cached
    assert bench.drain() == ["known", "short"]


def test_a_preempted_job_comes_back_first(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False, scheduling_policy="sjf")
    bench.add("a", [1] * 15, max_tokens=20)
    bench.add("b", [2] * 16, max_tokens=20)
    while not (bench.last and bench.last.preempted_req_ids):
        bench.step()
    assert bench.last.preempted_req_ids == ["b"]
    bench.add("tiny", [3], max_tokens=1)
    assert bench.drain() == ["b", "tiny"]


# ---- aging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sjf", "ljf", "priority"])
def test_who_has_waited_long_enough_goes_first(make: Make, policy: str) -> None:
    bench = make(seqs=1, scheduling_policy=policy, scheduler_aging_seconds=10.0)
    lengths = {"sjf": (80, 81, 10), "ljf": (11, 10, 80), "priority": (10, 10, 10)}[policy]
    bench.add("old", [1] * lengths[0], max_tokens=1, priority=8)
    bench.wait(1)
    bench.add("older-than-limit", [2] * lengths[1], max_tokens=1, priority=9)
    bench.wait(9.5)
    bench.add("new", [3] * lengths[2], max_tokens=1, priority=0)
    bench.step()  # only `old` has waited 10 s
    bench.step()
    assert bench.drain() == ["older-than-limit"]
    assert list(bench.finished) == ["old", "new", "older-than-limit"]


def test_the_oldest_of_the_aged_goes_first(make: Make) -> None:
    bench = make(seqs=1, scheduling_policy="sjf")  # 30 seconds
    bench.add("long", [1] * 90, max_tokens=1)
    bench.wait(1)
    bench.add("middle", [2] * 50, max_tokens=1)
    bench.wait(31)
    bench.add("short", [3] * 5, max_tokens=1)
    assert bench.drain() == ["long", "middle", "short"]


def test_a_long_job_is_served_under_an_endless_stream_of_short_ones(make: Make) -> None:
    for aging, served in ((0.0, False), (5.0, True)):
        bench = make(seqs=1, scheduling_policy="sjf", scheduler_aging_seconds=aging)
        bench.add("long", [1] * 100, max_tokens=1)
        for i in range(20):
            bench.add(f"s{i}", [2] * 3, max_tokens=1)
            bench.step()
            bench.wait(1)
        assert ("long" in bench.finished) is served, f"aging {aging}"


# ---- fair ---------------------------------------------------------------------------------------


def test_clients_take_turns_by_tokens(make: Make) -> None:
    """`loud` sent ten times as much before `quiet` came, yet they share from then on."""
    bench = make(seqs=1, scheduling_policy="fair")
    for i in range(20):
        bench.add(f"loud{i}", [i] * 256, client="loud", max_tokens=1)
    for i in range(4):
        bench.add(f"quiet{i}", [99 + i] * 256, client="quiet", max_tokens=1)
    order = bench.drain()
    assert [name for name in order[:9] if name.startswith("quiet")] == [
        "quiet0", "quiet1", "quiet2", "quiet3",
    ]  # fmt: skip
    assert [name for name in order if name.startswith("loud")] == [f"loud{i}" for i in range(20)]


def test_served_tokens_differ_by_a_bounded_amount(make: Make) -> None:
    """The guarantee of deficit round robin: while both wait, service differs by less than the
    largest request plus two quanta, however different the requests are."""
    bench = make(seqs=1, budget=4096, scheduling_policy="fair", caching=False)
    for i in range(60):
        bench.add(f"small{i}", [1] * 100, client="small", max_tokens=1)
    for i in range(10):
        bench.add(f"large{i}", [2] * 1500, client="large", max_tokens=1)
    served = {"small": 0, "large": 0}
    while bench.scheduler.requests:
        bench.step()
        for new in bench.last.scheduled_new_reqs:
            served[new.req_id.rstrip("0123456789")] += len(new.prompt_token_ids) + 1
        if len(bench.finished) < 50:
            assert abs(served["small"] - served["large"]) < 1500 + 2 * Fair.quantum
    assert served == {"small": 6060, "large": 15010}


def test_output_is_charged_too(make: Make) -> None:
    """Equal prompts, but one client asks for long answers: it is let in less often."""
    bench = make(seqs=1, scheduling_policy="fair", caching=False)
    for i in range(12):
        bench.add(f"talker{i}", [1] * 100, client="talker", max_tokens=150)
        bench.add(f"asker{i}", [2] * 100, client="asker", max_tokens=1)
    order = [name.rstrip("0123456789") for name in bench.drain()][:12]
    assert order.count("asker") > order.count("talker") + 2, order


def test_what_is_cancelled_is_not_charged(make: Make) -> None:
    bench = make(seqs=1, scheduling_policy="fair", caching=False)
    for i in range(3):
        bench.add(f"a{i}", [1] * 500, client="a", max_tokens=1)
        bench.add(f"b{i}", [2] * 500, client="b", max_tokens=1)
    bench.scheduler.finish_requests(["a0"], RequestStatus.FINISHED_ABORTED)
    bench.scheduler.check_integrity()
    assert bench.drain()[0] == "a1"


# ---- priority -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("short_of", ["seats", "blocks", "budget"])
def test_an_urgent_arrival_takes_the_place_of_the_least_urgent(
    make: Make, on: bool, short_of: str
) -> None:
    limits = {
        "seats": {"seqs": 2},
        "blocks": {"num_blocks": 7, "block_size": 8},
        "budget": {"budget": 34},
    }[short_of]
    bench = make(caching=False, scheduling_policy="priority", priority_preemption=on, **limits)
    bench.add("low", [1] * (100 if short_of == "budget" else 17), priority=9, max_tokens=20)
    bench.add("mid", [2] * (1 if short_of == "budget" else 17), priority=5, max_tokens=4)
    bench.step()
    bench.step()
    bench.add("urgent", [3] * 17, priority=0, max_tokens=4)
    bench.step()
    assert bench.last.preempted_req_ids == (["low"] if on else [])
    assert ("urgent" in bench.scheduled) is on
    assert ("low" in bench.scheduled) is not on, "lost its place and came back in one step"
    bench.drain()
    assert len(bench.tokens["low"]) == 20


def test_equal_urgency_displaces_nobody(make: Make) -> None:
    bench = make(seqs=1, scheduling_policy="priority", priority_preemption=True)
    bench.add("a", [1] * 20, priority=1, max_tokens=9)
    bench.step()
    bench.add("b", [2] * 20, priority=1, max_tokens=9)
    bench.step()
    assert bench.last.preempted_req_ids == []


def test_nobody_is_displaced_in_vain(make: Make) -> None:
    """The urgent prompt would not fit even without the only request it may displace."""
    bench = make(
        num_blocks=11, block_size=8, caching=False, scheduling_policy="priority",
        priority_preemption=True,
    )  # fmt: skip
    bench.add("vital", [1] * 40, priority=0, max_tokens=5)
    bench.add("low", [2] * 8, priority=9, max_tokens=5)
    bench.step()
    bench.add("urgent", [3] * 60, priority=1, max_tokens=5)
    bench.step()
    assert bench.last.preempted_req_ids == []


def test_nobody_is_displaced_whose_blocks_of_this_step_were_just_shared(make: Make) -> None:
    """`reader` is admitted with a hit on what `writer` computes in the same step; so `writer` may
    lose its place only in the next one."""
    bench = make(
        seqs=2, budget=64, block_size=8, long_prefill_token_threshold=40,
        scheduling_policy="priority", priority_preemption=True,
    )  # fmt: skip
    bench.add("writer", 200, priority=9, max_tokens=2)
    bench.step()
    bench.add("reader", 104, priority=0, max_tokens=9)
    bench.add("urgent", [3] * 4, priority=1, max_tokens=9)
    bench.step()
    assert bench.scheduled == {"writer": 40, "reader": 8}
    assert bench.last.preempted_req_ids == []
    bench.step()
    assert bench.last.preempted_req_ids == ["writer"]
    bench.drain()


def test_nobody_is_displaced_in_the_step_that_admitted_it(make: Make) -> None:
    class Pushy(FCFS):
        def may_displace(self, waiting: Request, running: Request, now: float) -> bool:
            return True

    bench = make(seqs=1)
    bench.scheduler.books.waiting = policy = Pushy(bench.scheduler.config)
    policy.displaces = True
    bench.add("a", [1] * 5)
    bench.add("b", [2] * 5)
    bench.step()
    assert bench.scheduled == {"a": 5}
    bench.step()
    assert bench.last.preempted_req_ids == ["a"]


def test_one_that_has_aged_keeps_its_place(make: Make) -> None:
    bench = make(
        seqs=1,
        scheduling_policy="priority",
        priority_preemption=True,
        scheduler_aging_seconds=5.0,
    )
    bench.add("low", [1] * 20, priority=9, max_tokens=50)
    bench.wait(6)
    bench.step()
    bench.add("urgent", [2] * 20, priority=0, max_tokens=2)
    bench.step()
    assert bench.last.preempted_req_ids == []


# ---- prefill first ------------------------------------------------------------------------------


def test_prompts_come_before_decodes(make: Make) -> None:
    bench = make(budget=32, scheduling_policy="prefill_first")
    bench.add("a", [1] * 8, max_tokens=9)
    bench.step()
    bench.add("b", [2] * 32, max_tokens=9)
    bench.step()
    assert bench.scheduled == {"b": 32}
    bench.step()
    assert bench.scheduled == {"a": 1, "b": 1}


def test_an_unfinished_prompt_is_not_overtaken(make: Make) -> None:
    bench = make(budget=32, scheduling_policy="prefill_first")
    bench.add("long", [1] * 60, max_tokens=9)
    bench.step()
    for i in range(5):
        bench.add(f"r{i}", [2 + i] * 8, max_tokens=9)
    bench.step()
    assert bench.scheduled == {"long": 28, "r0": 4}


def test_admission_leaves_the_running_room_and_does_not_thrash(make: Make) -> None:
    """Two blocks are free and each of two running requests needs one now: nobody comes in for
    them, and nobody is preempted for who came in."""
    bench = make(num_blocks=7, block_size=8, caching=False, scheduling_policy="prefill_first")
    bench.add("a", [1] * 16, max_tokens=3)
    bench.add("b", [2] * 16, max_tokens=3)
    bench.step()
    bench.add("c", [3] * 8, max_tokens=1)
    bench.step()
    assert bench.scheduled == {"a": 1, "b": 1}
    assert bench.last.preempted_req_ids == []
    bench.drain()
    assert len(bench.finished) == 3


# ---- for all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelling_anywhere_keeps_the_others_in_order(make: Make, policy: str) -> None:
    def order(cancel: set[str]) -> list[str]:
        bench = make(seqs=1, scheduling_policy=policy)
        for i in range(200):
            bench.add(f"r{i}", [i] * (1 + i * 7 % 50), max_tokens=1, priority=i * 3 % 5,
                      client=str(i % 3))  # fmt: skip
        bench.scheduler.finish_requests(sorted(cancel), RequestStatus.FINISHED_ABORTED)
        bench.scheduler.check_integrity()
        return list(bench.drain())

    gone = {f"r{i}" for i in range(200) if i % 10 in (0, 1, 2, 3, 5, 6, 8)}
    kept = order(gone)
    assert sorted(kept) == sorted(f"r{i}" for i in range(200) if f"r{i}" not in gone)
    if policy != "fair":  # there, others' requests change whose turn it is
        assert kept == [name for name in order(set()) if name not in gone]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair"])  # one per kind of container
def test_a_step_and_a_cancel_cost_the_same_with_100000_waiting(make: Make, policy: str) -> None:
    """Python runs the same lines; and what is within one of them, a search for instance, does not
    take longer. That is processor time of this thread, the least of many: others do not count."""

    def measure(num_waiting: int) -> tuple[float, float, int, int]:
        bench = make(seqs=8, scheduling_policy=policy, caching=False)
        scheduler = bench.scheduler
        for i in range(num_waiting):
            bench.add(f"r{i}", [1] * (1 + i % 20), max_tokens=10_000, priority=i % 7,
                      client=str(i % 50))  # fmt: skip
        bench.step()
        steps, cancels = [], []
        for i in range(60):
            start = time.thread_time()
            scheduler.schedule()
            steps.append(time.thread_time() - start)
            name = next(f"r{j}" for j in range(num_waiting // 2 + 8 * i, num_waiting)
                        if scheduler.requests[f"r{j}"].status is RequestStatus.WAITING)  # fmt: skip
            start = time.thread_time()
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            cancels.append(time.thread_time() - start)
        name = f"r{num_waiting - 1}"
        lines = lines_of(scheduler.schedule)
        ended = lines_of(lambda: scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED))
        return min(steps), min(cancels), lines, ended

    few, many = measure(1_000), measure(100_000)
    assert many[0] < 5 * few[0] + 100e-6, f"schedule(): {few[0]:.1e} s, then {many[0]:.1e} s"
    assert many[1] < 5 * few[1] + 100e-6, f"cancel: {few[1]:.1e} s, then {many[1]:.1e} s"
    assert many[2] <= few[2] + 50 and many[3] <= few[3] + 50
