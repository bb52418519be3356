"""Times of a request at the server, as a caller can know them for certain.

Both clocks are the same one of the system, but nobody knows how long words were under way: on a
busy machine for seconds. What holds on every machine is order. A question that was sent before
something happened, as its answer tells, was sent earlier; an answer that tells of something came
later. Two bounds follow for every span of time, and on a quiet machine they are near each other.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx

from patience import PATIENCE


@dataclass
class Moment:
    """When something happened, in seconds of the monotonic clock: not before, and not after."""

    earliest: float = -math.inf
    latest: float = math.inf

    def not_before(self, when: float) -> None:
        self.earliest = max(self.earliest, when)

    def not_after(self, when: float) -> None:
        self.latest = min(self.latest, when)


def span(start: Moment, end: Moment) -> tuple[float, float]:
    """The least and the most time from one to the other."""
    return max(0.0, end.earliest - start.latest), end.latest - start.earliest


@dataclass
class Life:
    """What is known of one request's arrival, first token and end."""

    arrived: Moment
    first_token: Moment
    ended: Moment

    @classmethod
    def unknown(cls) -> Life:
        return cls(Moment(), Moment(), Moment())

    @property
    def ttft(self) -> tuple[float, float]:
        return span(self.arrived, self.first_token)

    @property
    def whole(self) -> tuple[float, float]:
        return span(self.arrived, self.ended)

    @property
    def decode(self) -> tuple[float, float]:
        return span(self.first_token, self.ended)

    def asked(self, when: float) -> None:
        """The request is sent now."""
        for moment in (self.arrived, self.first_token, self.ended):
            moment.not_before(when)

    def answered(self, times: list[float]) -> None:
        """A stream has brought its tokens at these times."""
        self.arrived.not_after(times[0])
        self.first_token.not_after(times[0])
        self.ended.not_after(times[-1])

    def learn(self, told: dict[str, Any], sent: float, received: float) -> None:
        """An explanation was asked for and came: what was still to come happened after it was
        asked for, what had happened was before it came."""
        self.arrived.not_after(received)
        if told["ttft"] is None:
            self.first_token.not_before(sent)
        else:
            self.first_token.not_after(received)
        if told["state"] != "finished":
            self.ended.not_before(sent)
        else:
            self.ended.not_after(received)


class Witness:
    """Asks a server about its unfinished requests, again and again, on a thread."""

    def __init__(self, url: str) -> None:
        self.lives: dict[str, Life] = {}
        self._asked_about: set[str] = set()
        self._url = url
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def asked(self, name: str, closely: bool = True) -> Life:
        """A request is being sent under this `X-Request-Id`. If it is not watched closely, only the
        most that its times can be is known: the fewer questions, the nearer the bounds."""
        life = Life.unknown()
        life.asked(time.monotonic())
        self.lives[name] = life
        if closely:
            self._asked_about.add(name)
        return life

    def close(self) -> None:
        self._enough.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as client:
            while not self._enough.wait(0.02):
                sent = time.monotonic()
                # The core itself answers this, after all that it has said before: what the API
                # process does not know then has not happened at `sent`.
                client.post("/explain_prefix", json={"prompt": [5]}).raise_for_status()
                for name in list(self._asked_about):
                    self._ask(client, name, self.lives[name], sent)
                    if self.lives[name].ended.latest < math.inf:
                        self._asked_about.discard(name)

    def _ask(self, client: httpx.Client, name: str, life: Life, sent: float) -> None:
        reply = client.get(f"/v1/requests/{name}/explain")
        if reply.status_code == 200:
            life.learn(reply.json()["completions"][0], sent, time.monotonic())
