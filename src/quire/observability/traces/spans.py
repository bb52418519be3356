"""Spans as plain records, ids, and the W3C trace context that callers send.

Times are seconds on the engine's monotonic clock; the exporter converts them to wall time. Knows no
OpenTelemetry and no engine.

Format of the headers: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_random: Final = random.Random(os.urandom(32))
"""Ids must differ but need not be secret, so this generator does: an id from the system's source
would cost a system call."""
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


class SpanId(NamedTuple):
    """Identity of a span, for others to point to."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""


class Event(NamedTuple):
    """A moment within a span."""

    name: str
    time: float
    attributes: Attributes


class Alike(msgspec.Struct, gc=False):
    """Attributes and links that many spans share, such as those of all tokens of one step. The
    writer can encode them once."""

    attributes: Attributes
    links: Sequence[SpanId]
    written: bytes = b""
    """Their encoding, kept here by the writer."""


class Span(msgspec.Struct, gc=False):
    """An operation with beginning and end, ready to be exported."""

    name: str
    id: SpanId
    parent: SpanId | None
    start: float
    end: float
    attributes: Attributes = {}
    links: Sequence[SpanId] = ()
    events: Sequence[Event] = ()
    is_server: bool = False
    """Whether it serves a request from outside."""
    error: str | None = None
    tracestate: str = ""
    alike: Alike | None = None
    """Further attributes and links, shared with other spans."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class RemoteParent(NamedTuple):
    """The caller's span, from the headers it sent."""

    id: SpanId
    sampled: bool
    """Whether the caller records its trace; if so, quire records its part."""
    tracestate: str


def new_trace_id() -> int:
    """A random trace id."""
    return _random.getrandbits(128) or 1


def new_span_id() -> int:
    """A random span id."""
    return _random.getrandbits(64) or 1


def child_of(parent: SpanId) -> SpanId:
    """An id in the parent's trace."""
    return SpanId(parent.trace_id, new_span_id())


def parse_traceparent(headers: Mapping[str, str] | None) -> RemoteParent | None:
    """The caller's span. `None` without a valid `traceparent`: the standard says to ignore an
    invalid one."""
    if not headers:
        return None
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Version 00 has exactly four parts; ff is forbidden; later ones may have more.
    if (
        version == "ff"
        or (version == "00" and rest)
        or not int(trace_id, 16)
        or not int(span_id, 16)
    ):
        return None
    identity = SpanId(int(trace_id, 16), int(span_id, 16))
    return RemoteParent(identity, bool(int(flags, 16) & 1), headers.get("tracestate", ""))


def is_chosen(trace_id: int, rate: float) -> bool:
    """Head sampling by the trace id, so that every service decides the same for one trace."""
    return (trace_id & (2**64 - 1)) < rate * 2**64
