"""`quire run-batch` in a process of its own, with the model that ships: a thousand lines, every
route, and runs that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from live_server import QUIRE, serving
from patience import PATIENCE, wait_for

SEEDED = {"temperature": 1, "seed": 7}


def line(name: str, url: str, body: dict[str, Any]) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def thousand() -> list[str]:
    """Requests of several kinds, and every hundredth line is bad in its own way."""
    rows = []
    for i in range(1000):
        turn = [{"role": "user", "content": f"What is {i % 9} plus 3?"}]
        kinds = [
            ("/v1/chat/completions", {"messages": turn, "max_tokens": 8, **SEEDED}),
            ("/v1/completions", {"prompt": f"{i} The capital of", "max_tokens": 6, "seed": i}),
            ("/v1/completions", {"prompt": [f"{i} a", "b"], "max_tokens": 3, "temperature": 0}),
            ("/tokenize", {"prompt": f"{i}"}),
        ]
        rows.append(line(f"r{i}", *kinds[i % 4]))
    rows[0] = '{"custom_id": "r0", '
    rows[100] = line("r100", "/v1/nowhere", {})
    rows[200] = line("r199", "/tokenize", {"prompt": "twice"})
    rows[300] = line("r300", "/v1/completions", {"prompt": "x", "max_tokens": 0})
    rows[400] = line("r400", "/v1/completions", {"prompt": "x", "temperature": 9})
    rows[500] = line("r500", "/v1/chat/completions", {"messages": [], "stream": True})
    rows[600] = line("r600", "/v1/embeddings", {"input": "x"})
    rows[700] = "[]"
    rows[800] = line("r800", "/v1/completions", {"prompt": "x", "model": "other"})
    rows[900] = line("r900", "/v1/completions", {"prompt": "x", "nonsense": 1})
    return rows


def command(folder: Path, *more: str) -> list[str]:
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return [*QUIRE, "run-batch", *files, *more]


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *more), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def results(folder: Path) -> list[Any]:
    return [json.loads(one) for one in (folder / "out.jsonl").read_bytes().splitlines()]


def told(result: Any) -> Any:
    """What is the same each time it is asked."""
    response = result["response"]
    if response is None:
        return result["custom_id"], result["error"]
    body = {k: v for k, v in response["body"].items() if k not in ("id", "created")}
    if "usage" in body:
        body["usage"] = {k: v for k, v in body["usage"].items() if k != "prompt_tokens_details"}
    if body.get("seed") not in (7, None) or "choices" not in body:
        body.pop("seed", None)
    return result["custom_id"], response["status_code"], body, result["error"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch that ran without a fault."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "in.jsonl").write_text("\n".join(thousand()) + "\n")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "1000 of 1000 requests, 10 of them failed" in done.stderr
    return folder


def test_a_thousand_lines(whole: Path) -> None:
    assert sorted(os.listdir(whole)) == ["in.jsonl", "out.jsonl"]
    found = results(whole)
    names = [f"r{i}" for i in range(1000)]
    names[0], names[200], names[700] = None, "r199", None  # type: ignore[call-overload]
    assert [one["custom_id"] for one in found] == names, "in the order of the input"
    bad = {i for i, one in enumerate(found) if one["error"] is not None}
    assert bad == set(range(0, 1000, 100))
    assert all(one["response"]["status_code"] == 200 for one in found if not one["error"])
    statuses = [found[i]["response"] and found[i]["response"]["status_code"] for i in sorted(bad)]
    assert statuses == [None, None, None, 400, 400, None, 400, None, 404, 400]
    messages = [found[i]["error"]["message"] for i in sorted(bad)]
    for message, said in zip(
        messages,
        ["Line 1: it is not valid JSON", "Line 101: url must be one of /v1/chat/completions, ",
         "Line 201: its custom_id is that of line 200 too", "max_tokens", "temperature must be",
         "Line 501: stream must be false", "embeddings", "Line 701: it is no request", "`other`",
         "Unknown field `nonsense`"],
        strict=True,
    ):  # fmt: skip
        assert said in message


def test_replies_are_those_of_the_server(whole: Path) -> None:
    rows, found = thousand(), results(whole)
    with serving() as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for i in [*range(1, 60), 300, 400, 600, 800, 900]:
            asked = json.loads(rows[i])
            reply = client.post(asked["url"], json=asked["body"])
            response = {"status_code": reply.status_code, "body": reply.json()}
            error = None if reply.status_code < 400 else reply.json()["error"]
            same = {"custom_id": asked["custom_id"], "response": response, "error": error}
            assert told(found[i]) == told(same), asked


def interrupted(folder: Path, when: int, hit: Callable[[subprocess.Popen[str]], None]) -> str:
    """Run until so many lines are done, then `hit` it; what it printed."""
    partial = folder / "out.jsonl.partial"
    process = subprocess.Popen(
        command(folder, "--max-num-seqs", "4"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip

    def enough() -> bool:
        assert process.poll() is None, "it ended before it was interrupted"
        return partial.exists() and partial.read_bytes().count(b"\n") > when

    try:
        wait_for(enough, lambda: "lines that are done")
        hit(process)
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "in.jsonl").write_text("\n".join(thousand()) + "\n")
    yield tmp_path


def test_a_killed_run_goes_on_where_it_was(whole: Path, folder: Path) -> None:
    partial = folder / "out.jsonl.partial"
    for when in (150, 500):
        interrupted(folder, when, lambda process: process.send_signal(signal.SIGKILL))
        assert not (folder / "out.jsonl").exists()
    kept = {one.split(b" ", 2)[2] for one in partial.read_bytes().splitlines(keepends=True)[1:]}
    assert 500 <= len(kept) < 1000
    done = run(folder)
    assert done.returncode == 0 and "line(s) are done already" in done.stdout + done.stderr
    written = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert len(written) == 1000 and kept <= set(written), "nothing that was done is done again"
    assert [told(one) for one in results(folder)] == [told(one) for one in results(whole)]
    assert sorted(os.listdir(folder)) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_keeps_what_is_done(
    whole: Path, folder: Path, number: signal.Signals
) -> None:
    codes: list[int] = []
    before = set(psutil.Process().children())  # of other tests

    def hit(process: subprocess.Popen[str]) -> None:
        process.send_signal(number)
        codes.append(process.wait(PATIENCE))

    said = interrupted(folder, 100, hit)
    assert codes == [130] and "the same command goes on with the rest" in said, said
    assert "Traceback" not in said and set(psutil.Process().children()) <= before
    assert run(folder).returncode == 0
    assert [told(one) for one in results(folder)] == [told(one) for one in results(whole)]


def test_a_killed_engine_core_changes_nothing(whole: Path, folder: Path) -> None:
    def hit(process: subprocess.Popen[str]) -> None:
        (core,) = (
            child for child in psutil.Process(process.pid).children()
            if "EngineCore" in " ".join(child.cmdline())
        )  # fmt: skip
        core.kill()

    said = interrupted(folder, 100, hit)
    assert "SIGKILL" in said and "1000 of 1000 requests" in said, said
    assert [told(one) for one in results(folder)] == [told(one) for one in results(whole)]


def test_another_input_or_model_is_not_mixed_in(folder: Path) -> None:
    interrupted(folder, 50, lambda process: process.kill())
    given = (folder / "in.jsonl").read_text()
    (folder / "in.jsonl").write_text(given.replace("capital", "Capital"))
    done = run(folder)
    assert done.returncode == 2 and "of the input is not the one that" in done.stderr, done.stderr
    (folder / "in.jsonl").write_text(given)
    done = run(folder, "--served-model-name", "other")
    assert done.returncode == 2 and "was begun with the model quire-demo" in done.stderr


TEXT_URLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4, "use_beam_search": True, "n": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/messages": {
        "model": "quire-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4,
    },
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/messages/count_tokens": {
        "model": "quire-demo", "messages": [{"role": "user", "content": "Hi"}],
    },
}  # fmt: skip
POOLED_URLS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/pooling": {"input": "a"},
    **dict.fromkeys(("/score", "/v1/score"), {"text_1": "a", "text_2": ["b", "c"]}),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"), {"query": "a", "documents": ["b", "c"]}
    ),
}


@pytest.mark.parametrize(
    ("bodies", "flags"), [(TEXT_URLS, []), (POOLED_URLS, ["--runner", "pooling"])]
)
def test_every_route(tmp_path: Path, bodies: dict[str, Any], flags: list[str]) -> None:
    rows = [line(url, url, body) for url, body in bodies.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    done = run(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    for result in results(tmp_path):
        assert result["response"]["status_code"] == 200, result


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-i", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory"),
        (["-o", "no/out.jsonl"], "there is no folder"),
        (["-o", "in.jsonl"], "are the same file"),
        (["--port", "8001"], "--port says where metrics are served: give --enable-metrics too"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, got 0"),
        (["--output-tmp-dir", "."], "--output-tmp-dir is for an --output-file that is a URL"),
        (["--model", "./no/model"], "there is no model folder 'no/model'"),
    ],
)
def test_bad_calls(tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "in.jsonl").write_text("")
    given = [*QUIRE, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *args]
    done = subprocess.run(
        given, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode in (1, 2) and said in done.stderr, done.stderr
    assert os.listdir(tmp_path) == ["in.jsonl"] and "Traceback" not in done.stderr


def test_metrics_meanwhile(folder: Path) -> None:
    (folder / "in.jsonl").write_text(
        "\n".join(
            line(str(i), "/v1/completions", {"prompt": "x", "max_tokens": 1500, "ignore_eos": True})
            for i in range(40)
        )
    )
    process = subprocess.Popen(
        command(folder, "--enable-metrics", "--port", "0", "--max-num-seqs", "1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(
            one.split("metrics: ")[1].strip() for one in process.stdout if "metrics: " in one
        )
        base = url.removesuffix("/metrics")
        assert "vllm:num_requests_running" in httpx.get(url, timeout=PATIENCE).text
        assert httpx.get(f"{base}/livez", timeout=PATIENCE).status_code == 200
        body = {"prompt": "x"}
        refused = httpx.post(f"{base}/v1/completions", json=body, timeout=PATIENCE)
        assert refused.status_code == 404, "nobody else is served"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
