"""The API process is killed, or told to end, and started again: streams go on after the event that
their clients have, byte for byte."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import Server
from patience import PATIENCE, wait_for
from quire.kernels.compiled import available_isas

LENGTH = 300
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 5, "logprobs": 2},
    "unseeded": {"temperature": 1.1},
    "stop": {"temperature": 1, "seed": 8, "stop": ["zzz", " the end"]},
    "n3": {"temperature": 1, "seed": 9, "n": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "two prompts": {"temperature": 1, "prompt": ["Once upon a time", "The capital of France"]},
}


class Client:
    """Reads one stream, event by event, from whatever server there is."""

    length = LENGTH

    def __init__(self, url: str, kind: str) -> None:
        body = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": self.length}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        self.body = body | KINDS[kind]
        self.events: list[str] = []
        self.ids: list[str] = []
        self.last = self.stream = ""
        self.status = 0
        self.kind, self.told, self.said = kind, "", ""
        self.start(self._open, url)

    def start(self, work: Callable[[str], None], url: str) -> None:
        self._thread = threading.Thread(target=work, args=(url,), daemon=True)
        self._thread.start()

    def _open(self, url: str) -> None:
        headers = {"X-Resumable": "true"}
        self._read("POST", f"{url}/v1/completions", headers, self.body)

    def come_back(self, url: str) -> None:
        """Ask for the rest, until the server has it; read to the end."""

        def ask() -> bool:
            headers = {"Last-Event-ID": self.last} if self.last else {}
            self._read("GET", f"{url}/v1/streams/{self.stream}", headers, None)
            return self.status != 503

        wait_for(ask)

    def _read(self, method: str, url: str, headers: dict[str, str], body: Any) -> None:
        try:
            with httpx.stream(method, url, json=body, headers=headers, timeout=PATIENCE) as reply:
                self.status = reply.status_code
                self.said = reply.read().decode() if self.status != 200 else ""
                self.stream = reply.headers.get("x-stream-id", self.stream)
                data = ""
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        data = line
                        self.said = line if '"error"' in line else self.said
                    elif line.startswith("id:"):
                        self.last = line[4:]
                        self.ids.append(self.last)
                        self.events.append(data)
                    if "left_in_journal" in line:
                        self.told = line
                    if self.is_enough():
                        break
        except httpx.HTTPError:
            pass

    def is_enough(self) -> bool:
        """Whether to drop the connection."""
        return False

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    @property
    def is_done(self) -> bool:
        return bool(self.events) and self.events[-1] == "data: [DONE]"

    def seed(self) -> int:
        found = (json.loads(e[6:]) for e in self.events if e.startswith("data: {"))
        seeds = (e.get("seed") or e["choices"][0].get("seed") for e in found if e["choices"])
        return next(seed for seed in seeds if seed is not None)

    def choices(self) -> dict[int, list[Any]]:
        """Text, log-probabilities and finish reason of each choice; usage under -1."""
        told: dict[int, list[Any]] = {}
        for event in self.events[:-1]:
            part = json.loads(event[6:])
            assert "error" not in part, part
            for choice in part["choices"]:
                got = told.setdefault(choice["index"], ["", [], None])
                got[0] += choice["text"]
                got[1] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                got[2] = choice["finish_reason"] or got[2]
            if usage := part.get("usage"):
                told[-1] = [usage["prompt_tokens"], usage["completion_tokens"]]
        return told


def whole(url: str, body: dict[str, Any]) -> dict[int, list[Any]]:
    """The same request without any fault."""
    reply = httpx.post(
        f"{url}/v1/completions", json=body | {"stream": False, "stream_options": None},
        timeout=PATIENCE,
    ).json()  # fmt: skip
    told: dict[int, list[Any]] = {}
    for choice in reply["choices"]:
        scores = (choice.get("logprobs") or {}).get("token_logprobs") or []
        told[choice["index"]] = [choice["text"], scores, choice["finish_reason"]]
    told[-1] = [reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]]
    return told


def flags(folder: Path) -> tuple[str, ...]:
    cache = ("--kv-cache-memory-bytes", str(64 * 2**20))
    return ("--journal-dir", str(folder / "journal"), "--disable-uvicorn-access-log", *cache)


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait(PATIENCE)
    server.stop()


@pytest.mark.parametrize("again", [2])
def test_streams_outlive_a_kill_of_the_api_process(tmp_path: Path, again: int) -> None:
    rng = random.Random(again)
    server = Server(*flags(tmp_path))
    clients = [Client(server.url, kind) for kind in KINDS for _ in range(2)]
    cut = 0
    for _ in range(again):
        aims = [len(client.events) + rng.randrange(1, 60) for client in clients]
        for client, aim in zip(clients, aims, strict=True):
            wait_for(lambda c=client, n=aim: len(c.events) >= n or c.is_done)
        kill(server)
        for client in clients:
            client.join()
        server = Server(*flags(tmp_path))
        for client in clients:
            if not client.is_done:
                cut += 1
                client.start(client.come_back, server.url)
    for client in clients:
        client.join()
        assert client.is_done, (client.kind, client.status, client.last, client.said)
        seeded = client.body | {"seed": client.seed()}
        assert client.choices() == whole(server.url, seeded), client.body
    assert cut > len(KINDS) and "Once upon" not in server.log
    server.stop()


class LongClient(Client):
    """Whose stream does not end while a test is held up."""

    length = 1400


def test_after_a_drain_the_rest_comes_from_the_next_process(tmp_path: Path) -> None:
    server = Server(*flags(tmp_path), "--shutdown-timeout", "0")
    clients = [LongClient(server.url, kind) for kind in ("greedy", "unseeded", "n3")]
    for client in clients:
        wait_for(lambda c=client: len(c.events) > 20)
    assert server.stop() == 0
    server = Server(*flags(tmp_path))
    for client in clients:
        client.join()
        assert "fetch the rest with GET /v1/streams/" in client.told and not client.is_done
        client.come_back(server.url)
        assert client.is_done
        seeded = client.body | {"seed": client.seed()}
        assert client.choices() == whole(server.url, seeded), client.body
    server.stop()


def test_what_has_ended_is_kept_too(tmp_path: Path) -> None:
    """And no journal remains of what nobody can fetch any more."""
    server = Server(*flags(tmp_path))
    client = Client(server.url, "seeded")
    client.join()
    said, last = client.choices(), client.last
    assert client.is_done
    kill(server)
    server = Server(*flags(tmp_path), "--stream-retention", "1")
    client.events, client.last = [], ""
    client.come_back(server.url)
    # Tokens that came in one event while the client was slow may come one by one now.
    assert (client.choices(), client.last) == (said, last)
    journal = tmp_path / "journal"

    def is_gone() -> bool:
        return httpx.get(f"{server.url}/v1/streams/{client.stream}").status_code == 404

    wait_for(is_gone)
    server.stop()
    assert [path.name for path in journal.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("changed", "env", "what"),
    [
        (["--dtype", "float32"], {}, "dtype"),
        pytest.param(
            [], {"QUIRE_CPU_ISA": "portable"}, "kernels",
            marks=pytest.mark.skipif(len(available_isas()) < 2, reason="has no other kernels"),
        ),
    ],
)  # fmt: skip
def test_another_precision_or_arithmetic_is_no_continuation(
    tmp_path: Path, changed: list[str], env: dict[str, str], what: str
) -> None:
    server = Server(*flags(tmp_path))
    client = Client(server.url, "greedy")
    wait_for(lambda: len(client.events) > 20)
    kill(server)
    client.join()
    server = Server(*flags(tmp_path), *changed, env=env)
    reply = httpx.get(
        f"{server.url}/v1/streams/{client.stream}", headers={"Last-Event-ID": client.last}
    )
    assert reply.status_code == 410 and what in reply.json()["error"]["message"]
    assert f"was written with another {what}" in server.log
    server.stop()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    server = Server(*flags(tmp_path))
    assert server.url
    other = Server(*flags(tmp_path))
    assert other.process.wait(PATIENCE) == 1
    assert other.stop() == 1 and "in use by another server" in other.log
    server.stop()
