"""`quire plan`, `simulate`, `replay` and `calibrate` from the command line."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import quire.cli.main as cli
from quire import LLM
from quire.cli.calibrate import as_text
from quire.cli.times import calibration_file, step_times
from quire.config import EngineConfig
from quire.core.facts import FactLog, Wait
from quire.errors import StartupError
from quire.sim.scenario import read_settings, with_settings
from quire.sim.step_time import StepTimeModel
from quire.workload.trace import TraceRequest, read_trace, write_trace

TIMES = StepTimeModel(1e-3, (1e-5,) * 14, about={"source": "made up"})


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine did with some prompts."""
    path = tmp_path_factory.mktemp("what-if") / "trace.jsonl"
    hidden = {"chat_template": "{{ 'the capital secret' }}"}
    llm = LLM(
        record=str(path), **hidden, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    )
    texts = [f"The capital of {name} is" for name in ("France", "Italy", "Spain")] * 5
    llm.generate(texts, use_tqdm=False)
    llm.llm_engine.shutdown()
    return path


@pytest.fixture
def times(tmp_path: Path) -> str:
    TIMES.write(tmp_path / "times.json")
    return str(tmp_path / "times.json")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_recording_has_no_text_and_is_replayed_alike(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "capital" not in recording.read_text() and len(read_trace(recording).requests) == 15
    for place in ("simulator", "engine"):
        code, out, _ = run(capsys, "replay", str(recording), "--on", place)
        steps = len(read_trace(recording).steps)
        assert code == 0 and out.startswith(f"{steps} of {steps} steps with the recorded decisions")


def test_a_replay_that_decides_otherwise_says_where(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_text().splitlines()
    header = json.loads(lines[0])
    header["config"]["scheduler"]["max_num_seqs"] = 3
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([json.dumps(header), *lines[1:]]))
    code, _, err = run(capsys, "replay", str(changed))
    assert code == 1 and "recorded ADMITTED request 4" in err


def test_simulate_writes_result_and_timeline(
    recording: Path, times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, timeline = tmp_path / "r.json", tmp_path / "t.json"
    common = ("simulate", "--trace", str(recording), "--step-times", times)
    code, out, _ = run(
        capsys, *common, "--save-detailed", "--result-filename", str(result),
        "--timeline", str(timeline),
    )  # fmt: skip
    assert code == 0 and "Successful requests:                     15" in out
    assert "\nstep times: made up\n" in out
    found = json.loads(result.read_text())
    assert found["completed"] == 15 and found["backend"] == "simulator"
    assert len(found["ttfts"]) == 15 and found["p99_tpot_ms"] > 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert sum(e.get("name", "").startswith("step ") for e in events) == found["steps"]
    report = tmp_path / "report.html"
    code, out, _ = run(capsys, *common, "--set", "max_num_seqs=1", "--report", str(report))
    assert "max_num_seqs=1" in report.read_text() and "as it is" in report.read_text()
    assert code == 0 and "Peak concurrent requests:" in out
    alone = [line for line in out.splitlines() if line.startswith("Benchmark duration")][0]
    assert float(alone.split()[-1]) > found["duration"]


def test_the_pace_of_a_calibration(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps take twice as long as usual, throughout."""
    StepTimeModel(1e-3, (1e-5,) * 14, spells=((2.0, 2.0),)).write(tmp_path / "times.json")
    busy = {}
    for pace in ("calibrated", "usual", None):
        result = tmp_path / f"{pace}.json"
        flags = ("--pace", pace) if pace else ()
        code, *_ = run(
            capsys, "simulate", "--trace", str(recording), "--save-result", *flags,
            "--step-times", str(tmp_path / "times.json"), "--result-filename", str(result),
        )  # fmt: skip
        assert code == 0
        busy[pace] = json.loads(result.read_text())["busy_seconds"]
    assert 2 * busy["usual"] == 2 * busy[None] == pytest.approx(busy["calibrated"], rel=0.2)
    TIMES.write(tmp_path / "none.json")
    none = ("--step-times", str(tmp_path / "none.json"), "--pace", "calibrated")
    code, _, err = run(capsys, "simulate", "--trace", str(recording), *none)
    assert code != 0 and "measure them with `quire calibrate`" in err


@pytest.mark.parametrize("usual", [1e-5, 1.0])
def test_the_recorded_pace_makes_up_for_step_times_of_another_machine(
    recording: Path, usual: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StepTimeModel(usual, (usual / 100,) * 14).write(tmp_path / "times.json")
    result = tmp_path / "r.json"
    common = ("--step-times", str(tmp_path / "times.json"), "--result-filename", str(result))
    taken = sum(step.seconds for step in read_trace(recording).steps)
    for pace in ("recorded", "usual"):
        code, *_ = run(
            capsys, "simulate", "--trace", str(recording), *common, "--save-result", "--pace", pace
        )
        as_then = 0.3 < json.loads(result.read_text())["busy_seconds"] / taken < 3
        assert code == 0 and as_then == (pace == "recorded")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "max_num_seq=4"], "did you mean 'max_num_seqs'"),
        (["--set", "max_num_seqs"], "wants name=value"),
        (["--set", "max_num_seqs=many"], "no int"),
        (["--set", "max_num_seqs=0"], "max-num-seqs"),
        (["--gflops", "5"], "--memory-gb-s is missing"),
        (["--step-times", "/dev/null/absent"], "cannot read"),
        (["--memory-gb-s", "1e-300", "--gflops", "5"], "--memory-gb-s 1e-300 is too little"),
        (["--memory-gb-s", "5", "--gflops", "1e-300"], "--gflops 1e-300 is too little"),
        (["--memory-gb-s", "5", "--gflops", "1e300"], "--gflops must be below 1e+15"),
        (["--report", "/dev/null/absent/r"], "--report: there is no folder '/dev/null/absent'"),
        (["--timeline", "/dev/null/absent/t"], "--timeline: there is no folder '/dev/null/absent'"),
        (["--result-filename", "/"], "--result-filename '/' is a folder"),
    ],
)
def test_bad_input_of_simulate(
    recording: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "simulate", "--trace", str(recording), *arguments)
    assert code == 2 and problem in err and err.count("\n") == 1


def test_a_trace_from_elsewhere_needs_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRequest(0.1 * n, 20, 5) for n in range(5)])
    code, _, err = run(capsys, "simulate", "--trace", str(path))
    assert code == 2 and "quire calibrate" in err
    roofline = ("--memory-gb-s", "10", "--gflops", "100")
    code, _, err = run(capsys, "simulate", "--trace", str(path), *roofline, "--pace", "recorded")
    assert code == 2 and "--pace recorded: the trace has no steps" in err
    code, out, _ = run(capsys, "simulate", "--trace", str(path), *roofline)
    assert code == 0 and "Total generated tokens:                  25" in out
    assert run(capsys, "simulate")[2].startswith("quire: --trace FILE is missing")
    code, _, err = run(capsys, "replay", str(path))
    assert code == 2 and "no recording" in err


def test_settings_are_read_by_their_types() -> None:
    settings = read_settings(
        ["max_num_seqs=64", "--max-model-len=1k", "enable-prefix-caching=False", "watermark=0.1",
         "scheduling_policy=sjf", "num_gpu_blocks_override=500"]
    )  # fmt: skip
    assert settings == {
        "max_num_seqs": 64, "max_model_len": 1000, "enable_prefix_caching": False,
        "watermark": 0.1, "scheduling_policy": "sjf", "num_gpu_blocks_override": 500,
    }  # fmt: skip
    config = with_settings(EngineConfig(), settings)
    assert config.scheduler.max_num_seqs == 64 and not config.cache.enable_prefix_caching


FLAGS: list[dict[str, Any]] = [
    {},
    {"max_model_len": 500, "max_num_seqs": 7, "block_size": 32},
    {"kv_cache_memory_bytes": 3_000_000, "kv_cache_dtype": "fp8"},
    {"num_gpu_blocks_override": 333, "swap_space": 0.01},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_plan_tells_what_the_engine_says_at_its_start(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    code, out, _ = run(capsys, "plan", "--json", "--context", "100", *given)
    report = json.loads(out)
    assert code == 0 and len(report["start_up"]) == 3
    caplog.set_level(logging.INFO, logger="quire")
    # The defaults of `quire serve`; those of LLM are larger.
    llm = LLM(**{"max_num_seqs": 128, "max_num_batched_tokens": 2048} | flags)
    info = llm.llm_engine.core.info
    llm.llm_engine.shutdown()
    said = [record.getMessage() for record in caplog.records]
    assert all(line in said for line in report["start_up"])
    for name in ("num_blocks", "kv_cache_bytes", "max_model_len", "dtype", "weight_bytes"):
        assert report[name] == getattr(info, name), name


def test_plan_shows_formula_expectations_and_verified_alternatives(
    times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-gpu-blocks-override", "1001", "--max-model-len", "1600"]
    code, out, _ = run(capsys, "plan", "--users", "7", "--step-times", times, *flags)
    assert code == 0
    assert "16,000 KV tokens / 1,600 tokens per request = 10" in out and "= 7" in out
    assert "they fit" in out and " tok/s, TTFT " in out
    code, out, _ = run(capsys, "plan", "--users", "8", *flags)
    assert code == 1 and "8 users fit only without the buffer (7)" in out
    assert "7 users instead of 8" in out
    again = next(line for line in out.splitlines() if "--kv-cache-memory-bytes" in line).split()
    size = again[again.index("--kv-cache-memory-bytes") + 1]
    longest = ["--max-model-len", "1600"]
    code, _, _ = run(capsys, "plan", "--users", "8", "--kv-cache-memory-bytes", size, *longest)
    assert code == 0, "an alternative must hold"
    code, out, _ = run(capsys, "plan", "--memory", "8MiB")
    assert code == 1 and "instead" in out


def test_plan_simulates_nobody_who_does_not_fit(
    times: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("quire.cli.plan.expected")
    common = ("plan", "--json", "--step-times", times)
    code, out, _ = run(capsys, *common, "--users", "1000000")
    report = json.loads(out)
    assert code == 1 and report["expected"] is None and "--max-num-seqs" in report["problem"]
    code, out, _ = run(capsys, "plan", "--step-times", times, "--users", "1000000")
    assert "verdict" in out and "expected" not in out
    code, out, err = run(capsys, *common, "--context", "3", "--memory", "5M")
    assert code == 1 and not json.loads(out)["fits"] and not err


def test_plan_calls_no_other_error_a_lack_of_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(*arguments: object) -> None:
        raise StartupError("there is no such device")

    monkeypatch.setattr("quire.executor.sizing.size_engine", no_device)
    code, out, err = run(capsys, "plan")
    assert (code, out, err) == (1, "", "quire: there is no such device\n")


def test_plan_offers_smaller_weights(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ("plan", "--memory", "8MiB", "--max-model-len", "100", "--context", "100")
    code, out, _ = run(capsys, *tight)
    assert code == 1 and "the weights need" in out
    for scheme in ("int8", "int4"):
        assert f"instead       --quantization {scheme}\n" in out
        code, again, _ = run(capsys, *tight, "--quantization", scheme)
        assert code == 0 and "fits" in again, "an alternative must hold"
    code, out, _ = run(capsys, "plan", "--users", "129")
    assert code == 1 and "--quantization" not in out, "these weights are not what takes the memory"


def test_plan_counts_one_user(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--users", "1", "--context", "100")
    assert code == 0 and "1 user of 100 tokens: fits" in out
    code, out, _ = run(
        capsys, "plan", "--users", "2", "--num-gpu-blocks-override", "9", "--max-model-len", "80"
    )
    assert code == 1 and "instead       1 user instead of 2\n" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--users", "0"], "--users must be at least 1, got 0"),
        (["--context", "1M"], "--context must be 2 to 2048"),
        (["--context", "x"], "--context must be a number"),
        (["--memory", "much"], "--memory must be a size such as 16GiB"),
        (["--context", "10", "--output-len", "10"], "--output-len must be 1 to 9"),
    ],
)
def test_bad_input_of_plan(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "plan", *arguments)
    assert code == 2 and problem in err


def test_calibrate_measures_this_machine(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    code, out, _ = run(capsys, "calibrate", "--seconds", "1", "--out", str(path))
    assert code == 0 and f"wrote {path}" in out
    model = StepTimeModel.read(path)
    assert model.about["steps"] > 0 and model.overheads.gap > 0
    assert "a prompt of 512" in as_text(model) and "% of a step" in as_text(model)
    code, out, _ = run(capsys, "calibrate", "--from", str(recording), "--out", str(path))
    assert code == 0 and StepTimeModel.read(path).about["source"] == "the steps of trace.jsonl"
    assert "1 s idle: way in    none seen" in out, "nobody came after a second"
    code, _, err = run(capsys, "calibrate", "--seconds", "0")
    assert code == 2 and "--seconds must be 1 to 86400, got 0" in err


def test_calibrate_tells_before_the_work_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.calibrate._measured", None)
    code, _, err = run(capsys, "calibrate", "--out", "/dev/null/absent/s.json")
    assert code == 2 and "--out: there is no folder '/dev/null/absent'" in err
    (tmp_path / "file").touch()
    for folder in ("/proc/dev/null/absent", str(tmp_path / "file")):
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        code, _, err = run(capsys, "calibrate")
        assert code == 2 and "cannot make the folder" in err and "name a file with --out" in err


def test_a_calibration_is_of_one_shape_and_its_types(
    recording: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = EngineConfig.from_options()
    config = json.loads((ours.model.folder / "config.json").read_text())
    for name, changes in (
        ("same", {"_name_or_path": "elsewhere"}),
        ("other", {"num_hidden_layers": 9}),
    ):
        folder = tmp_path / name / ours.model.model
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    def at(**options: Any) -> Path:
        return calibration_file(EngineConfig.from_options(**options))

    here = at()
    assert here == at(model=str(tmp_path / "same" / ours.model.model), max_num_seqs=3)
    others = [
        at(model=str(tmp_path / "other" / ours.model.model)),
        at(quantization="int8"), at(dtype="bfloat16"), at(kv_cache_dtype="fp8"),
    ]  # fmt: skip
    assert len({here, *others}) == 5 and here.parent == tmp_path / "quire" / "step-times"

    here.parent.mkdir(parents=True)
    TIMES.write(here.parent / f"{ours.model.model}.json")  # of an older quire

    def asked(**options: Any) -> StepTimeModel | None:
        flags = Namespace(step_times=None, memory_gb_s=None, gflops=None)
        return step_times(flags, EngineConfig.from_options(**options))

    assert asked() is None
    err = capsys.readouterr().err
    assert err.startswith("not used: ") and "--step-times" in err and err.count("\n") == 1
    code, out, _ = run(capsys, "calibrate", "--from", str(recording))
    assert code == 0 and f"wrote {here}" in out
    found = asked()
    assert found is not None and found.about["source"] == "the steps of trace.jsonl"
    assert asked(quantization="int8") is None and capsys.readouterr().err.startswith("not used: ")
    assert run(capsys, "simulate", "--trace", str(recording))[2] == ""
    older = ("--step-times", str(here.parent / f"{ours.model.model}.json"))
    assert run(capsys, "simulate", "--trace", str(recording), *older)[0] == 0


def test_an_engine_is_not_started_for_structured_outputs(
    recording: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("quire.cli.replay._on_engine", None)
    trace = read_trace(recording)
    log = FactLog()
    log.waits(1, Wait.GRAMMAR)
    trace.steps[-1].facts += log.take()[0]
    write_trace(tmp_path / "t.jsonl", trace.requests, trace.header, trace.steps)
    code, _, err = run(capsys, "replay", str(tmp_path / "t.jsonl"), "--on", "engine")
    assert code == 2 and "replay it on the simulator" in err
