"""Where the replies of `quire chat` come from: the protocol of a talker, and the one that asks a
server.

The talker that runs its own engine is in `quire.cli.engine_talker`. Talkers return a plain iterator
of text pieces and know nothing of the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Turn:
    """Text and timing of one reply. Seconds are monotonic."""

    text: str = ""
    num_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tools that the reply calls, in OpenAI's form."""
    stopped: bool = False
    """The user stopped the reply."""

    def add(self, text: str, num_tokens: int) -> None:
        """Record a piece that has just arrived."""
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last
        self.text += text
        self.num_tokens += num_tokens

    def footer(self) -> str:
        """Tokens, tokens per second after the first, time to first token."""
        if self.first is None or self.last is None:
            return "[no tokens]"
        seconds = self.last - self.first
        speed = f"{(self.num_tokens - 1) / seconds:.1f} tokens/s, " if seconds > 0 else ""
        return f"[{self.num_tokens} tokens, {speed}TTFT {self.first - self.started:.3f} s]"


class Talker(Protocol):
    """Something that answers a conversation."""

    model: str
    """Name of the model."""
    place: str
    """Where it runs: `on the CPU: …`, `at http://…`."""

    def reply(
        self, messages: list[dict[str, Any]], options: dict[str, Any], turn: Turn
    ) -> Generator[str]:
        """Yield the reply piece by piece, noting each in `turn`. Tools are among the options.

        Closing the iterator ends the request.

        Raises:
            RequestError: this request is refused; another may succeed.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class ServerTalker:
    """A running server, over HTTP."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        """Raises StartupError if the server cannot be reached."""
        from quire.cli.http import Client

        self._client = Client(url, api_key)
        self.model = model or self._client.model()
        self.place = f"at {url}"

    def reply(
        self, messages: list[dict[str, Any]], options: dict[str, Any], turn: Turn
    ) -> Generator[str]:
        """See `Talker`."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        for event in self._client.stream("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                for call in delta.get("tool_calls") or ():
                    if "id" in call:
                        turn.calls.append({k: v for k, v in call.items() if k != "index"})
                    else:
                        function = turn.calls[-1]["function"]
                        function["arguments"] += call["function"]["arguments"]
                piece = delta.get("content") or ""
                if piece:
                    turn.add(piece, 1)
                    yield piece
            if event.get("usage"):  # a chunk may hold several tokens; the server counts them
                turn.num_tokens = event["usage"]["completion_tokens"]

    def close(self) -> None:
        """Nothing is held between requests."""
