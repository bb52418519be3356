"""What the log says of requests, and that it says no more than was asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.observability import ObservabilityConfig
from quire.engine.frontend.listeners import AcceptedRequest
from quire.engine.frontend.request_log import RequestLog
from quire.errors import ConfigError
from quire.params import SamplingParams

SECRET = "a\nsecret"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def lines_of(level: int, text: str | None = SECRET, **options: Any) -> list[str]:
    logger, lines = logging.Logger("test", level), Lines()
    logger.addHandler(lines)
    log = RequestLog(ObservabilityConfig(**options), lambda ids: f"<{ids}>", logger)
    processed: Any = SimpleNamespace(
        prompt_text=text,
        requests=[SimpleNamespace(prompt_token_ids=[7, 8, 9])],
        params=SamplingParams(max_tokens=3),
    )
    log.accepted(AcceptedRequest("r1", processed, processed.params, None))
    log.aborted("r1")
    return lines.lines


def test_nothing_unless_asked() -> None:
    assert lines_of(logging.INFO) == []
    assert lines_of(logging.DEBUG) == ["DEBUG Aborted request(s) r1."]


def test_never_the_text_at_info() -> None:
    received, aborted = lines_of(logging.INFO, enable_log_requests=True)
    assert received.startswith("INFO Received request r1: params: SamplingParams(")
    assert "secret" not in received and aborted == "INFO Aborted request(s) r1."


def test_the_text_at_debug_and_no_longer_than_wanted() -> None:
    details, *_ = lines_of(logging.DEBUG, enable_log_requests=True)
    assert details.endswith("prompt: 'a\\nsecret', prompt_token_ids: [7, 8, 9]")
    details, *_ = lines_of(logging.DEBUG, enable_log_requests=True, max_log_len=2)
    assert details.endswith("prompt: 'a\\n', prompt_token_ids: [7, 8]")
    details, *_ = lines_of(logging.DEBUG, None, enable_log_requests=True)
    assert "prompt: '<[7, 8, 9]>'" in details


def test_a_bad_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-log-len must be at least 0, got -1"):
        ObservabilityConfig(max_log_len=-1)
