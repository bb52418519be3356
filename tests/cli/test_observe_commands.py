"""`explain`, `timeline`, `top`, `doctor`: what they print, and what they say when it fails."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from patience import PATIENCE
from quire.cli import machine
from quire.cli import main as cli
from quire.cli.chat import build_parser as chat_parser
from quire.cli.doctor import nothing_found, seen
from quire.cli.explain import BAR, draw
from quire.cli.target import server_target
from quire.cli.top import Pace, waits_for
from quire.config import EngineConfig
from quire.engine.frontend.questions import Question
from quire.observability.explain.diagnosis import diagnose
from record_rig import Rig

METRICS = b"""\
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 30
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 0
"""


@pytest.fixture
def pages() -> dict[str, bytes]:
    """What the server answers, by path: from the records of a simulated engine."""
    rig = Rig(seqs=1)
    rig.add("x", 4, 30)
    rig.add("me", 4)
    rig.drain()
    question = Question(rig.records, [], rig.clock.now(), EngineConfig())
    signals = question.signals(1e9)
    states = [
        {
            "id": "me", "index": 0, "state": "waiting", "wait_reason": "blocks",
            "queue_head": False, "age": 1.5, "num_prompt_tokens": 4, "num_cached_tokens": 0,
            "num_output_tokens": 0, "num_preemptions": 0,
        }
    ]  # fmt: skip
    encode = msgspec.json.encode
    told = {"signals": signals, "findings": diagnose(signals)}
    return {
        "/metrics": METRICS,
        "/v1/requests": encode({"data": states}),
        "/v1/requests/me/explain": encode({"id": "me", "completions": question.explain("me")}),
        "/v1/diagnosis?seconds=60": encode(told),
        "/v1/timeline?steps=5": encode(question.timeline(5)),
    }


@pytest.fixture
def url(pages: dict[str, bytes]) -> Iterator[str]:
    """A server of these pages."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path, b'{"error": {"message": "there is nothing"}}')
            self.send_response(200 if self.path in pages else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain_draws_a_waterfall(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "explain", "me", "--url", url)
    assert code == 0 and out.startswith("request me: ")
    [queued] = [
        line for line in out.splitlines() if "all 1 --max-num-seqs places were taken" in line
    ]
    [decode] = [line for line in out.splitlines() if "decode, 3 steps" in line]
    bars = [line.partition("[")[2].partition("] ")[0] for line in (queued, decode)]
    assert "█" * 20 in bars[0] and bars[1].startswith(" " * 20)


def test_explain_as_json(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "explain", "me", "--url", url, "--json")
    assert code == 0 and json.loads(out)["id"] == "me"


def test_explain_unknown(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, "explain", "nobody", "--url", url)
    assert (code, out) == (1, "") and "404: there is nothing" in err


def test_timeline_is_written(capsys, url: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tmp_path / "trace.json")
    code, out, _ = run(capsys, "timeline", "--url", url, "--steps", "5", "-o", path)
    assert code == 0 and "5 steps" in out and "ui.perfetto.dev" in out
    with open(path, encoding="utf-8") as file:
        assert json.load(file)["traceEvents"]
    code, _, err = run(capsys, "timeline", "--url", url, "--steps", "5", "-o", str(tmp_path))
    assert code == 2 and "--output: cannot write" in err


def test_top_once(capsys, url: str, pages: dict[str, bytes]) -> None:  # type: ignore[no-untyped-def]
    arguments = ("top", "--url", url, "--once", "--interval", "0.1")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    figures = " ".join(out.split())
    for expected in ("Running 2", "Waiting 30", "25.0%", "1 unfinished", "queue head (blocks)"):
        assert expected in figures
    assert max(map(len, out.splitlines())) <= 80, "it fits a terminal"
    del pages["/v1/requests"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "Running" in out and "no list of requests" in out


LONG = "chatcmpl-" + "0123456789abcdef" * 8


def test_top_cuts_no_id_when_piped(capsys, url: str, pages: dict[str, bytes]) -> None:  # type: ignore[no-untyped-def]
    [state] = json.loads(pages["/v1/requests"])["data"]
    pages["/v1/requests"] = json.dumps({"data": [state | {"id": LONG}]}).encode()
    _, out, _ = run(capsys, "top", url, "--once", "--interval", "0.1")
    assert LONG in out.split()


def gauges(running: int, steps: int, tokens: int) -> dict[str, dict[str, float]]:
    return {
        "vllm:num_requests_running": {"": running},
        "vllm:engine_steps_total": {"": steps},
        "vllm:generation_tokens_total": {"": tokens},
        "vllm:prompt_tokens_total": {"": 0},
    }


def test_a_step_longer_than_the_interval_is_no_standstill() -> None:
    pace = Pace()
    pace.see(gauges(0, 5, 100), False, 0.0)
    first = pace.see(gauges(2, 5, 100), True, 1.0)
    assert first["step_seconds"] == 1.0 and "generation_tokens_per_second" not in first
    pace.see(gauges(2, 5, 100), True, 2.0)
    ended = pace.see(gauges(2, 6, 180), True, 4.0)
    assert ended["generation_tokens_per_second"] == 80 / 4 and "step_seconds" not in ended
    running = pace.see(gauges(2, 6, 180), True, 5.5)
    assert running["generation_tokens_per_second"] == 20, "the rate over the last steps"
    assert running["step_seconds"] == 1.5
    pace.see(gauges(0, 7, 190), False, 6.0)
    idle = pace.see(gauges(0, 7, 190), False, 7.0)
    assert idle["generation_tokens_per_second"] == 0 and "step_seconds" not in idle


def test_top_says_that_a_step_runs(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    _, out, _ = run(capsys, "top", url, "--once", "--interval", "0.1")
    assert "step running for " in out and "Output tok/s -" in " ".join(out.split())


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_on_a_terminal_ends_by_a_key(url: str, pages: dict[str, bytes], key: bytes) -> None:
    [state] = json.loads(pages["/v1/requests"])["data"]
    pages["/v1/requests"] = json.dumps({"data": [state | {"id": LONG}]}).encode()
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "quire", "top", url, "--interval", "30"]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    ) as process:  # fmt: skip
        os.close(follower)
        shown = b""
        while b"q quits" not in shown:
            shown += os.read(leader, 65536)
        os.write(leader, key)
        with contextlib.suppress(OSError):  # how a terminal says that nobody is left
            while more := os.read(leader, 65536):
                shown += more
        ended = process.wait(timeout=PATIENCE)
    os.close(leader)
    assert ended == {b"q": 0, b"\x03": 130}[key]
    assert b"Traceback" not in shown
    assert LONG[:12].encode()[:-1] in shown, "enough of the id for `quire explain`"


def test_url_as_an_argument(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    for arguments, expected in (
        (("explain", "me", url), "request me: "),
        (("explain", url, "--json", "me"), '"id": "me"'),
        (("timeline", url, "--steps", "5", "-o", "-"), "traceEvents"),
        (("top", url, "--once", "--interval", "0.1"), "Running"),
        (("doctor", url, "--watch", "0.05"), "30 waiting"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code in (0, 1) and expected in out, (arguments, err)
    code, _, err = run(capsys, "doctor", url, "--port", "1")
    assert code == 2 and "URL and --port name a server each" in err


def test_url_in_place_of_a_model() -> None:
    server = server_target(chat_parser().parse(["http://127.0.0.1:1"]))
    assert server is not None and (server.url, server.model) == ("http://127.0.0.1:1", None)


def test_doctor_names_the_cause(capsys, url: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "doctor", "--url", url, "--watch", "0.05")
    assert code == 1
    assert "warn  30 waiting: the queue grows" in out and "ok    KV cache usage 25 %" in out
    assert "likely cause: all --max-num-seqs places are taken" in out
    assert "--max-num-seqs (now 128)" in out
    command = f"curl -X POST {url}/limits -H 'Content-Type: application/json'"
    assert f"""    try:      {command} -d '{{"max_num_seqs": 256}}'""" in out.splitlines()
    _, out, _ = run(capsys, "doctor", f"{url}/", "--watch", "0.05", "--api-key", "k")
    assert f"""{command} -H "Authorization: Bearer $QUIRE_ADMIN_API_KEY" -d""" in out


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("window", "4,096 steps, 3.50 s of work, in the last 4.10 s"),
        ("records", "in the last 4.10 s (older ones are not kept: --record-steps keeps more)"),
        ("limits", "of work, since the limits were changed 4.10 s ago"),
        ("start", "of work, since the first one 4.10 s ago"),
    ],
)
def test_doctor_says_how_far_back_it_has_looked(since: str, expected: str) -> None:
    signals = {"steps": 4096, "span_seconds": 3.5, "seen_seconds": 4.1, "seen_since": since}
    assert expected in seen(signals)
    assert nothing_found(signals) == "nothing stands out"
    assert "too few steps to judge" in nothing_found(signals | {"steps": 19})


def test_doctor_on_a_server_without_records(  # type: ignore[no-untyped-def]
    capsys, url: str, pages: dict[str, bytes]
) -> None:
    del pages["/v1/diagnosis?seconds=60"]
    code, out, _ = run(capsys, "doctor", "--url", url, "--watch", "0.05")
    assert code == 0 and "30 waiting" in out and "no records" in out


def test_wrong_usage(capsys) -> None:  # type: ignore[no-untyped-def]
    for arguments, expected in (
        (("explain", "x", "--url", "http://h", "--port", "1"), "give one"),
        (("explain", "x", "--port", "70000"), "--port must be from 1 to 65535"),
        (("timeline", "--steps", "0"), "--steps must be at least 1"),
        (("top", "--interval", "0"), "--interval must be at least 0.1"),
        (("doctor", "--watch", "0"), "--watch must be positive"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and expected in err


def test_no_server(capsys) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        code, _, err = run(capsys, "explain", "x", "--port", port)
    assert code == 1 and "cannot reach" in err


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0.0, 1.0)], "█" * BAR),
        ([(0.0, 0.5)], "█" * (BAR // 2) + " " * (BAR // 2)),
        ([(0.5, 0.5001)], " " * (BAR // 2) + "▏" + " " * (BAR // 2 - 1)),
        ([], " " * BAR),
    ],
)
def test_bars(spans, expected: str) -> None:  # type: ignore[no-untyped-def]
    assert draw(spans, 1.0) == expected


def test_what_a_request_waits_for() -> None:
    assert waits_for({"wait_reason": None}) == ""
    assert waits_for({"wait_reason": "blocks", "queue_head": True}) == "blocks"


# ------------------------------------------------------------------------------------- the machine


def test_local_checks(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, _ = run(capsys, "doctor", "--json")
    checks = {check["name"]: check["verdict"] for check in json.loads(out)}
    assert code == 0
    assert set(checks) == {
        "environment", "cpu", "threads", "load", "memory", "packages", "open files", "port", "hub",
        "gpu",
    }  # fmt: skip
    assert checks["packages"] == "ok"


def test_verdicts(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine._cpu([], "auto").verdict == "warn"
    assert "AVX2" in machine._cpu(["avx2", "fma"], "auto").found
    assert machine._threads(8, None).verdict == "ok"
    assert machine._threads(8, 2.0).remedy.startswith("OMP_NUM_THREADS=2")
    monkeypatch.setattr("os.getloadavg", lambda: (7.3, 5.0, 4.0))
    [busy] = machine._load(2)
    assert (busy.verdict, busy.found) == (
        "warn", "7.3 threads want to run, on 2 cores (mean of the last minute)",
    )  # fmt: skip
    assert machine._load(8)[0].verdict == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert machine._threads(8, None).verdict == "warn"
    assert machine._memory(2**40, 2**20).verdict == "warn"
    assert machine._memory(2**40, None).verdict == "ok"
    assert machine._packages({"torch": None, "numpy": "2"}).found == "missing: torch"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "LOUD")
    assert machine._environment().verdict == "fail"
    driver = tmp_path / "version"
    assert "CPU is used" in machine._gpu(driver).found
    driver.write_text("NVRM version:  550\nGCC", "utf-8")
    assert machine._gpu(driver).found == "NVRM version: 550"


def test_port_and_hub(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert machine._port(port).verdict == "warn"
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert machine._hub().verdict == "ok"
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    assert machine._hub().verdict == "warn"
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    found = machine._hub()
    assert found.verdict == "warn" and "cannot be reached: " in found.found
    assert "Errno" not in found.found
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    assert machine._hub().verdict == "fail"
