"""One server takes the place of another that has streams, with a journal that both use: whoever is
connected reads on where it is, whoever is not finds its reply at the new one, byte for byte.

The old one is slow until it may end: how fast a processor is does not say what these tests see."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import core_hook
from core_hook import SLOWLY
from live_server import Server
from patience import PATIENCE, wait_for
from test_restart import KINDS, LongClient, flags, kill, whole

BODY = {"model": "quire-demo", "prompt": "The sea is", "max_tokens": 20, "temperature": 0}


class Leaver(LongClient):
    """A client that can be told to drop its connection."""

    def __init__(self, url: str, kind: str) -> None:
        self.leaves = threading.Event()
        super().__init__(url, kind)

    def is_enough(self) -> bool:
        return self.leaves.is_set()

    def leave(self) -> None:
        self.leaves.set()
        self.join()
        self.leaves.clear()


class Load:
    """Asks one question after the other, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.answers: list[Any] = []
        self._url, self._enough = url, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                reply = httpx.post(f"{self._url}/v1/completions", json=BODY, timeout=PATIENCE)
                self.answers.append(reply.json()["choices"][0]["text"])
            except Exception as error:
                self.answers.append(error)

    def end(self) -> None:
        self._enough.set()
        self._thread.join(PATIENCE)

    def check(self) -> None:
        assert len(self.answers) > 5 and len(set(self.answers)) == 1, self.answers[-3:]


class Rolled:
    """Two servers, the second of which has taken the socket while the first has these clients.

    Steps of the first are slow until `hurry`.
    """

    def __init__(self, folder: Path, clients: Callable[[str], list[Leaver]]) -> None:
        self._slowly = folder / "slowly"
        self._slowly.touch()
        path = (str(Path(core_hook.__file__).parent), os.environ.get("PYTHONPATH", ""))
        self._env = {"PYTHONPATH": os.pathsep.join(path)}
        hook = ("--scheduler-cls", "core_hook:HookedPolicy")
        self._flags = (*flags(folder), *hook, "--handover-socket", str(folder / "door"))
        self._begin = clients

    def __enter__(self) -> Rolled:
        self.old = self.new = Server(*self._flags, env=self._env | {SLOWLY: str(self._slowly)})
        self.load, self.clients = Load(self.old.url), self._begin(self.old.url)
        for client in self.clients:
            wait_for(lambda c=client: len(c.events) > 20)
        self.new = Server(*self._flags, env=self._env)
        assert self.new.url == self.old.url
        wait_for(lambda: "has taken the listening socket over" in self.old.log)
        return self

    def __exit__(self, *_: object) -> None:
        self.load.end()
        for server in (self.old, self.new):
            kill(server)

    def hurry(self) -> None:
        self._slowly.unlink()


def check(clients: list[Leaver], url: str) -> None:
    """They have what the server says to the same requests, asked all at once."""
    for client in clients:
        client.join()
        assert client.is_done, (client.kind, client.status, client.said)
    seeded = [client.body | {"seed": client.seed()} for client in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        expected = list(pool.map(partial(whole, url), seeded))
    for client, choices in zip(clients, expected, strict=True):
        assert client.choices() == choices, client.body


def test_old_streams_end_and_new_ones_begin(tmp_path: Path) -> None:
    kinds = ["greedy", "unseeded", *KINDS]
    with Rolled(tmp_path, lambda url: [Leaver(url, kind) for kind in kinds]) as rolled:
        old, new, clients = rolled.old, rolled.new, rolled.clients
        staying, leaving = clients[:2], clients[2:]
        assert not any(client.is_done for client in clients)

        # What the old one still reads out to somebody is neither here nor unknown.
        where = f"{new.url}/v1/streams"
        asked = httpx.get(f"{where}/{staying[0].stream}", timeout=PATIENCE)
        assert asked.status_code == 503, (asked.text, new.log)
        assert asked.json()["error"]["code"] == "streams_returning"
        assert int(asked.headers["retry-after"]) == 1
        assert httpx.get(f"{where}/nobody-has-this", timeout=PATIENCE).status_code == 404
        key = {"Idempotency-Key": "new"}
        keyed = httpx.post(f"{new.url}/v1/completions", json=BODY, headers=key, timeout=PATIENCE)
        assert keyed.status_code == 200, keyed.text
        late = Leaver(new.url, "greedy")

        for client in leaving:
            client.leave()
            client.status = 0
            client.start(client.come_back, new.url)
        for client in leaving:
            wait_for(lambda c=client: c.status == 200)
        assert old.process.poll() is None, "they did not have to wait for its end"
        rolled.hurry()
        check([*clients, late], new.url)
        assert old.process.wait(PATIENCE) == 0
        # What the old one had is found at the new one afterwards, too.
        client = staying[0]
        said, client.events, client.last = client.choices(), [], ""
        client.come_back(new.url)
        assert client.choices() == said
        rolled.load.end()
        assert new.stop() == 0
    rolled.load.check()
    for server in (old, new):
        assert "Once upon" not in server.log and "Traceback" not in server.log


def test_an_old_server_that_is_killed_as_it_drains_leaves_everything(tmp_path: Path) -> None:
    with Rolled(tmp_path, lambda url: [Leaver(url, kind) for kind in KINDS]) as rolled:
        new, clients = rolled.new, rolled.clients
        early, others = clients[0], clients[1:]
        early.leave()
        early.status = 0
        early.start(early.come_back, new.url)
        wait_for(lambda: early.status == 200 and len(early.events) > 30)
        assert not any(client.is_done for client in others)
        # The old server may still answer the question that came as its socket was taken.
        answered = len(rolled.load.answers)
        wait_for(lambda: len(rolled.load.answers) > answered)
        kill(rolled.old)
        for client in others:
            client.join()
            assert not client.is_done
            client.start(client.come_back, new.url)
        check(clients, new.url)
        rolled.load.end()
        assert new.stop() == 0
    rolled.load.check()
    assert "Traceback" not in new.log
    left = {path.name for path in (tmp_path / "journal").iterdir()}
    assert len(left) <= 2, "what was taken over is gone"
