"""What the log says of single requests, for `--enable-log-requests`.

At INFO that a request came, with its parameters, and that it was aborted; its text only at DEBUG,
where somebody asked twice. Knows nothing of how requests run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.config.observability import ObservabilityConfig
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.logger import get_logger

logger = get_logger(__name__)


class RequestLog(Listener):
    """Writes the lines, or nothing if they were not asked for.

    Args:
        config: Says what was asked for.
        decode: Token ids to text, for prompts that came as ids.
        log: Where lines go.
    """

    def __init__(
        self,
        config: ObservabilityConfig,
        decode: Callable[[list[int]], str],
        log: logging.Logger | None = None,
    ) -> None:
        self._on = config.enable_log_requests
        self._longest = config.max_log_len
        self._decode = decode
        self._log = log or logger

    def accepted(self, accepted: AcceptedRequest) -> None:
        """A request came in."""
        if not self._on:
            return
        request_id, processed = accepted.request_id, accepted.processed
        if self._log.isEnabledFor(logging.DEBUG):
            text, ids = processed.prompt_text, processed.requests[0].prompt_token_ids
            ids = ids[: self._longest]
            text = self._decode(ids) if text is None else text
            self._log.debug(
                "Request %s details: prompt: %r, prompt_token_ids: %s",
                request_id,
                text[: self._longest],
                ids,
            )
        self._log.info("Received request %s: params: %s", request_id, processed.params)

    def aborted(self, request_id: str) -> None:
        """A request was ended from outside."""
        level = logging.INFO if self._on else logging.DEBUG
        self._log.log(level, "Aborted request(s) %s.", request_id)
