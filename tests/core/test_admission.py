"""What holds admission back besides the order: whole prompts, watermark, delay, adaptive chunks;
and limits that change while requests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.config.scheduler import POLICIES, SchedulerConfig
from quire.core.policies import FCFS, Fair
from quire.core.policy_loader import make_policy, move_waiting
from quire.core.request import Request, RequestStatus
from quire.errors import ConfigError, InvalidRequest
from quire.params import SamplingParams

Make = Callable[..., Any]


# ---- room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserve", [True, False])
def test_a_prompt_comes_in_only_when_all_of_it_fits(make: Make, reserve: bool) -> None:
    bench = make(
        num_blocks=11, block_size=8, budget=24, caching=False, scheduler_reserve_full_isl=reserve
    )
    bench.add("a", [1] * 16, max_tokens=30)
    bench.add("long", [2] * 72, max_tokens=1)  # 9 of 10 blocks, of which a holds 2
    bench.step()
    assert bench.scheduled == ({"a": 16} if reserve else {"a": 16, "long": 8})
    bench.drain()
    # Let in early it takes blocks for nothing: it is preempted when they run out.
    assert (bench.scheduler.step > 0) and sorted(bench.finished) == ["a", "long"]


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.2, True), (0.4, False)])
def test_watermark_keeps_blocks_free_while_others_run(
    make: Make, watermark: float, admitted: bool
) -> None:
    bench = make(num_blocks=11, block_size=8, caching=False, watermark=watermark)
    bench.add("a", [1] * 40, max_tokens=3)
    bench.step()
    bench.add("b", [2] * 16, max_tokens=3)  # leaves 3 of 10 blocks free
    bench.step()
    assert ("b" in bench.scheduled) is admitted
    bench.drain()


def test_watermark_does_not_hold_back_who_would_run_alone(make: Make) -> None:
    bench = make(num_blocks=11, block_size=8, caching=False, watermark=0.9)
    bench.add("a", [1] * 79, max_tokens=1)
    bench.step()
    assert bench.scheduled == {"a": 79}


@pytest.mark.parametrize(
    ("threshold", "adaptive", "chunk"),
    [(0, True, 25), (10, True, 25), (40, True, 40), (0, False, 97)],
)
def test_adaptive_threshold_is_an_equal_share_of_the_budget(
    make: Make, threshold: int, adaptive: bool, chunk: int
) -> None:
    bench = make(
        budget=100,
        seqs=4,
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    for name in "abc":
        bench.add(name, [ord(name)], max_tokens=9)
    bench.step()
    bench.add("long", [1] * 500, max_tokens=9)
    bench.step()
    assert bench.scheduled == {"a": 1, "b": 1, "c": 1, "long": chunk}


# ---- delay --------------------------------------------------------------------------------------


def test_delay_waits_a_multiple_of_the_last_prompts_latency(make: Make) -> None:
    bench = make(scheduler_delay_factor=2.0)
    bench.add("a", [1] * 10, max_tokens=100)
    bench.step()
    bench.wait(0.5)  # the step with a's prompt takes half a second
    bench.add("b", [2] * 10, max_tokens=100)
    admitted = []
    for _ in range(12):
        bench.step()
        admitted.append([new.req_id for new in bench.last.scheduled_new_reqs])
        bench.wait(0.1)
        if len(admitted) == 3:
            bench.add("c", [3] * 10, max_tokens=100)
    # b has waited 2 x 0.5 s at the eleventh step; c, which came later, comes in with it.
    assert admitted == [[]] * 10 + [["b", "c"]] + [[]]


def test_delay_does_not_hold_back_who_would_run_alone(make: Make) -> None:
    bench = make(scheduler_delay_factor=100.0)
    bench.add("a", [1] * 10, max_tokens=1)
    bench.step()
    bench.wait(5)
    bench.add("b", [2] * 10, max_tokens=1)
    bench.step()
    assert bench.scheduled == {"b": 10}


def test_the_delay_forgets_who_waits_no_longer(make: Make) -> None:
    """Also where requests come one by one, so that nobody ever asks whether they may come in."""
    bench = make(scheduler_delay_factor=0.5)
    for i in range(20):
        bench.add(f"r{i}", [i] * 10, max_tokens=1)
        bench.drain()
    gate = bench.scheduler.books.delay_gate
    assert [request.request_id for request in gate._arrivals] == ["r19"]


def test_a_cancelled_request_does_not_count_as_waiting_long(make: Make) -> None:
    bench = make(scheduler_delay_factor=1.0)
    bench.add("a", [1] * 10, max_tokens=100)
    bench.step()
    bench.wait(1.0)
    bench.add("gone", [2] * 10)
    bench.step()
    bench.wait(0.9)
    bench.add("b", [3] * 10)
    bench.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED)
    bench.wait(0.2)
    bench.step()
    assert bench.scheduled == {"a": 1}


# ---- limits that change -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_requests_move_to_another_policy(make: Make, policy: str) -> None:
    bench = make(seqs=1, scheduling_policy=policy)
    for i, length in enumerate((30, 10, 20, 40)):
        bench.add(f"r{i}", [i] * length, max_tokens=2, client=str(i % 2))
    bench.step()
    first = next(iter(bench.scheduled))
    bench.scheduler.set_limits(scheduling_policy="fcfs")
    bench.scheduler.check_integrity()
    assert bench.drain() == [f"r{i}" for i in range(4) if f"r{i}" != first]


def test_preempted_requests_keep_their_place_in_another_policy(make: Make) -> None:
    bench = make(num_blocks=6, block_size=8, caching=False)
    bench.add("a", [1] * 16, max_tokens=20)
    bench.add("b", [2] * 16, max_tokens=12)
    bench.step()
    bench.step()
    assert bench.last.preempted_req_ids == ["b"]
    bench.add("tiny", [3], max_tokens=1)
    bench.scheduler.set_limits(scheduling_policy="sjf")
    bench.step()
    assert [r.request_id for r in bench.scheduler.waiting] == ["b", "tiny"]
    bench.drain()
    assert len(bench.tokens["b"]) == 12


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "ljf", "fair", "prefill_first"])
def test_several_preempted_requests_move_in_their_order(policy: str) -> None:
    requests = [Request(f"r{i}", [1] * (9 - i), SamplingParams(max_tokens=1)) for i in range(4)]
    old, new = FCFS(SchedulerConfig()), make_policy(SchedulerConfig(scheduling_policy=policy))
    old.add_request(requests[0])
    for request in (requests[3], requests[2], requests[1]):
        request.status = RequestStatus.PREEMPTED
        old.prepend_request(request)
    move_waiting(old, new, requests)
    assert [r.request_id for r in new] == ["r1", "r2", "r3", "r0"]
    assert new.peek_request(0.0) is requests[1]


def test_fewer_seats_stop_nobody(make: Make) -> None:
    bench = make(seqs=4)
    for name in "abcdef":
        bench.add(name, [ord(name)] * 4, max_tokens=3 if name < "d" else 6)
    bench.step()
    bench.scheduler.set_limits(max_num_seqs=2)
    bench.step()
    assert list(bench.scheduled) == list("abcd")
    bench.step()
    bench.step()
    assert list(bench.scheduled) == list("de")
    bench.scheduler.set_limits(max_num_seqs=3)
    bench.step()
    assert list(bench.scheduled) == list("def")


def test_budget_and_threshold_change_with_the_next_step(make: Make) -> None:
    bench = make(budget=64, seqs=4)
    bench.add("a", [1] * 500, max_tokens=3)
    bench.add("b", [2] * 5, max_tokens=3)
    bench.step()
    assert bench.scheduled == {"a": 64}
    bench.scheduler.set_limits(max_num_batched_tokens=32, long_prefill_token_threshold=20)
    bench.step()
    assert bench.scheduled == {"a": 20, "b": 5}
    assert bench.last.total_num_scheduled_tokens == 25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
        ({"max_num_seqs": "9"}, "max_num_seqs must be an integer, got '9'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be an integer, got True"),
        ({"max_num_seqs": None}, "--max-num-seqs must be an integer, got None"),
        ({"max_num_seqs": 4.0}, "--max-num-seqs must be an integer, got 4.0"),
        ({"max_num_batched_tokens": 2**31}, "--max-num-batched-tokens must be at most 2147483647"),
        ({"max_num_seqs": 65}, "max_num_seqs 65 is more than max_num_batched_tokens 64"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of fcfs, priority, sjf"),
        ({"watermark": 0.5}, "watermark cannot be changed while running; can be: max_num_seqs"),
        ({"scheduling_policy": "sjf", "max_num_batched_tokens": 0}, "must be at least 1"),
    ],
)
def test_bad_limits_change_nothing(make: Make, changes: dict[str, Any], message: str) -> None:
    bench = make(budget=64, seqs=4)
    before, waiting = bench.scheduler.config, bench.scheduler.waiting
    with pytest.raises(InvalidRequest, match=message):
        bench.scheduler.set_limits(**changes)
    assert bench.scheduler.config is before
    assert bench.scheduler.waiting is waiting


def test_limits_that_need_a_whole_prompt_per_step(make: Make) -> None:
    bench = make(budget=64, seqs=4, max_model_len=64, enable_chunked_prefill=False)
    with pytest.raises(InvalidRequest, match="less than the context of 64"):
        bench.scheduler.set_limits(max_num_batched_tokens=63)


def test_a_moved_queue_uses_the_new_policys_rules(make: Make) -> None:
    bench = make(seqs=1)
    bench.add("a", [1] * 9)
    bench.scheduler.set_limits(scheduling_policy="fair")
    assert isinstance(bench.scheduler.waiting, Fair)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("watermark", float("nan")),
        ("scheduler_delay_factor", -1.0),
        ("scheduler_aging_seconds", -1.0),
        ("scheduler_cls", "no-colon"),
        ("scheduler_cls", ":Class"),
    ],
)
def test_bad_options_name_the_flag_and_the_value(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} must be .*, got "):
        SchedulerConfig(**{option: value})  # type: ignore[arg-type]
