"""What the engine tells about itself, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Logs and statistics."""

    disable_log_stats: bool = False
    """No periodic stat line and no statistics. Default: on in `serve`, off in `LLM`."""
    enable_log_requests: bool = False
    """Log each request's id and parameters as it arrives, and its end if it is aborted. Its text is
    shown only at `QUIRE_LOGGING_LEVEL=DEBUG`."""
    max_log_len: int | None = None
    """Most characters of a prompt, and most of its token ids, in such a line. Default: no limit."""
    enable_logging_iteration_details: bool = False
    """Log one line per step: requests, tokens, time, KV usage."""
    record_steps: int = 4096
    """Steps of which records are kept in memory, about 1 KiB each, for `quire explain`, `timeline`,
    `top` and `doctor`; 0 keeps none."""

    def __post_init__(self) -> None:
        if not 0 <= self.record_steps <= 1_000_000:
            raise ConfigError(f"--record-steps must be from 0 to 1000000, got {self.record_steps}")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must be at least 0, got {self.max_log_len}")
