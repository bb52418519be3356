"""OTLP receivers in memory, gRPC and HTTP: they keep the spans and metrics that reach them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from patience import wait_for


@dataclass
class SpanSeen:
    """A span as it arrived; times in seconds of wall time."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: float
    end: float
    attributes: dict[str, Any]
    links: list[tuple[bytes, bytes]]
    events: list[tuple[str, dict[str, Any]]]
    kind: int
    error: str | None
    state: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


@dataclass
class Seen:
    """All that arrived."""

    spans: list[SpanSeen] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    messages: int = 0

    def take_traces(self, request: Any) -> None:
        self.messages += 1
        for group in request.resource_spans:
            self.resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [self._span(span) for span in scope.spans]

    def _span(self, span: Any) -> SpanSeen:
        return SpanSeen(
            span.name,
            span.trace_id,
            span.span_id,
            span.parent_span_id,
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            _attributes(span.attributes),
            [(link.trace_id, link.span_id) for link in span.links],
            [(event.name, _attributes(event.attributes)) for event in span.events],
            span.kind,
            span.status.message if span.status.code == 2 else None,
            span.trace_state,
        )

    def take_metrics(self, request: Any) -> None:
        for group in request.resource_metrics:
            for scope in group.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[metric.name] = metric

    def named(self, name: str) -> list[SpanSeen]:
        return [span for span in self.spans if span.name == name]

    def only(self, name: str) -> SpanSeen:
        (span,) = self.named(name)
        return span

    def root(self, request_id: str) -> SpanSeen:
        (span,) = [
            s for s in self.named("llm_request") if s.attributes["gen_ai.request.id"] == request_id
        ]
        return span

    def children(self, parent: SpanSeen) -> list[SpanSeen]:
        """In order of time; what begins together, in the order sent."""
        found = [s for s in self.spans if (s.trace, s.parent) == (parent.trace, parent.id)]
        return sorted(found, key=lambda s: s.start)

    def wait(self, ready: Callable[[Seen], bool]) -> None:
        wait_for(lambda: ready(self), lambda: f"spans; there are {[s.name for s in self.spans]}")


class GrpcReceiver(
    trace_service_pb2_grpc.TraceServiceServicer,
    metrics_service_pb2_grpc.MetricsServiceServicer,
):
    """Serves both services on a free port."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.seen.take_traces(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(0).wait()


class HttpReceiver:
    """Serves /v1/traces and /v1/metrics on a free port."""

    def __init__(self) -> None:
        self.seen = seen = Seen()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    seen.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
                elif self.path == "/v1/metrics":
                    message = metrics_service_pb2.ExportMetricsServiceRequest
                    seen.take_metrics(message.FromString(body))
                self.send_response(200 if self.path.startswith("/v1/") else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self.metrics_endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
