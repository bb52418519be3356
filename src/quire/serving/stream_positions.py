"""Ids of the events of a stream: each says how much of the output its reader has.

An id is `STREAM:PLACE.EVENT`. A *unit* is what one engine output adds to one choice, and `PLACE`
names the unit that the event belongs to:

| place | unit |
|---|---|
| `17~1` | the only choice had 17 tokens; the unit adds one |
| `17~0f` | it adds none and ends the choice |
| `9,8*2,12f/1~3` | choice 0 had 9 tokens, 1 and 2 had 8, 3 had ended with 12; 1 gets 3 more |
| `begin` | before any output |
| `end` | after all of it: usage, `[DONE]`, an error |

`EVENT` counts the events of the unit from 1. Text, logprobs and whatever parsers make of them are
functions of a choice's tokens, not of how these were grouped. So a place means the same in every
rendering of the same tokens: render all tokens before the unit, then the unit, drop its first
`EVENT` events, and what follows is the rest. It makes no difference that a slow reader's tokens
were merged: the id names the merged unit. Events that depend on time, such as keep-alives, must be
comments, which have no id.

An id has only characters that stand in a URL and in a header as they are.

Knows no HTTP and no engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Final

_PLACE: Final = re.compile(
    r"(?:(?P<stage>begin|end)"
    r"|(?P<before>\d+f?(?:\*\d+)?(?:,\d+f?(?:\*\d+)?)*)(?:/(?P<choice>\d+))?"
    r"~(?P<tokens>\d+)(?P<ends>f?))\.(?P<event>\d+)"
)
MAX_ID: Final = 16 * 1024
"""Longest id, in bytes: a thousand choices that all stand elsewhere."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place as read from an id, and how many of its events were read."""

    stage: str
    """`begin`, `unit` or `end`; the fields below but the last belong to `unit`."""
    before: tuple[int, ...] = ()
    """Tokens of each choice before the unit."""
    ended: frozenset[int] = frozenset()
    """Choices that had ended before it."""
    choice: int = 0
    """The unit's."""
    tokens: int = 0
    """How many the unit adds."""
    ends: bool = False
    """Whether the choice ends with it."""
    event: int = 0
    """Events of the unit that were read."""

    @classmethod
    def read(cls, place: str) -> Position | None:
        """What stands after the colon of an id; `None` if it is not such a text."""
        found = _PLACE.fullmatch(place)
        if found is None:
            return None
        event = int(found["event"])
        if found["stage"]:
            return cls(found["stage"], event=event)
        before: list[int] = []
        ended: set[int] = set()
        for run in found["before"].split(","):
            spelled, _, times = run.partition("*")
            for _ in range(min(int(times or 1), MAX_ID)):
                if spelled.endswith("f"):
                    ended.add(len(before))
                before.append(int(spelled.removesuffix("f")))
        return cls(
            "unit",
            tuple(before),
            frozenset(ended),
            int(found["choice"] or 0),
            int(found["tokens"]),
            bool(found["ends"]),
            event,
        )


class EventIds:
    """Names the events of one stream as they are rendered.

    Args:
        stream_id: Of the stream; visible ASCII without a colon.
    """

    def __init__(self, stream_id: str) -> None:
        self._stream = stream_id.encode("ascii")
        self._counts: list[int] = []
        self._spelled: list[bytes] = []
        # of each choice, what `before` says
        self._unit = self._stream + b":begin."
        self._event = 0

    def begin(self, num_choices: int) -> None:
        """The number of choices is known; nothing has been generated."""
        self._counts = [0] * num_choices
        self._spelled = [b"0"] * num_choices

    def enter(self, choice: int, num_tokens: int, ends: bool) -> None:
        """What is rendered from now on belongs to this unit."""
        end, spelled = b"f" if ends else b"", self._spelled
        if len(spelled) == 1:
            self._unit = b"%b:%b~%d%b." % (self._stream, spelled[0], num_tokens, end)
        else:
            place = (self._stream, _runs(spelled), choice, num_tokens, end)
            self._unit = b"%b:%b/%d~%d%b." % place
        self._counts[choice] += num_tokens
        spelled[choice] = b"%d%b" % (self._counts[choice], end)
        self._event = 0

    def enter_end(self) -> None:
        """What is rendered from now on comes after all output."""
        unit = self._stream + b":end."
        if self._unit != unit:
            self._unit, self._event = unit, 0

    def attach(self, frames: bytes) -> bytes:
        """Server-sent events, each with its id. The id comes after the data: a client that takes
        it line by line and loses the connection in between has the event."""
        last = len(frames) - 2
        at = frames.find(b"\n\n")
        if at == last and not frames.startswith(b":"):  # one event
            self._event += 1
            return b"%b\nid: %b%d\n\n" % (frames[:last], self._unit, self._event)
        return b"".join([self._named(event) for event in frames.split(b"\n\n") if event])

    def _named(self, event: bytes) -> bytes:
        if event.startswith(b":"):  # a comment
            return event + b"\n\n"
        self._event += 1
        return b"%b\nid: %b%d\n\n" % (event, self._unit, self._event)


def _runs(spelled: list[bytes]) -> bytes:
    """Equal neighbours as one: choices mostly go in step."""
    runs = []
    for value, same in groupby(spelled):
        times = sum(1 for _ in same)
        runs.append(value if times == 1 else b"%b*%d" % (value, times))
    return b",".join(runs)
