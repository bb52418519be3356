"""`quire tune`: targets are read, the search prefers what meets them, a live engine verifies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import quire.cli.main as cli
from quire.bench.slo import LatencyTargets
from quire.bench.tune import Trial, current, distance, search
from quire.config import EngineConfig
from quire.config.cli import load_yaml
from quire.errors import ConfigError
from quire.sim.step_time import StepTimeModel
from quire.workload.trace import TraceRequest, write_trace

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


def test_the_search_finds_the_one_setting_that_meets_them() -> None:
    def simulate(config: EngineConfig) -> dict[str, Any]:
        limits = config.scheduler
        good = limits.max_num_batched_tokens == 128 and limits.scheduling_policy == "sjf"
        near = 100.0 if limits.max_num_batched_tokens == 128 else 1000.0
        return result(100 if good else 500 + near, 10)

    config = EngineConfig.from_options(max_model_len=512, max_num_seqs=64)
    trials = search(config, simulate, TARGETS, lambda told: None)
    assert trials[0].settings == current(config) and trials[0].excess > 1
    assert trials[1].settings["scheduling_policy"] == "sjf" and trials[1].excess < 1
    assert all(t.settings["max_num_seqs"] <= 64 for t in trials)


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
    assert code == 0 and told.count("live ") == 2 and told.count(": met") == 4
    written = load_yaml(out)
    assert {"max_num_seqs", "max_num_batched_tokens", "scheduling_policy"} <= written.keys()
    assert "# targets: ttft_p99=100000ms" in Path(out).read_text()
    code = cli.main([*common, "--slo", "ttft_p99=0.001ms", "--live", "0"])
    assert code == 1 and "no setting that was tried meets the targets" in capsys.readouterr().out
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
