"""Sends spans and request metrics over OTLP. The only module that imports `opentelemetry`; extra
`[otel]`.

Uses gRPC or HTTP. The standard's environment variables apply (headers, timeout, certificates,
`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`). Knows no engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.core.stats import FinishedRequestStats
from quire.errors import ConfigError
from quire.observability.traces.otlp_wire import request_bytes, span_bytes
from quire.observability.traces.spans import Span, Value

SCOPE: Final = "quire"
DURATION: Final = "gen_ai.server.request.duration"
FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
PER_TOKEN: Final = "gen_ai.server.time_per_output_token"
# Bounds: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/.
BUCKETS: Final = {
    DURATION: [0.01 * 2**i for i in range(14)],
    FIRST_TOKEN: [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ],
    PER_TOKEN: [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
}  # fmt: skip
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PROTOCOLS: Final = {"grpc": "grpc", "http/protobuf": "http"}


def protocol(endpoint: str, signal: str = "TRACES") -> str:
    """`grpc` or `http`, as the standard's variables say; without them, by the endpoint's port and
    path.

    Raises:
        ConfigError: a variable has another value.
    """
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = os.environ.get(name)
        if value:
            if value not in _PROTOCOLS:
                allowed = " or ".join(_PROTOCOLS)
                raise ConfigError(f"{name} must be {allowed}, got {value!r}", param=name)
            return _PROTOCOLS[value]
    parts = urlsplit(endpoint)
    return "http" if parts.port == 4318 or parts.path.strip("/") else "grpc"


def _address(endpoint: str, kind: str, path: str) -> str:
    """An HTTP endpoint without a path gets the standard's path."""
    if kind == "http" and not urlsplit(endpoint).path.strip("/"):
        return f"{endpoint.rstrip('/')}/v1/{path}"
    return endpoint


class OtlpExporter:
    """Sends spans, and metrics of requests if they have an endpoint.

    Args:
        endpoint: Where spans go.
        metrics_endpoint: Where metrics go; `None`: they are not sent.
        wall_offset: Nanoseconds to add to the engine's clock to get wall time. It is fixed once, so
            that spans of one trace never shift against one another.
        about: Attributes of every metric: operation, provider, model.

    Raises:
        ConfigError: an environment variable is bad.
    """

    def __init__(
        self,
        endpoint: str,
        metrics_endpoint: str | None,
        wall_offset: int,
        about: dict[str, str],
        version: str,
    ) -> None:
        # One warning about lost spans is ours; the library would write one for every try.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._offset = wall_offset
        name = os.environ.get("OTEL_SERVICE_NAME") or "quire"
        self._resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: version})
        self._about = {key: _value(v) for key, v in self._resource.attributes.items()}
        self._scope = SCOPE, version
        kind = protocol(endpoint)
        self._spans = _span_exporter(kind)(endpoint=_address(endpoint, kind, "traces"))
        self._metrics = (
            _Metrics(metrics_endpoint, self._resource, about) if metrics_endpoint else None
        )

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans; False if the endpoint did not accept them."""
        made = [span_bytes(span, self._offset) for span in spans]
        message = request_bytes(made, self._about, self._scope)
        return bool(self._spans.export(message) is SpanExportResult.SUCCESS)

    def finished(self, ended: FinishedRequestStats) -> None:
        """Count a completion in the metrics."""
        if self._metrics is not None:
            self._metrics.finished(ended)

    def close(self) -> None:
        """Stop at once, abandoning an attempt that is under way."""
        self._spans.shutdown()
        if self._metrics is not None:
            self._metrics.close()


def _value(value: object) -> Value:
    """An attribute of the resource, as text: `OTEL_RESOURCE_ATTRIBUTES` knows no other type."""
    if isinstance(value, (str, bool, int, float)):
        return value
    return tuple(map(str, value)) if isinstance(value, Sequence) else str(value)


def _span_exporter(kind: str) -> Any:
    """The library's exporter, used for connections, headers, certificates and retries. It is given
    messages that are already encoded, because that costs a tenth of encoding the library's own
    spans."""
    return _grpc_exporter() if kind == "grpc" else _http_exporter()


def _grpc_exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    class Stub:
        """The service, taking bytes."""

        def __init__(self, channel: Any) -> None:
            self.Export = channel.unary_unary(_EXPORT)

    class Exporter(OTLPSpanExporter):
        def _initialize_channel_and_stub(self) -> None:
            super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
            self._client: Any = Stub(self._channel)

        def _translate_data(self, data: Any) -> Any:
            return data

        def _count_data(self, data: Any) -> int:
            return 1

    return Exporter


def _http_exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            if self._shutdown:
                return SpanExportResult.FAILURE
            sent = self._client.export(spans).success
            return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    return Exporter


class _Metrics:
    """The server metrics that OpenTelemetry's conventions for generative models define."""

    def __init__(self, endpoint: str, resource: Resource, about: dict[str, str]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._about = about
        kind = protocol(endpoint, "METRICS")
        reader = PeriodicExportingMetricReader(
            _metric_exporter(kind)(endpoint=_address(endpoint, kind, "metrics"))
        )
        # Without its own exit hook: it would wait for an endpoint that is not there.
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(SCOPE)
        self._histograms = {
            name: meter.create_histogram(name, unit="s", explicit_bucket_boundaries_advisory=bounds)
            for name, bounds in BUCKETS.items()
        }

    def finished(self, ended: FinishedRequestStats) -> None:
        """One completion has ended."""
        about = dict(self._about)
        if ended.finish_reason in ("abort", "error"):
            about["error.type"] = ended.finish_reason
        self._histograms[DURATION].record(ended.e2e_time, about)
        if ended.first_token_ts:
            waited = ended.e2e_time - (ended.finished_ts - ended.first_token_ts)
            self._histograms[FIRST_TOKEN].record(max(0.0, waited), about)
        if ended.num_generation_tokens > 1:
            seconds = ended.decode_time / (ended.num_generation_tokens - 1)
            self._histograms[PER_TOKEN].record(seconds, about)

    def close(self) -> None:
        """Send the last values, for at most a second."""
        try:
            self._provider.shutdown(timeout_millis=1000)
        except Exception as error:
            logging.getLogger(__name__).debug("metrics could not be sent", exc_info=error)


def _metric_exporter(kind: str) -> Any:
    if kind == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
        OTLPMetricExporter as HttpExporter,
    )

    return HttpExporter
