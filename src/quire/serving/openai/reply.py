"""What chat and text replies share: head, usage, and chunks made from prepared bytes.

A streamed token costs one JSON string and one join, because everything around it is encoded once
per request. Knows no endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.serving.openai.schema import GenerateRequest, StreamOptions
from quire.serving.turns import Usage

encode = msgspec.json.encode


def include_usage(request: GenerateRequest) -> None:
    """Have a stream end with the usage, as if the client had asked for it."""
    if request.stream:
        request.stream_options = request.stream_options or StreamOptions()
        request.stream_options.include_usage = True


def usage_each(request: GenerateRequest) -> bool:
    """Whether every chunk holds the token counts so far."""
    return bool(request.stream_options and request.stream_options.continuous_usage_stats)


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    told: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return told


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The beginning of every reply and chunk of one request."""

    id: str
    object: str
    model: str
    system_fingerprint: str
    created: int
    """Seconds since 1970."""

    def to_dict(self, object_name: str | None = None) -> dict[str, Any]:
        """The head of a whole reply."""
        return {
            "id": self.id,
            "object": object_name or self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Chunks:
    """Builds the frames of one stream.

    Args:
        head: The head of every chunk.
        request: The request, which says what usage the client wants.
        text_open: JSON between the choice's index and its text, such as `"text":`.
        text_close: JSON after the text, without the brace that closes the choice.
    """

    def __init__(
        self, head: ReplyHead, request: GenerateRequest, text_open: bytes, text_close: bytes
    ) -> None:
        options = request.stream_options
        self.usage_last = bool(options and options.include_usage)
        self._usage_each = usage_each(request)
        # OpenAI: with include_usage, the other chunks have a usage field too, and it is null.
        self._tail = b',"usage":null}\n\n' if self.usage_last else b"}\n\n"
        self._head = b"data: " + encode(head.to_dict())[:-1] + b',"choices":['
        self._before = self._head + b'{"index":'
        self._open = b"," + text_open
        self._befores: dict[int, bytes] = {}
        # all before the text, by choice
        self._close = text_close + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def text(self, index: int, text: str) -> bytes:
        """A chunk with nothing but text."""
        before, after = self.around(index)
        return before + encode(text) + after

    def around(self, index: int) -> tuple[bytes, bytes]:
        """What a chunk with nothing but text has before and after its text, a JSON string."""
        before = self._befores.get(index)
        if before is None:
            before = self._befores[index] = b"%b%d%b" % (self._before, index, self._open)
        return before, self._close

    def full(
        self, choice: dict[str, Any], usage: Usage, extra: dict[str, Any] | None = None
    ) -> bytes:
        """A chunk with any choice; `extra` goes to its top level."""
        parts = [self._head, encode(choice), b"]"]
        if extra:
            parts += [b",", encode(extra)[1:-1]]
        if self._usage_each:
            parts += [b',"usage":', encode(usage_object(usage)), b"}\n\n"]
        else:
            parts.append(self._tail)
        return b"".join(parts)

    def usage(self, usage: Usage, extra: dict[str, Any]) -> bytes:
        """The last chunk, without choices; `extra` goes to its top level."""
        last = {"usage": usage_object(usage), **extra}
        return b"%b],%b\n\n" % (self._head, encode(last)[1:])
