"""What the frontends tell the tracer: which requests came in, under which parameters and parent.

`make_tracer` is the only place that loads the OpenTelemetry door, and only if an endpoint is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.config import EngineConfig
from quire.engine.frontend.checked import CheckedParams
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, QuireError
from quire.observability.traces.builder import TraceBuilder, TracedRequest
from quire.observability.traces.spans import Attributes, parse_traceparent
from quire.observability.traces.tracer import PhaseLog, Tracer
from quire.params import PoolingParams, SamplingParams
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
    params: SamplingParams | PoolingParams | CheckedParams,
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


class Tracing:
    """A frontend's words to the tracer; silent if there is none.

    Args:
        config: Resolved.
        clock: The engine's.
        on_dropped: Told how many spans were lost.
        phases: Of the start.

    Raises:
        ConfigError: see `make_tracer`.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        on_dropped: Callable[[int], None],
        phases: PhaseLog,
    ) -> None:
        self.tracer = make_tracer(config, clock, on_dropped)
        self._config = config
        self._clock = clock
        self._phases = phases

    def accept(
        self,
        requests: Sequence[EngineCoreRequest],
        params: SamplingParams | PoolingParams | CheckedParams,
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        """A request was taken in. To be told before the core gets it."""
        if self.tracer is not None:
            first, ids = requests[0], tuple(request.request_id for request in requests)
            arrival = first.arrival_time
            self.tracer.accept(
                describe(self._config, first.external_id, ids, arrival, params, trace_headers)
            )

    @contextmanager
    def refusals(
        self,
        request_id: str,
        params: SamplingParams | PoolingParams | CheckedParams,
        trace_headers: Mapping[str, str] | None,
    ) -> Iterator[float]:
        """Gives the time of arrival; an error inside is a refusal."""
        arrival = self._clock.now()
        try:
            yield arrival
        except QuireError as error:
            if self.tracer is not None:
                refused = describe(self._config, request_id, (), arrival, params, trace_headers)
                self.tracer.refuse(refused, self._clock.now(), error)
            raise

    def started(self, info: Mapping[str, Any]) -> None:
        """The engine is ready. `info`: what the executor says of itself."""
        if self.tracer is not None:
            about = {f"quire.{name}": info[name] for name in ("device", "dtype", "num_blocks")}
            self.tracer.started(self._phases.phases(self._clock.now()), about)

    def end_all(self, error: BaseException) -> None:
        """The engine is gone."""
        if self.tracer is not None:
            self.tracer.end_all(self._clock.now(), error)
