"""What the HTTP side counts: requests, their durations and sizes, under the names that the common
instrumentation of Python servers uses.

Each metric is a row of `HTTP_METRICS`; `prometheus.py` prints the values. Knows no HTTP library:
the server reports each request when it is over. The label `handler` is the route as written in the
server's table, never a path, and all unknown methods share one label, so callers cannot create new
series.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from quire.observability.metrics.store import Bins, Counter, Gauge, Histogram, Sample, Summary
from quire.observability.metrics.table import MetricKind

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE: Final = "none"
"""Handler label of requests that matched no route."""
CLIENT_GONE: Final = 499
"""Status counted for a client that disconnected before it got one."""

# fmt: off
DURATION_BUCKETS: Final = (0.1, 0.5, 1.0)
FINE_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class HttpMetric:
    """One row."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS: Final = HttpMetric(
    "http_requests",
    MetricKind.COUNTER,
    "HTTP requests by method, status and route.",
    ("method", "status", "handler"),
)
REQUEST_SIZE: Final = HttpMetric(
    "http_request_size_bytes", MetricKind.SUMMARY, "Bytes of the bodies that came in.", ("handler",)
)
RESPONSE_SIZE: Final = HttpMetric(
    "http_response_size_bytes",
    MetricKind.SUMMARY,
    "Bytes of the bodies that went out.",
    ("handler",),
)
FINE_DURATION: Final = HttpMetric(
    "http_request_duration_highr_seconds",
    MetricKind.HISTOGRAM,
    "From a request's headers to the end of its reply, in many buckets.",
    buckets=FINE_BUCKETS,
)
DURATION: Final = HttpMetric(
    "http_request_duration_seconds",
    MetricKind.HISTOGRAM,
    "From a request's headers to the end of its reply, by method and route.",
    ("method", "handler"),
    DURATION_BUCKETS,
)
UNAVAILABLE: Final = HttpMetric(
    "quire:http_unavailable",
    MetricKind.COUNTER,
    "Requests answered 503, by the code of the error, such as `engine_loading` or `shutting_down`. "
    "Streams that a drain cuts short are not among them: their status was 200.",
    ("code",),
)
KEPT_STREAMS: Final = HttpMetric(
    "quire:kept_streams",
    MetricKind.GAUGE,
    "Replies that can be resumed, by whether they are still `running` or have `ended`.",
    ("state",),
)
KEPT_BYTES: Final = HttpMetric(
    "quire:kept_stream_bytes", MetricKind.GAUGE, "Bytes of these replies."
)
RESUMES: Final = HttpMetric(
    "quire:stream_resumes",
    MetricKind.COUNTER,
    "Connections that read a kept reply, by how they named it: `id` (GET /v1/streams), "
    "`last_event_id` (the request sent again), `idempotency_key`.",
    ("by",),
)
DROPPED_STREAMS: Final = HttpMetric(
    "quire:kept_streams_dropped",
    MetricKind.COUNTER,
    "Kept replies that were forgotten: their time was over (`expired`), there were too many "
    "(`count`), or they were too large (`bytes`).",
    ("reason",),
)
WRITE_TIMEOUTS: Final = HttpMetric(
    "quire:write_timeouts",
    MetricKind.COUNTER,
    "Connections that were closed because their client took nothing for `--write-timeout`.",
)
JOURNAL_UP: Final = HttpMetric(
    "quire:journal_up",
    MetricKind.GAUGE,
    "1 while the journal on disk (--journal-dir) can be written; 0: requests would not outlive "
    "this process.",
)
JOURNAL_BYTES: Final = HttpMetric(
    "quire:journal_bytes", MetricKind.GAUGE, "Size of the journal on disk."
)
JOURNAL_FAILURES: Final = HttpMetric(
    "quire:journal_failures",
    MetricKind.COUNTER,
    "Writes to the journal on disk that failed.",
)
KEY_REQUESTS: Final = HttpMetric(
    "quire:key_requests",
    MetricKind.COUNTER,
    "Requests for work by the key's name and what became of them: `completed`, `limited` (by a "
    "limit of the key), `refused` (no room in the server), `invalid`, `failed`, `disconnected`. "
    "`other` is for keys of the command line, and those beyond 100.",
    ("key", "outcome"),
)
KEY_LIMITED: Final = HttpMetric(
    "quire:key_limited",
    MetricKind.COUNTER,
    "Requests that a limit of their key refused, by the key's name and the limit.",
    ("key", "limit"),
)
KEY_TOKENS: Final = HttpMetric(
    "quire:key_tokens",
    MetricKind.COUNTER,
    "Tokens by the key's name and kind: those of a `prompt`, of these the `cached` ones, and the "
    "`generated` ones.",
    ("key", "kind"),
)
KEY_RUNNING: Final = HttpMetric(
    "quire:key_requests_running",
    MetricKind.GAUGE,
    "Requests for work that are being answered, by the key's name.",
    ("key",),
)
KEY_WAITING: Final = HttpMetric(
    "quire:key_completions_waiting",
    MetricKind.GAUGE,
    "Completions without output yet, by the key's name.",
    ("key",),
)
HTTP_METRICS: Final = (
    REQUESTS, REQUEST_SIZE, RESPONSE_SIZE, FINE_DURATION, DURATION, UNAVAILABLE, KEPT_STREAMS,
    KEPT_BYTES, RESUMES, DROPPED_STREAMS, WRITE_TIMEOUTS, JOURNAL_UP, JOURNAL_BYTES,
    JOURNAL_FAILURES, KEY_REQUESTS, KEY_LIMITED, KEY_TOKENS, KEY_RUNNING, KEY_WAITING,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptNow:
    """Kept replies at a moment."""

    running: int = 0
    ended: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class KeyNow:
    """What the keys of one label have used up to a moment."""

    label: str
    running: int = 0
    waiting: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    limited: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


class JournalNow(Protocol):
    """The journal on disk at a moment."""

    works: bool
    num_bytes: int
    num_failures: int


class HttpMetrics:
    """The values. Written on the event loop, read on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, str], int] = {}
        self._sizes: dict[str, dict[str, tuple[int, int]]] = {
            REQUEST_SIZE.name: {},
            RESPONSE_SIZE.name: {},
        }
        self._fine = Bins(FINE_BUCKETS)
        self._durations: dict[tuple[str, str], Bins] = {}
        self._unavailable: dict[str, int] = {}
        self._resumes: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._write_timeouts = 0
        self.journal_now: Callable[[], JournalNow] | None = None
        """Asked for the journal on disk, if there is one."""
        self.kept_now: Callable[[], KeptNow] = KeptNow
        """Asked for what is kept now."""
        self.keys_now: Callable[[], Iterable[KeyNow]] = tuple
        """Asked for what keys have used."""

    def observe(
        self,
        handler: str,
        method: str,
        status: int | None,
        seconds: float,
        bytes_in: int,
        bytes_out: int,
    ) -> None:
        """Count a request that is over.

        Args:
            handler: The route, or `NO_ROUTE`.
            method: As sent.
            status: Of the reply; `None` if the client disconnected before it began.
            seconds: From its headers to the end of its reply.
            bytes_in: Body bytes that were read.
            bytes_out: Body bytes that were sent.
        """
        known = method if method in METHODS else "other"
        group = f"{(status or CLIENT_GONE) // 100}xx"
        with self._lock:
            key = (known, group, handler)
            self._requests[key] = self._requests.get(key, 0) + 1
            for row, size in ((REQUEST_SIZE, bytes_in), (RESPONSE_SIZE, bytes_out)):
                count, total = self._sizes[row.name].get(handler, (0, 0))
                self._sizes[row.name][handler] = count + 1, total + size
            self._fine.observe((seconds,))
            self._durations.setdefault((known, handler), Bins(DURATION_BUCKETS)).observe((seconds,))

    def observe_unavailable(self, code: str) -> None:
        """Count a request that was answered 503 with this code. Codes are a closed set."""
        with self._lock:
            self._unavailable[code] = self._unavailable.get(code, 0) + 1

    def count_resume(self, by: str) -> None:
        """Count a connection that reads a kept reply."""
        with self._lock:
            self._resumes[by] = self._resumes.get(by, 0) + 1

    def count_dropped_stream(self, reason: str) -> None:
        """Count a kept reply that was forgotten."""
        with self._lock:
            self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def count_write_timeout(self) -> None:
        """Count a connection whose client took nothing for too long."""
        with self._lock:
            self._write_timeouts += 1

    def snapshot(self) -> list[Sample]:
        """All values, consistent with one another."""
        with self._lock:
            return list(self._samples())

    def _samples(self) -> Iterator[Sample]:
        for labelled, count in self._requests.items():
            yield Counter(REQUESTS.name, dict(zip(REQUESTS.labels, labelled, strict=True)), count)
        for name, sizes in self._sizes.items():
            for handler, (count, total) in sizes.items():
                yield Summary(name, {"handler": handler}, count, total)
        yield _histogram(FINE_DURATION, (), self._fine)
        for code, count in self._unavailable.items():
            yield Counter(UNAVAILABLE.name, {"code": code}, count)
        kept = self.kept_now()
        yield Gauge(KEPT_STREAMS.name, {"state": "running"}, kept.running)
        yield Gauge(KEPT_STREAMS.name, {"state": "ended"}, kept.ended)
        yield Gauge(KEPT_BYTES.name, {}, kept.num_bytes)
        if self.journal_now is not None:
            journal = self.journal_now()
            yield Gauge(JOURNAL_UP.name, {}, int(journal.works))
            yield Gauge(JOURNAL_BYTES.name, {}, journal.num_bytes)
            yield Counter(JOURNAL_FAILURES.name, {}, journal.num_failures)
        for row, counts in ((RESUMES, self._resumes), (DROPPED_STREAMS, self._dropped)):
            for label, count in counts.items():
                yield Counter(row.name, {row.labels[0]: label}, count)
        yield Counter(WRITE_TIMEOUTS.name, {}, self._write_timeouts)
        for key in self.keys_now():
            yield from _key_samples(key)
        for labels, bins in self._durations.items():
            yield _histogram(DURATION, labels, bins)


def _key_samples(key: KeyNow) -> Iterator[Sample]:
    for row, counts in (
        (KEY_REQUESTS, key.requests), (KEY_LIMITED, key.limited), (KEY_TOKENS, key.tokens)
    ):  # fmt: skip
        for name, count in counts.items():
            yield Counter(row.name, {"key": key.label, row.labels[1]: name}, count)
    yield Gauge(KEY_RUNNING.name, {"key": key.label}, key.running)
    yield Gauge(KEY_WAITING.name, {"key": key.label}, key.waiting)


def _histogram(row: HttpMetric, labels: tuple[str, ...], bins: Bins) -> Histogram:
    counts = bins.cumulative()
    named = dict(zip(row.labels, labels, strict=True))
    return Histogram(row.name, named, counts["+Inf"], bins.total, counts)
