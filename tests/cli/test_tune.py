"""`quire tune`: targets are read, the search prefers what meets them, a live engine verifies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire.cli.main as cli
from quire.bench.result import RequestRecord, summary
from quire.bench.slo import LatencyTargets
from quire.bench.tune import Trial, busiest, current, distance, tune
from quire.cli import many_simulations
from quire.cli.many_simulations import ManySimulations, Simulation
from quire.cli.progress import CommandProgress
from quire.config import EngineConfig
from quire.config.cli import load_yaml
from quire.errors import ConfigError, QuireError
from quire.sim.simulator import Pool
from quire.sim.step_time import StepTimeModel
from quire.workload.trace import Trace, TraceHeader, TraceRequest, write_trace

TARGETS = LatencyTargets.parse("ttft_p99=500ms, tpot_mean=0.05s")


def result(ttft: float, tpot: float, throughput: float = 100.0) -> dict[str, Any]:
    return {
        "failed": 0, "completed": 1, "p99_ttft_ms": ttft, "mean_tpot_ms": tpot,
        "output_throughput": throughput,
    }  # fmt: skip


def test_targets_compare_with_the_figures_of_a_run() -> None:
    assert [str(t) for t in TARGETS.targets] == ["ttft_p99=500ms", "tpot_mean=50ms"]
    assert TARGETS.excess(result(250, 40)) == 0.8 and TARGETS.excess(result(1000, 40)) == 2
    assert TARGETS.excess(result(1, 1) | {"failed": 1}) == float("inf")
    assert LatencyTargets.parse("itl_p99.9=5ms").percentiles == [99.0, 99.9]


def test_percentiles_are_named_as_in_results() -> None:
    targets = LatencyTargets.parse("ttft_p99.0=5ms,itl_p50.0=5ms,tpot_p05=5ms,e2el_p99.90=5ms")
    records = [RequestRecord(0.0, 3, 2, 0.5, [0.1], 0.6)]
    found = summary(records, 1.0, percentiles=targets.percentiles)
    assert [t.statistic for t in targets.targets] == ["p99", "p50", "p5", "p99.9"]
    assert targets.figures(found)["itl_p50"] == pytest.approx(100) and targets.excess(found) > 1


@pytest.mark.parametrize(
    "text", ["", "ttft_p99", "ttft=5ms", "ttft_p99=5", "ttft_p99=0ms", "speed_p99=5ms", "ttft_p=1s"]
)
def test_bad_targets_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        LatencyTargets.parse(text)


def test_of_those_that_meet_the_targets_the_least_change_is_best() -> None:
    def trial(ttft: float, distance: float) -> Trial:
        said = result(ttft, 10)
        return Trial({}, said, TARGETS.excess(said), distance)

    near, far, missed, late = trial(400, 1), trial(100, 4), trial(600, 0), trial(5000, 0)
    assert sorted([late, missed, far, near], key=lambda t: t.rank) == [near, far, missed, late]
    base = current(EngineConfig())
    halved = base | {"max_num_batched_tokens": 1024}
    assert distance(base, base) == 0 and distance(halved, base) == 1
    assert distance(halved | {"scheduling_policy": "sjf"}, base) == 2


class Machine:
    """Stands for the simulator and the live engine: says how long the first token takes.

    Args:
        simulated: In the simulation.
        live: On the engine; by default as simulated.
    """

    def __init__(
        self, simulated: Callable[[Any], float], live: Callable[[Any], float] | None = None
    ) -> None:
        self._simulated, self._live = simulated, live or simulated
        self.stages: list[tuple[str, int]] = []
        self.played: list[dict[str, Any]] = []
        self.told: list[str] = []

    def simulate(self, what: str, configs: Sequence[EngineConfig]) -> list[dict[str, Any]]:
        self.stages.append((what, len(configs)))
        return [result(self._simulated(config.scheduler), 10) for config in configs]

    def play(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self.played.append(trial.settings)
            trial.live = result(self._live(SimpleNamespace(**trial.settings)), 10)
            trial.live_excess = TARGETS.excess(trial.live)

    def tune(self, live: int = 2, **options: Any) -> tuple[Trial, list[Trial]]:
        config = EngineConfig.from_options(max_model_len=512, max_num_seqs=64, **options)
        self.base = current(config)
        return tune(config, self.simulate, TARGETS, self.play, live, self.told.append)


def test_the_search_finds_the_one_setting_that_meets_them() -> None:
    def simulated(limits: Any) -> float:
        small = limits.max_num_batched_tokens == 128
        if small and limits.scheduling_policy == "sjf":
            return 100.0
        return 600.0 if small else 1500.0

    machine = Machine(simulated)
    own, best = machine.tune()
    assert own.settings == machine.base and own.excess > 1
    assert best[0].settings["scheduling_policy"] == "sjf" and best[0].excess < 1
    assert all(t.settings["max_num_seqs"] <= 64 for t in best)
    assert machine.played == [machine.base, *(trial.settings for trial in best)] and len(best) == 2
    assert [what for what, _ in machine.stages] == [
        "simulating the present settings",
        "simulating budgets and seats",
        "simulating policies and limits on long prompts",
    ]


@pytest.mark.parametrize("live", [0, 2])
def test_settings_that_are_enough_are_left_alone(live: int) -> None:
    machine = Machine(lambda limits: 100.0)
    own, best = machine.tune(live)
    assert best == [] and machine.stages == [("simulating the present settings", 1)]
    assert machine.played == [own.settings] * bool(live)
    assert machine.told == ["the present settings meet the targets: no others are tried"]


def test_settings_that_only_just_meet_them_are_not_enough() -> None:
    machine = Machine(lambda limits: 480.0 if limits.max_num_seqs == 64 else 200.0)
    own, best = machine.tune()
    assert own.excess < 1 and not own.is_enough and best[0].is_enough


def test_settings_that_are_enough_in_the_simulation_only_are_played_once() -> None:
    def live(limits: Any) -> float:
        return 100.0 if limits.max_num_seqs == 32 else 900.0

    machine = Machine(lambda limits: 100.0 if limits.max_num_seqs in (64, 32) else 2000.0, live)
    own, best = machine.tune(live=3)
    assert own.live_excess > 1 and machine.played.count(own.settings) == 1
    assert [len(machine.played), len(best)] == [4, 3]
    assert min(best, key=lambda trial: trial.live_excess).settings["max_num_seqs"] == 32
    assert "in the simulation only" in machine.told[0]


@pytest.mark.parametrize("seed", range(20))
def test_the_busiest_part_of_a_trace(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = sorted(rng.choice((rng.uniform(0, 9), rng.randint(0, 9))) for _ in range(30))
    requests = [TraceRequest(at + 5, rng.randint(1, 99), rng.randint(1, 99)) for at in arrivals]

    def tokens(some: Sequence[TraceRequest]) -> int:
        return sum(one.prompt_len + one.output_len for one in some)

    for seconds in (0.5, 3.0, 100.0):
        found = busiest(requests, seconds)
        parts = [
            [one for one in requests if first <= one.arrival and one.arrival - first <= seconds]
            for first in (one.arrival for one in requests)
        ]
        assert tokens(found) == max(map(tokens, parts))
        assert found[0].arrival == 0 and found[-1].arrival <= seconds
    assert len(found) == 30


def test_a_long_trace_is_simulated_by_several_processes_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(4)
    requests = [
        TraceRequest(0.02 * n, rng.randint(5, 300), rng.randint(20, 60), number=n)
        for n in range(600)
    ]
    trace = Trace(TraceHeader(), requests, [], [])
    simulation = Simulation(trace, Pool(2000), StepTimeModel(2e-3, (1e-5,) * 14), (99.0,))
    base = EngineConfig.from_options(max_model_len=512, max_num_seqs=64)
    configs = [
        EngineConfig.from_options(max_model_len=512, max_num_seqs=64, max_num_batched_tokens=n)
        for n in (64, 128, 4096)
    ]
    configs.append(base)
    monkeypatch.setattr(many_simulations, "available_cores", lambda: 2)
    several = ManySimulations(simulation, CommandProgress())("trying", configs)
    assert several == [simulation(config) for config in configs]
    assert several[0] != several[1], "the settings count"
    assert "trying: 4 of 4" in capsys.readouterr().err

    class Killing(CommandProgress):
        def seen(self, what: str, done: int, total: int) -> None:
            for process in active_children():
                process.kill()

    with pytest.raises(QuireError, match="a process that simulated was killed"):
        ManySimulations(simulation, Killing())("trying", configs * 10)
    assert not active_children()


def test_a_setting_is_verified_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(1)
    trace, times, out = (str(tmp_path / name) for name in ("t.jsonl", "s.json", "tuned.yaml"))
    write_trace(
        trace, [TraceRequest(0.05 * n, rng.randint(5, 60), rng.randint(2, 9)) for n in range(20)]
    )
    StepTimeModel(2e-3, (1e-5,) * 14).write(times)
    common = ["tune", "--trace", trace, "--step-times", times, "--out", out, "--max-num-seqs", "8"]
    code = cli.main([*common, "--slo", "ttft_p99=100s,tpot_p99=100s", "--live", "1"])
    told = capsys.readouterr().out
    assert code == 0 and told.count("live ") == 1 and told.count(": met") == 2
    assert "live: the whole trace" in told
    written = load_yaml(out)
    assert {"max_num_seqs", "max_num_batched_tokens", "scheduling_policy"} <= written.keys()
    evidence = Path(out).read_text()
    assert "# targets: ttft_p99=100000ms" in evidence and "no setting" not in evidence
    code = cli.main([*common, "--slo", "ttft_p99=0.001ms", "--live", "0"])
    unmet = "no setting that was tried meets the targets"
    assert code == 1 and unmet in capsys.readouterr().out
    assert f"\n# {unmet}\n" in Path(out).read_text()
    assert cli.main(["inspect", "--config", out]) == 0, "it is a file for --config"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--slo TARGETS and --trace FILE"),
        (["--slo", "x", "--trace", "t"], "is no target"),
        (["--slo", "ttft_p99=5ms", "--trace", "t", "--live", "-1"], "--live must be 0 to 20"),
        (["--slo", "ttft_p99=5ms", "--trace", "t", "--live-seconds", "0"], "--live-seconds must"),
        (["--slo", "ttft_p99=5ms", "--trace", "absent"], "cannot read the trace"),
    ],
)
def test_bad_input_of_tune(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_left_out_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, times, out = (str(tmp_path / name) for name in ("t.jsonl", "s.json", "tuned.yaml"))
    long = TraceRequest(0.0, 100_000_000, 3)
    write_trace(trace, [*(TraceRequest(0.1 * n, 9, 2) for n in range(4)), long])
    StepTimeModel(2e-3, (1e-5,) * 14).write(times)
    common = ["tune", "--step-times", times, "--slo", "ttft_p99=100s", "--out", out]
    assert cli.main([*common, "--trace", trace, "--live", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 of 5 requests are left out, simulated and live" in told
    assert told.count(": met") == 2 and "live: the whole trace" in told
    write_trace(trace, [long])
    assert cli.main([*common, "--trace", trace]) == 2
    assert "no prompt of the trace fits" in capsys.readouterr().err


def test_the_file_is_checked_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["tune", "--slo", "ttft_p99=1s", "--trace", "/dev/null/absent"]
    assert cli.main([*common, "--out", "/dev/null/absent/tuned.yaml"]) == 2
    assert "--out: there is no folder '/dev/null/absent'" in capsys.readouterr().err
