"""The drill names the true cause on overloaded engines, and nothing on a healthy one."""

from __future__ import annotations

import itertools
import json

import pytest

from quire.core.stats import MachineStats, StepStats
from quire.observability.explain.diagnosis import DRILL, diagnose
from quire.observability.explain.metric_alerts import check_alerts, metric_figures, parse_metrics
from quire.observability.explain.record_signals import Signals, quantile, read_signals
from record_rig import Rig, cost


def signals(rig: Rig, window: float = 1e9) -> Signals:
    limits = rig.scheduler.config
    return read_signals(rig.records.snapshot(), limits, window, rig.clock.now())


def names(rig: Rig) -> list[str]:
    return [finding.name for finding in diagnose(signals(rig))]


def offer(rig: Rig, prompts: list[int], every: int, count: int, outputs: int) -> None:
    """A request every few steps, then the rest."""
    for i in range(count):
        rig.add(f"r{i}", prompts[i % len(prompts)], outputs)
        for _ in range(every):
            rig.step()
    rig.drain()


def test_healthy() -> None:
    rig = Rig()
    offer(rig, [40, 60, 20], every=6, count=40, outputs=30)
    assert names(rig) == []
    assert signals(rig)["running_mean"] > 3, "it had something to do"


def test_tiny_kv_pool_at_a_high_rate() -> None:
    rig = Rig(num_blocks=14, budget=256)
    offer(rig, [40, 60], every=1, count=40, outputs=40)
    found = diagnose(signals(rig))
    assert found[0].name == "kv_pool_too_small"
    assert "preemptions" in found[0].evidence and "--gpu-memory-utilization" in found[0].remedy
    assert "long_prefills_stall_decodes" not in names(rig)


def test_p99_spikes_by_long_prefills() -> None:
    rig = Rig(budget=2048)
    for i in range(8):
        rig.add(f"chat{i}", 20, 400)
    for i in range(8):
        for _ in range(40):
            rig.step()
        rig.add(f"long{i}", 2000, 2)
    rig.drain()
    [finding] = diagnose(signals(rig))
    assert finding.name == "long_prefills_stall_decodes"
    assert "long" in finding.evidence and "2,000 prompt tokens" in finding.evidence
    assert "--max-num-batched-tokens (now 2048" in finding.remedy


def test_the_remedy_works() -> None:
    """What the doctor says about long prefills, done: the finding goes."""
    rig = Rig(budget=128)
    for i in range(8):
        rig.add(f"chat{i}", 20, 400)
    for i in range(8):
        for _ in range(40):
            rig.step()
        rig.add(f"long{i}", 2000, 2)
    rig.drain()
    assert "long_prefills_stall_decodes" not in names(rig)


def test_too_few_seats() -> None:
    rig = Rig(seqs=2)
    offer(rig, [20], every=2, count=30, outputs=20)
    assert names(rig)[0] == "too_few_seats"


def test_more_seats_are_no_remedy_where_the_kv_cache_is_full() -> None:
    rig = Rig(seqs=2)
    offer(rig, [20], every=2, count=30, outputs=20)
    [room] = diagnose(signals(rig) | {"kv_usage_max": 0.9})
    assert room.limits == {"max_num_seqs": 4} and "another replica" in room.remedy
    [full] = diagnose(signals(rig) | {"kv_usage_max": 0.97})
    assert full.name == "too_few_seats" and full.limits == {}
    assert "more KV memory" in full.remedy and "97 %" in full.remedy
    assert "POST /limits" not in full.remedy


def test_prompts_wait_for_the_budget() -> None:
    rig = Rig(budget=32, seqs=16)
    offer(rig, [200, 300], every=1, count=20, outputs=2)
    assert names(rig)[0] == "budget_used_up_by_prompts"


def test_clients_give_up() -> None:
    rig = Rig()
    for i in range(10):
        rig.add(f"r{i}", 10, 50)
        for _ in range(4):
            rig.step()
        rig.abort(f"r{i}")
    rig.step()
    assert names(rig) == ["clients_give_up"]


def test_only_the_window_counts() -> None:
    rig = Rig(seqs=1)
    offer(rig, [20], every=2, count=20, outputs=20)
    rig.clock.advance(100)
    rig.add("later", 4, 30)
    rig.drain()
    assert names(rig) == ["too_few_seats"]
    assert diagnose(signals(rig, window=50)) == []


def spiky(rig: Rig, name: str) -> None:
    """Chats beside which long prompts come in."""
    for i in range(8):
        rig.add(f"{name}-chat{i}", 20, 400)
    for i in range(8):
        for _ in range(40):
            rig.step()
        rig.add(f"{name}-long{i}", 2000, 2)
    rig.drain()


def test_steps_before_a_change_of_limits_do_not_count() -> None:
    """The doctor's advice, followed on the running server by the very body that it names."""
    rig = Rig(budget=2048, seqs=16)
    spiky(rig, "before")
    [finding] = diagnose(signals(rig))
    assert finding.name == "long_prefills_stall_decodes"
    advised = json.loads(finding.remedy.partition("POST /limits ")[2])
    assert advised == {"max_num_batched_tokens": 352}
    rig.scheduler.set_limits(**advised)
    spiky(rig, "after")
    found = signals(rig)
    assert diagnose(found) == [], "what it blames is over"
    assert found["seen_since"] == "limits" and 100 < found["steps"] < len(rig.records)
    assert found["max_num_batched_tokens"] == 352


def test_no_step_since_a_change_of_limits() -> None:
    """The core's record comes with its next step; the frontend knows at once."""
    rig = Rig(seqs=1)
    offer(rig, [20], every=2, count=20, outputs=20)
    assert names(rig) == ["too_few_seats"]
    rig.records.change_limits(rig.clock.now())
    rig.clock.advance(3)
    assert names(rig) == []
    found = signals(rig)
    assert (found["steps"], found["seen_since"]) == (0, "limits")
    assert found["seen_seconds"] == pytest.approx(3)


def test_a_change_that_changes_nothing_is_none() -> None:
    rig = Rig(seqs=2)
    offer(rig, [20], every=2, count=30, outputs=20)
    rig.scheduler.set_limits(max_num_seqs=2)
    offer(rig, [21], every=2, count=2, outputs=2)
    assert names(rig) == ["too_few_seats"] and signals(rig)["seen_since"] == "start"


@pytest.mark.parametrize(
    ("finding", "now", "body"),
    [
        ("too_few_seats", {"max_num_seqs": 4}, {"max_num_seqs": 8}),
        ("too_few_seats", {"max_num_seqs": 8, "max_num_batched_tokens": 8}, None),
        ("budget_used_up_by_prompts", {}, {"max_num_batched_tokens": 4096}),
        ("kv_pool_too_small", {"running_mean": 2.6}, {"max_num_seqs": 3}),
        ("held_back_by_policy", {"scheduling_policy": "fair"}, {"scheduling_policy": "fcfs"}),
        ("held_back_by_policy", {}, None),
        ("long_prefills_stall_decodes", {"enable_chunked_prefill": False}, None),
    ],
)
def test_what_can_be_tried_without_a_restart(
    finding: str, now: Signals, body: dict[str, object] | None
) -> None:
    [found] = diagnose(CALM | SICK[finding] | now)
    said = found.remedy.partition("; without a restart: POST /limits ")[2]
    assert (json.loads(said) if said else None) == body
    assert found.limits == (body or {})


def test_how_far_back_the_records_reach() -> None:
    rig = Rig(steps=50)
    rig.add("a", 4, 30)
    rig.drain()
    rig.clock.advance(10)
    reached = signals(rig, window=60)
    assert reached["seen_since"] == "start"
    assert reached["seen_seconds"] == pytest.approx(rig.clock.now() - 100.0003)
    rig.add("b", 4, 200)
    rig.drain()
    reached = signals(rig, window=60)
    first = rig.records.snapshot().row(0)
    assert (reached["steps"], reached["seen_since"]) == (50, "records")
    assert reached["seen_seconds"] == pytest.approx(rig.clock.now() - first.start)
    reached = signals(rig, window=0.1)
    assert (reached["seen_seconds"], reached["seen_since"]) == (0.1, "window")


def prompts(rig: Rig, kinds: int, count: int) -> None:
    """Prompts of 320 tokens, the next after each is over; so many different ones in turn."""
    for i in range(count):
        begin = 1000 * (i % kinds)
        rig.add(f"p{i}", list(range(begin, begin + 320)), 2)
        rig.drain()


def test_evicted_prefixes_that_nobody_asks_for_are_no_loss() -> None:
    rig = Rig(num_blocks=100, caching=True)
    prompts(rig, kinds=60, count=60)
    found = signals(rig)
    assert found["blocks_evicted"] > 500 and found["prefix_hit_rate"] == 0
    assert found["missed_tokens"] == 0 and names(rig) == []


def test_evicted_prefixes_that_are_asked_for_again() -> None:
    rig = Rig(num_blocks=100, caching=True)
    prompts(rig, kinds=7, count=60)  # 7 x 20 blocks: the one that comes next is always gone
    [finding] = diagnose(signals(rig))
    assert finding.name == "prefixes_evicted" and "--swap-space" in finding.remedy
    # The last token of a prompt is computed in any case, and with it its block.
    assert signals(rig)["missed_tokens"] == (60 - 7) * 19 * 16
    rig = Rig(num_blocks=200, caching=True)
    prompts(rig, kinds=7, count=60)
    assert names(rig) == [] and signals(rig)["missed_tokens"] == 0


CALM: Signals = {
    "steps": 100, "wait_share": {}, "kv_usage_max": 0.5, "recomputed_share": 0.0,
    "preemption_rate": 0.0, "preemptions": 0, "waiting_max": 0, "waiting_mean": 0.0,
    "overhead_share": 0.05, "aborted": 0, "failed": 0, "finished": 10, "blocks_evicted": 0,
    "prefix_queries": 0, "prefix_hit_rate": 0.0, "running_mean": 3.0, "max_num_seqs": 8,
    "max_num_batched_tokens": 2048, "long_prefill_token_threshold": 0,
    "scheduling_policy": "fcfs", "itl_p99": 0.01, "decode_step_p50": 0.01, "missed_share": 0.0,
    "missed_tokens": 0,
}  # fmt: skip
SICK: dict[str, Signals] = {
    "kv_pool_too_small": {"kv_usage_max": 1.0, "wait_share": {"blocks": 0.5}},
    "long_prefills_stall_decodes": {
        "itl_p99": 0.2, "spikes": 9, "spikes_by_prefill": 1.0, "spike_time_share": 0.2,
        "spike_seconds": 0.3, "spike_seconds_per_token": 1e-4, "spike_prompt_tokens": 2048,
        "spike_request": "z",
    },
    "too_few_seats": {"wait_share": {"max_num_seqs": 0.4}},
    "budget_used_up_by_prompts": {"wait_share": {"budget": 0.4}},
    "held_back_by_policy": {"wait_share": {"policy": 0.4}},
    "machine_starved": {"core_wait_seconds": 3.0, "core_wait_share": 0.3, "span_seconds": 10.0},
    "prefixes_evicted": {"missed_tokens": 900, "missed_share": 0.3, "prefix_queries": 5000},
    "scheduler_bound": {"overhead_share": 0.5},
    "clients_give_up": {"aborted": 5},
    "requests_fail": {"failed": 1},
    "drafts_rejected": {"draft_acceptance": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("row", DRILL, ids=lambda row: row.name)
def test_each_row_fires_on_its_symptom_alone(row) -> None:  # type: ignore[no-untyped-def]
    assert diagnose(CALM) == []
    [finding] = diagnose(CALM | SICK[row.name])
    assert finding.name == row.name and finding.evidence and finding.remedy
    assert 0 < finding.weight <= 1


METRICS = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} %d
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.95
vllm:num_preemptions_total{engine="0",model_name="m"} %d
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} %d
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0"} %d
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} %d
vllm:request_success_total{engine="0",finished_reason="error"} 0
"""


def test_the_usual_figures_from_metrics() -> None:
    before = parse_metrics(METRICS % (0, 10, 5, 5, 5))
    after = parse_metrics(METRICS % (20, 14, 5, 15, 15))
    read = metric_figures(before, after, 2.0)
    assert read["waiting"] == 20 and read["preemptions_per_second"] == 2
    assert read["ttft_metric_p50"] == pytest.approx(0.75)
    above = {figure: is_above for figure, is_above, _ in check_alerts(read)}
    assert above == {
        "p95 TTFT 975 ms": True,
        "20 waiting": True,
        "KV cache usage 95 %": True,
        "2.0 preemptions/s": True,
        "0 requests failed": False,
    }


def test_what_is_over_is_no_warning() -> None:
    """Late first tokens and failures of long ago are told, but not as if they happened now."""
    text = METRICS.replace('error"} 0', 'error"} 3')
    before = parse_metrics(text % (0, 10, 5, 5, 15))
    read = check_alerts(metric_figures(before, parse_metrics(text % (0, 10, 5, 5, 15)), 2.0))
    above = {figure: is_above for figure, is_above, _ in read}
    assert above["p95 TTFT 1.00 s since the start, none just now"] is False
    assert above["0 requests failed just now, 3 since the start"] is False
    after = text.replace('error"} 3', 'error"} 5') % (0, 10, 5, 15, 25)
    read = check_alerts(metric_figures(before, parse_metrics(after), 2.0))
    above = {figure: is_above for figure, is_above, _ in read}
    assert above["2 requests failed just now, 5 since the start"] is True
    assert above["p95 TTFT 975 ms"] is True


def test_short_prompts_are_no_long_prefills() -> None:
    """Steps with prompts are slower here, too, but a smaller budget would change nothing."""
    spiky = CALM | SICK["long_prefills_stall_decodes"] | {"max_num_seqs": 128}
    assert diagnose(spiky) and not diagnose(spiky | {"spike_prompt_tokens": 200})


def test_a_noisy_machine_does_not_hide_the_prefills() -> None:
    """Many steps that are a little slow count less than a few that are very slow."""
    steps = itertools.count()

    def noisy(tokens: int) -> float:
        return cost(tokens) * (4 if next(steps) % 5 == 0 else 1)

    rig = Rig(budget=2048, seconds=noisy)
    for i in range(8):
        rig.add(f"chat{i}", 20, 400)
    for i in range(8):
        for _ in range(40):
            rig.step()
        rig.add(f"long{i}", 2000, 2)
    rig.drain()
    assert names(rig) == ["long_prefills_stall_decodes"]


def starved_beside_prompts(reading: bool) -> Rig:
    """Chats, beside which prompts come in; the machine has other things to do just then."""
    rig = Rig(budget=2048, seqs=16)
    for i in range(8):
        rig.add(f"chat{i}", 20, 400)
    for i in range(8):
        for _ in range(40):
            rig.step(starved=0.0 if reading else None)
        rig.add(f"new{i}", 100, 2)
        if reading:
            rig.step(starved=1.1)
        else:
            rig.clock.advance(0)
            rig.seconds = lambda tokens: cost(tokens) + 1.1
            rig.step()
            rig.seconds = cost
    rig.drain()
    return rig


def test_a_starved_machine_is_told_from_long_prompts() -> None:
    blind = names(starved_beside_prompts(reading=False))
    assert blind == ["long_prefills_stall_decodes"], "what one must think without the reading"
    rig = starved_beside_prompts(reading=True)
    [finding] = diagnose(signals(rig))
    assert finding.name == "machine_starved"
    assert finding.evidence.startswith(
        "threads of the engine's steps waited 8.80 s of the last 11.4 s of work for a core"
    )
    late = {"api_wait_seconds": 20.0, "api_wait_share": 1.8}
    [finding] = diagnose(signals(rig) | late)
    assert finding.weight == 1
    assert finding.evidence.startswith("the API process waited 20.0 s of the last 11.4 s of work")


def test_steps_that_were_not_read_waited_as_the_one_read_after_them() -> None:
    rig = Rig()
    rig.add("a", 4, 60)
    usual = cost(1) + 1.5e-4
    for _ in range(10):
        for _ in range(3):
            rig.seconds = lambda tokens: cost(tokens) + 0.01
            rig.step()
        rig.seconds = cost
        rig.step(starved=0.01)
    found = signals(rig)
    assert found["decode_step_p50"] < usual + 0.005 and found["decode_steps"] == 39
    assert found["core_wait_seconds"] == pytest.approx(40 * 0.01, rel=0.05)


def test_pauses_without_a_core_count_while_there_is_work() -> None:
    rig = Rig()
    rig.add("a", 4, 30)
    for _ in range(25):
        rig.step(starved=0.0, pause=0.02)
    rig.drain()
    rig.clock.advance(100)
    rig.add("b", 4, 3)
    rig.step(starved=0.0, pause=3.0)  # nothing to do, but for its arrival
    rig.drain()
    found = signals(rig)
    assert found["core_wait_seconds"] == pytest.approx(24 * 0.02)
    assert [f.name for f in diagnose(found)] == ["machine_starved"]


def test_what_else_tells_of_a_starved_machine() -> None:
    rig = Rig()
    rig.add("a", 4, 60)
    for number in range(40):
        rig.step(starved=0.004)
        if number % 10 == 9:
            reading = MachineStats(rig.clock.now(), 1.0, 3.0 + number / 9, 2, 0.1, 0.4)
            rig.records.record(StepStats(step=rig.scheduler.step, machine=reading), None)
    found = signals(rig)
    assert found["load"] == pytest.approx(3.0 + 39 / 9) and found["cores"] == 2
    assert found["stolen_share"] == pytest.approx(0.4 / 8)
    assert found["throttled_seconds"] == pytest.approx(1.6) and found["machine_seconds"] == 4
    [finding] = diagnose(found)
    for part in (
        "load 7.3 on 2 cores", "throttled 1.60 s of 4.00 s", "took 5 % of the cores' time",
    ):  # fmt: skip
        assert part in finding.evidence
    assert finding.remedy.startswith("a larger CPU quota")


def test_nothing_is_said_where_nothing_can_be_read() -> None:
    rig = Rig()
    offer(rig, [40], every=6, count=20, outputs=30)
    assert {name for name in signals(rig) if "wait_s" in name} == {"wait_share"}


def test_quantile() -> None:
    assert [quantile([3, 1, 2], q) for q in (0, 0.5, 0.99, 1)] == [1, 2, 3, 3]
    assert quantile([], 0.5) == 0


def test_refused_requests_are_told() -> None:
    text = (
        'vllm:admission_rejections_total{reason="max_num_queued_reqs"} %d\n'
        'vllm:admission_rejections_total{reason="deadline"} %d\n'
    )
    before = parse_metrics(text % (7, 1))
    figures = metric_figures(before, parse_metrics(text % (9, 2)), 2.0)
    assert [(what, above) for what, above, _ in check_alerts(figures)][-1] == (
        "3 requests refused just now, 11 since the start",
        True,
    )
    figures = metric_figures(before, before, 2.0)
    assert check_alerts(figures)[-1][:2] == (
        "0 requests refused just now, 8 since the start",
        False,
    )
    assert "refused_now" not in metric_figures({}, {}, 2.0), "a server without this metric"
