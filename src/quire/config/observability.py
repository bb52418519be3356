"""What the engine tells about itself, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Logs and statistics."""

    disable_log_stats: bool = False
    """No periodic stat line and no statistics. Default: on in `serve`, off in `LLM`."""
    enable_log_requests: bool = False
    """Log each request's id and parameters as it arrives (never its text)."""
    enable_logging_iteration_details: bool = False
    """Log one line per step: requests, tokens, time, KV usage."""
