"""Every client unmodified, in an environment of its own, against a real server and its model.

`make test` makes a few of the environments and runs what is there; `make test-clients` makes all,
and a client whose environment is missing fails there instead of being skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

import environments
from live_server import Server, serving

ALL = os.environ.get("QUIRE_ALL_CLIENTS") == "1"
PROGRAMS = Path(__file__).resolve().parent / "programs"
MODEL = "quire-demo"
TOKENIZER = str(files("quire.assets") / MODEL)


@dataclass(frozen=True)
class Client:
    """A row of the table: an environment, and the program that it runs."""

    environment: str
    program: str


CLIENTS = (
    Client("openai-2", "openai_python.py"),
    Client("openai-3", "openai_python.py"),
    Client("anthropic", "anthropic_python.py"),
    Client("litellm", "litellm_client.py"),
    Client("langchain", "langchain_openai_client.py"),
    Client("llama-index", "llama_index_client.py"),
    Client("instructor", "instructor_client.py"),
    Client("pydantic-ai", "pydantic_ai_client.py"),
    Client("lm-eval", "lm_eval_client.py"),
    Client("guidellm", "guidellm_client.py"),
    Client("aiperf", "aiperf_client.py"),
    Client("schemathesis", "schemathesis_client.py"),
    Client("vllm", "vllm_bench_client.py"),
    Client("node", "openai_node.mjs"),
    Client("node", "ai_sdk.mjs"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running
        assert "Traceback" not in running.log


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: f"{c.environment}-{c.program}")
def test_client(client: Client, server: Server, tmp_path: Path) -> None:
    if client.environment == "vllm" and "QUIRE_PEER_VLLM" not in os.environ:
        pytest.skip("QUIRE_PEER_VLLM is not set: the Python of an environment with vLLM")
    try:
        interpreter = environments.program(client.environment)
    except environments.Unmade as error:
        if ALL:
            raise
        pytest.skip(str(error))
    where = environments.BUILD / "node" if client.environment == environments.NODE else PROGRAMS
    done = subprocess.run(
        [interpreter, where / client.program, server.url, MODEL, TOKENIZER],
        cwd=tmp_path,
        # Offline: nothing may be asked of a hub, and no proxy may come between.
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n--- server ---\n{server.log[-2000:]}"


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
