"""What a front end tells the tracer: which requests came in, with which parameters and parent.

`make_tracer` is the only place that loads the OpenTelemetry door, and only if an endpoint is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from quire.config import EngineConfig
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.listeners import AcceptedRequest, AnyParams, Listener, RefusedRequest
from quire.errors import ConfigError, QuireError
from quire.observability.traces.builder import TraceBuilder, TracedRequest
from quire.observability.traces.spans import Attributes, parse_traceparent
from quire.observability.traces.tracer import PhaseLog, Tracer
from quire.params import SamplingParams
from quire.utils.timing import Clock

OPERATIONS = {"generate": "text_completion", "pooling": "embeddings"}
"""`gen_ai.operation.name` by what the model is run for."""


def make_tracer(
    config: EngineConfig, clock: Clock, on_dropped: Callable[[int], None]
) -> Tracer | None:
    """A tracer, if `--otlp-traces-endpoint` is set.

    Raises:
        ConfigError: the extra is not installed, or an environment variable is bad.
    """
    observability = config.observability
    if observability.otlp_traces_endpoint is None:
        return None
    try:
        from quire.observability.traces.otel import OtlpExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): "
            "pip install 'quire[otel]'"
        ) from None
    from quire.version import __version__

    offset = time.time_ns() - int(clock.now() * 1e9)
    exporter = OtlpExporter(
        observability.otlp_traces_endpoint,
        observability.otlp_metrics_endpoint,
        offset,
        _about_model(config),
        __version__,
    )
    builder = TraceBuilder(observability.trace_decode_steps, observability.trace_sampling_rate)
    return Tracer(exporter, builder, on_dropped, clock)


def _about_model(config: EngineConfig) -> dict[str, str]:
    model = config.model
    return {
        "gen_ai.operation.name": OPERATIONS.get(model.runner, "text_completion"),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": model.names[0],
    }


def describe(
    config: EngineConfig,
    request_id: str,
    internal_ids: tuple[str, ...],
    arrival: float,
    params: AnyParams,
    trace_headers: Mapping[str, str] | None,
) -> TracedRequest:
    """A request as the tracer wants it. Cheap: it runs where requests are accepted."""
    about: Attributes = {**_about_model(config), "gen_ai.request.id": request_id}
    about["gen_ai.response.model"] = config.model.names[0]
    if isinstance(params, CheckedParams):
        params = params.params
    if isinstance(params, SamplingParams):
        about |= _sampling(params)
    parent = parse_traceparent(trace_headers)
    return TracedRequest(request_id, internal_ids, arrival, about, parent)


def _sampling(params: SamplingParams) -> Attributes:
    values: dict[str, Any] = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed if (params.seed or 0) < 2**63 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    return {name: value for name, value in values.items() if value is not None}


class Tracing(Listener):
    """Tells the tracer which requests come in, are refused, or end with the engine. What steps do
    it hears as a sink of statistics.

    Args:
        tracer: Makes and sends the spans.
        config: Resolved.
        clock: The engine's.
    """

    def __init__(self, tracer: Tracer, config: EngineConfig, clock: Clock) -> None:
        self.tracer = tracer
        self._config = config
        self._clock = clock

    def accepted(self, accepted: AcceptedRequest) -> None:
        """A trace begins, before the core has the request."""
        first = accepted.requests[0]
        ids = tuple(request.request_id for request in accepted.requests)
        about = describe(
            self._config,
            first.external_id,
            ids,
            first.arrival_time,
            accepted.params,
            accepted.trace_headers,
        )
        self.tracer.accept(about)

    def refused(self, refused: RefusedRequest) -> None:
        """A trace of nothing but a refusal."""
        about = describe(
            self._config,
            refused.request_id,
            (),
            refused.arrival,
            refused.params,
            refused.trace_headers,
        )
        self.tracer.refuse(about, self._clock.now(), refused.error)

    def failed(self, error: QuireError) -> None:
        """All open traces end."""
        self.tracer.end_all(self._clock.now(), error)

    def started(self, phases: PhaseLog, info: Mapping[str, Any]) -> None:
        """The engine is ready.

        Args:
            phases: Of its start.
            info: What the executor says of itself.
        """
        about = {f"quire.{name}": info[name] for name in ("device", "dtype", "num_blocks")}
        self.tracer.started(phases.phases(self._clock.now()), about)
