"""The examples run as they are written, and what they show is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import QUIRE, Server
from patience import PATIENCE
from quire.cli import chat, complete, serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text("utf-8")
    assert [path.name for path in EXAMPLES.iterdir() if path.name not in here] == []


def test_offline() -> None:
    done = run(sys.executable, str(EXAMPLES / "offline.py"))
    assert done.stdout.splitlines() == [
        "'The capital of France is' -> ' Paris.'",
        "'The capital of Japan is' -> ' Tokyo.'",
        "'12 + 5 =' -> ' 17'",
    ], done.stderr


def test_streaming() -> None:
    done = run(sys.executable, str(EXAMPLES / "streaming.py"))
    pieces = {"story": "", "fact": ""}
    for line in done.stdout.splitlines():
        name, _, piece = line.partition("] ")
        pieces[name[1:]] += piece[1:-1]
    assert pieces["fact"].startswith(" Rome"), done.stderr
    assert pieces["story"].startswith(", there was")


def test_hello_vllm() -> None:
    done = run(*QUIRE, "run", "--model", "quire-demo", str(EXAMPLES / "hello_vllm.py"))
    *_, first, second = done.stdout.splitlines()
    assert first.startswith("Prompt: 'Hello, my name is', Generated text: ' ")
    assert second.startswith("Prompt: 'The capital of France is', Generated text: ' Paris")


def test_openai_client(server: Server) -> None:
    pytest.importorskip("openai")
    done = run(sys.executable, str(EXAMPLES / "openai_client.py"), server.url)
    assert done.stdout == "The capital of France is Paris.\n", done.stderr
    done = run(sys.executable, str(EXAMPLES / "openai_client.py"), "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr == "No server answers at http://127.0.0.1:1: start one with `quire serve`\n"


def test_openai_client_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "openai_client.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "This example needs the OpenAI client: pip install openai\n",
    )


@pytest.mark.parametrize("command", [serve, chat, complete])
def test_the_file_of_flags_is_for_all_commands(command: object) -> None:
    given = command.build_parser().parse(["--config", str(EXAMPLES / "server.yaml")])  # type: ignore[attr-defined]
    assert given.max_num_batched_tokens == 1000
