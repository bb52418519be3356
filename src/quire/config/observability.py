"""What the engine reports about itself, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.bounds import check_section
from quire.errors import ConfigError

DECODE_STEPS = ("all", "slow", "none")
DETAILS = ("model", "worker", "all")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Logs and statistics."""

    disable_log_stats: bool = False
    """No periodic stat line and no statistics. Default: on in `serve`, off in `LLM`."""
    enable_log_requests: bool = False
    """Log each request's id and parameters as it arrives, and its end if it is aborted. Its text is
    shown only at `QUIRE_LOGGING_LEVEL=DEBUG`."""
    max_log_len: int | None = None
    """Largest number of characters of a prompt, and of its token ids, in such a line. Default: no
    limit."""
    enable_logging_iteration_details: bool = False
    """Log one line per step: requests, tokens, time, KV usage."""
    record_steps: int = 4096
    """Number of steps whose records are kept in memory, about 2 KiB each, for `quire explain`,
    `timeline`, `top` and `doctor`; 0 keeps none."""
    otlp_traces_endpoint: str | None = None
    """Where to send OpenTelemetry traces, e.g. `http://localhost:4317`; needs `pip install
    'quire[otel]'`. Sent over gRPC, or over HTTP if `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` is
    `http/protobuf`, the port is 4318 or the endpoint has a path. See docs/tracing.md."""
    collect_detailed_traces: list[str] = field(default_factory=list)
    """What traces show besides the phases of a step: `model` (each layer, with attention and MLP;
    layers then run one by one, which is slower), `worker` (the worker's own time), `all`. Several
    may be joined by commas. Only with `--otlp-traces-endpoint`."""
    otlp_metrics_endpoint: str | None = None
    """Where to send OpenTelemetry's server metrics for generative models; only with
    `--otlp-traces-endpoint`."""
    trace_decode_steps: str = "all"
    """Which decode steps get a span of their own: `all` (up to 1000 of a request), `slow` (slower
    than 95 % of their neighbours) or `none`; the others are combined into one span per run of
    steps."""
    trace_sampling_rate: float = 1.0
    """Share of requests that are traced, 0 to 1. If a request has a `traceparent` header, its
    sampled flag decides instead."""
    profiler_config: dict[str, Any] = field(default_factory=dict)
    """Profiler for `/start_profile` and `LLM.start_profile()`, e.g. `{"profiler": "torch",
    "torch_profiler_dir": "/traces"}`. Without it, traces go to `QUIRE_TORCH_PROFILER_DIR`. See
    docs/tracing.md."""
    kv_cache_metrics: bool = False
    """Measure how long KV blocks stay cached, how long they are idle before eviction, and how long
    until they are used again: the metrics `vllm:kv_block_*_seconds`."""
    kv_cache_metrics_sample: float = 0.01
    """Share of KV blocks that `--kv-cache-metrics` follows, above 0 and at most 1."""
    record: str | None = None
    """File into which to record when requests come, their lengths and parameters, which beginnings
    they share (as salted hashes) and what every step decides, for `quire simulate`, `calibrate`,
    `tune` and `replay`. No text, unless `--record-text`. See docs/simulator.md."""
    record_text: bool = False
    """Write prompts and token ids into the file of `--record`, too."""
    tensorboard_dir: str | None = None
    """Folder into which to write throughput, latency and queue for TensorBoard."""

    def __post_init__(self) -> None:
        check_section(self)
        if self.trace_decode_steps not in DECODE_STEPS:
            raise ConfigError(
                f"--trace-decode-steps must be one of {', '.join(DECODE_STEPS)}, got "
                f"{self.trace_decode_steps!r}"
            )
        if self.kv_cache_metrics and self.disable_log_stats:
            raise ConfigError("--kv-cache-metrics needs statistics: leave --disable-log-stats out")
        if self.record_text and self.record is None:
            raise ConfigError("--record-text needs --record FILE, too")
        for name in ("otlp_traces_endpoint", "otlp_metrics_endpoint"):
            _check_endpoint("--" + name.replace("_", "-"), getattr(self, name))
        if unknown := {*self._detailed} - {*DETAILS}:
            raise ConfigError(
                f"--collect-detailed-traces must be of {', '.join(DETAILS)}, got {min(unknown)!r}"
            )
        if self._detailed and not self.otlp_traces_endpoint:
            raise ConfigError("--collect-detailed-traces needs --otlp-traces-endpoint, too")
        if self.otlp_metrics_endpoint and not self.otlp_traces_endpoint:
            raise ConfigError("--otlp-metrics-endpoint needs --otlp-traces-endpoint, too")

    @property
    def _detailed(self) -> list[str]:
        given = self.collect_detailed_traces
        return ",".join(given).split(",") if given else []

    @property
    def traces_layers(self) -> bool:
        """Whether traces show each layer."""
        return bool({"model", "all"} & {*self._detailed})

    @property
    def traces_worker(self) -> bool:
        """Whether traces show the worker's own time."""
        return bool({"worker", "all"} & {*self._detailed})


def _check_endpoint(flag: str, value: str | None) -> None:
    if value is None:
        return
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} must be like http://localhost:4317, got {value!r}")
