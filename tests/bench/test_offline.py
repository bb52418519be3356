"""Offline benchmarks: what they measure, by counts and against numpy, and what they refuse."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.bench.offline import startup
from quire.bench.offline.drive import Drive, Job, check_context, random_prompts
from quire.bench.offline.latency import latency_result, latency_text
from quire.bench.offline.options import LatencyOptions, StartupOptions, ThroughputOptions
from quire.bench.offline.throughput import throughput_result, throughput_text
from quire.bench.result import RequestRecord
from quire.cli import main as cli
from quire.errors import ConfigError, RequestError, StartupError


@pytest.fixture(scope="module")
def llm():
    with LLM(num_gpu_blocks_override=400) as made:
        yield made


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_drive_records_every_request_and_step(llm):
    rng = np.random.default_rng(0)
    prompts = random_prompts(6, 40, 2048, rng)
    jobs = [
        Job(prompt, SamplingParams(max_tokens=5 + i, ignore_eos=True, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    seen = []
    driven = Drive(llm.llm_engine, jobs, seen=lambda done, total: seen.append((done, total))).run()
    assert [r.output_len for r in driven.records] == [5, 6, 7, 8, 9, 10]
    assert [len(r.itls) for r in driven.records] == [4, 5, 6, 7, 8, 9]
    assert all(r.ok and r.input_len == 40 for r in driven.records)
    for record in driven.records:  # the gaps add up to the time between first token and end
        assert record.end - record.first_token == pytest.approx(sum(record.itls))
    assert sum(s.num_generation_tokens for s in driven.steps) == driven.num_output_tokens == 45
    assert driven.num_prompt_tokens == 240 and driven.peak_kv_usage > 0
    assert seen[0] == (0, 6) and seen[-1] == (6, 6) and not llm.llm_engine.has_unfinished_requests
    alone = llm.generate(
        [{"prompt_token_ids": job.prompt} for job in jobs], [j.params for j in jobs], use_tqdm=False
    )
    assert driven.token_ids == [list(o.outputs[0].token_ids) for o in alone]
    assert driven.texts == [o.outputs[0].text for o in alone]


def test_a_refused_job_leaves_nothing_behind(llm):
    good = Job([11, 12], SamplingParams(max_tokens=4))
    with pytest.raises(RequestError):
        Drive(llm.llm_engine, [good, Job([11] * 5000, SamplingParams(max_tokens=4))]).run()
    driven = Drive(llm.llm_engine, [good], prequeue=True).run()
    assert driven.records[0].ok and not llm.llm_engine.has_unfinished_requests


def test_jobs_wait_until_they_are_due(llm):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    driven = Drive(llm.llm_engine, [Job([11], params, due=0.05), Job([12], params)]).run()
    late, early = driven.records
    assert late.start - early.start > 0.04


def test_percentiles_of_latency_against_numpy():
    rng = random.Random(3)
    for _ in range(20):
        values = [rng.expovariate(1.0) for _ in range(rng.randrange(1, 50))]
        result = latency_result(values)
        assert result["avg_latency"] == pytest.approx(sum(values) / len(values))
        assert result["latencies"] == values
        for name, value in result["percentiles"].items():
            assert value == pytest.approx(np.quantile(values, int(name) / 100))
    text = latency_text(result).splitlines()
    assert text[0] == f"Avg latency: {result['avg_latency']} seconds"
    assert [line.split("%")[0] for line in text[1:]] == ["10", "25", "50", "75", "90", "99"]


def test_throughput_counts_only_what_succeeded():
    good = [RequestRecord(0.0, 10, 5, 0.5, [0.1] * 4, 1.0) for _ in range(3)]
    bad = RequestRecord(0.0, 10, 2, 0.5, error="no")
    result = throughput_result([*good, bad], 2.0)
    assert result["requests_per_second"] == 1.5 and result["tokens_per_second"] == 22.5
    assert result["total_num_tokens"] == 45 and result["num_requests"] == 4
    lines = throughput_text(result).splitlines()
    assert lines[0] == ("Throughput: 1.50 requests/s, 22.50 total tokens/s, 7.50 output tokens/s")
    assert lines[3] == "Failed requests: 1 of 4"


def test_latency_command(capsys, tmp_path):
    path = tmp_path / "latency.json"
    code, out, err = run(
        capsys, "latency", "--num-iters", "3", "--num-iters-warmup", "1", "--output-len", "4",
        "--batch-size", "2", "--output-json", str(path), "--num-gpu-blocks-override", "400",
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert code == 0 and len(result["latencies"]) == 3
    assert out.strip() == latency_text(result)
    assert "Profiling iterations: 3 of 3" in err


@pytest.mark.parametrize("engine", [[], ["--async-engine"]])
def test_throughput_command(capsys, tmp_path, engine):
    path = tmp_path / "throughput.json"
    code, out, _ = run(
        capsys, "throughput", "--num-prompts", "6", "--input-len", "20", "--output-len", "4",
        "--n", "2", "--output-json", str(path), "--num-gpu-blocks-override", "400", *engine,
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert code == 0 and out.strip() == throughput_text(result)
    assert result["total_input_tokens"] == 120 and result["total_output_tokens"] == 6 * 2 * 4
    assert result["elapsed_time"] * result["requests_per_second"] == pytest.approx(6)


def test_startup_command(capsys, tmp_path):
    path = tmp_path / "startup.json"
    code, out, _ = run(
        capsys, "startup", "--num-iters-cold", "1", "--num-iters-warmup", "0",
        "--num-iters-warm", "1", "--output-json", str(path), "--num-gpu-blocks-override", "400",
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert code == 0 and "STARTUP TIME BENCHMARK RESULTS" in out
    for kind in ("cold", "warm"):
        total = result[f"avg_{kind}_startup_time"]
        parts = result[f"avg_{kind}_import_time"] + result[f"avg_{kind}_load_time"]
        assert 0 < parts < total < result[f"avg_{kind}_first_token_time"]
        assert result[f"avg_{kind}_compilation_time"] == 0


def test_what_startup_reports():
    cold = [{part: float(i + j) for j, part in enumerate(startup.PARTS)} for i in range(3)]
    result = startup.startup_result(cold, cold[:1])
    assert result["cold_startup_times"] == [0, 1, 2] and result["avg_cold_startup_time"] == 1
    assert result["cold_first_token_percentiles"]["90"] == pytest.approx(
        np.percentile([4, 5, 6], 90)
    )


def test_a_start_that_fails_tells_why(tmp_path):
    with pytest.raises(StartupError, match="code 1: .*no model folder"):
        startup.start_once({"model": str(tmp_path / "none")}, 60)
    (tmp_path / "a").write_text("x")
    assert startup.drop_files(tmp_path) == 1


BAD = [
    (("latency", "--num-iters", "0"), "--num-iters must be at least 1, got 0"),
    (("latency", "--input-len", "2000"), "more than the context of 2048"),
    (("latency", "--output-json", "/no/such/x.json"), "there is no folder '/no/such'"),
    (("throughput", "--n", "0"), "--n must be at least 1, got 0"),
    (("throughput", "--num-prompts", "0"), "--num-prompts must be at least 1, got 0"),
    (("throughput", "--input-len", "3000", "--num-prompts", "2"), "more than the context of 2048"),
    (("throughput", "--backend", "hf"), "--backend hf: quire measures itself"),
    (("throughput", "--backend", "vlm"), "--backend must be one of vllm, vllm-chat"),
    (("throughput", "--lora-path", "x"), "with the adapter merged into it"),
    (("throughput", "--async-engine", "--prequeue-requests"), "leave --async-engine out"),
    (("throughput", "--dataset-path", "/none.json"), "cannot read '/none.json'"),
    (("throughput", "--model", "/none"), "there is no model folder '/none'"),
    (("startup", "--num-iters-warm", "0"), "--num-iters-warm must be at least 1, got 0"),
    (("startup", "--start-timeout", "nan"), "--start-timeout must be above 0, got nan"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_clear_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code in (1, 2) and out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("quire: ") and message in last


@pytest.mark.parametrize("name", ["throughput", "prefix-caching", "prioritization"])
def test_a_missing_dataset_is_told_before_a_model_is_loaded(capsys, name):
    code, _, err = run(capsys, name, "--dataset-path", "/none.json", "--model", "/no/model")
    assert (code, err) == (
        2,
        "quire: --dataset-path: cannot read '/none.json': No such file or directory\n",
    )


def test_options_refuse_what_cannot_be():
    for make in (
        lambda: LatencyOptions(batch_size=0),
        lambda: StartupOptions(num_iters_warmup=-1),
        lambda: ThroughputOptions(n=0),
        lambda: check_context(10, 11, 20),
    ):
        with pytest.raises(ConfigError):
            make()
