"""Replies of the Responses API: turn events become output items, and each step of that an event.

A whole reply has the items that a streamed one tells, because both are made here; only a stream
writes the events down. Does not know how the turn events were produced.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import QuireError
from quire.outputs import PositionLogprobs
from quire.serving.generation import Generation
from quire.serving.named_events import Emit, named_event
from quire.serving.responses.items import Item, item_id
from quire.serving.streaming import told_error
from quire.serving.token_texts import TokenTexts, token_entries
from quire.serving.turns import (
    Batch,
    Finish,
    Reasoning,
    Text,
    Tokens,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """What the reply to one request looks like."""

    id: str
    settings: dict[str, Any]
    """Fields of the response object that repeat the request."""
    texts: TokenTexts
    top: int | None
    """Candidates of each token of the text; `None`: no log-probabilities."""
    created_at: int


CUT: Final = {"length": "max_output_tokens", "abort": "deadline", "repetition": "repetition"}
"""What an incomplete response says, by the finish reasons of outputs that were cut."""
_SAID: Final = (Text, Reasoning, ToolCallBegin, ToolCallArguments)


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseWriter:
    """Builds the response object from turn events. Items do not overlap: at most one is open.

    Args:
        reply: What the reply looks like.
        emit: Told of each event.
    """

    def __init__(self, reply: ResponseReply, emit: Emit) -> None:
        self.reply = reply
        self.status = "in_progress"
        self.output: list[Item] = []
        self.usage: Usage | None = None
        """Token counts so far, once generation has begun."""
        self.seed: int | None = None
        self._emit = emit
        self._incomplete: str | None = None
        self._error: QuireError | None = None
        self._completed_at: int | None = None
        self._open: Item | None = None
        self._pieces: list[str] = []
        """The text of the open item, joined at its end."""
        self._told: list[Any] = []
        """Log-probabilities of the open item."""
        self._waiting: list[tuple[int, PositionLogprobs]] = []
        """Tokens whose text has not come yet."""
        self._counted = self._reasoning_tokens = 0

    def body(self) -> dict[str, Any]:
        """The response object as it is now."""
        usage = None
        if self.usage is not None and self.status not in ("queued", "in_progress"):
            # Exact where one token ends the reasoning; otherwise as counted here.
            reasoning_tokens = self.usage.reasoning_tokens or self._reasoning_tokens
            usage = _usage(self.usage, reasoning_tokens)
        error = self._error and {"code": _code(self._error), "message": self._error.message}
        return {
            "id": self.reply.id,
            "object": "response",
            "created_at": self.reply.created_at,
            "status": self.status,
            "completed_at": self._completed_at,
            "error": error,
            "incomplete_details": self._incomplete and {"reason": self._incomplete},
            "output": list(self.output),
            "usage": usage,
            **self.reply.settings,
            **({} if self.seed is None else {"seed": self.seed}),
        }

    def add(self, batch: Batch) -> None:
        """Take the next events."""
        self._count(batch)
        for event in batch:
            match event:
                case Text():
                    self._text(event)
                case Reasoning():
                    self._within("reasoning", {"summary": [], "content": []})
                    self._pieces.append(event.text)
                    self._emit_part("response.reasoning_text.delta", delta=event.text)
                case ToolCallBegin():
                    self._close()
                    call = {"call_id": event.id, "name": event.name, "arguments": ""}
                    self._within("function_call", call)
                case ToolCallArguments():
                    self._pieces.append(event.text)
                    name = "response.function_call_arguments.delta"
                    self._emit_item(name, delta=event.text)
                case ToolCallEnd():
                    self._close()
                case Tokens():
                    if event.logprobs is not None:
                        pairs = zip(event.token_ids, event.logprobs, strict=True)
                        self._waiting += pairs
                case Finish():
                    self._finish(event)

    def _count(self, batch: Batch) -> None:
        """Count the tokens of reasoning: those of batches that begin with some. Marks around it
        and parts of characters, whose text says nothing, count with what comes next."""
        said = next((event for event in batch if isinstance(event, _SAID)), None)
        if self.usage is None or (said is None and not isinstance(batch[-1], Finish)):
            return
        if isinstance(said, Reasoning):
            self._reasoning_tokens += self.usage.completion_tokens - self._counted
        self._counted = self.usage.completion_tokens

    def _text(self, event: Text) -> None:
        if self._open is None or self._open["type"] != "message":
            self._within("message", {"role": "assistant", "content": []})
            self._drop_others(len(event.text))
        self._pieces.append(event.text)
        self._emit_part("response.output_text.delta", delta=event.text, logprobs=self._entries())

    def _drop_others(self, length: int) -> None:
        """Of the tokens that wait when a message begins, keep the last ones that spell its first
        text: those before were reasoning, a call, or the marks around these."""
        kept = len(self._waiting)
        while kept and length > 0:
            kept -= 1
            token_id, position = self._waiting[kept]
            length -= len(self.reply.texts.spell(token_id, position[token_id]))
        del self._waiting[:kept]

    def _entries(self) -> list[Any]:
        """The log-probabilities of the tokens that wait, which are of the text that comes now."""
        if not self._waiting or self.reply.top is None:
            return []
        ids, positions = zip(*self._waiting, strict=True)
        self._waiting.clear()
        entries = token_entries(ids, positions, self.reply.top, self.reply.texts)
        self._told += entries
        return entries

    # ---- items -------------------------------------------------------------------------------

    def _within(self, kind: str, fields: dict[str, Any]) -> None:
        """Open an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        self._close()
        own_id = item_id(kind, self.reply.id, len(self.output))
        item = {"id": own_id, "type": kind, "status": "in_progress", **fields}
        self._open = item
        self.output.append(item)
        self._emit("response.output_item.added", output_index=len(self.output) - 1, item=dict(item))
        if kind != "function_call":
            self._emit_part("response.content_part.added", part=_part(kind, "", []))

    def _close(self, status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        text, self._pieces = "".join(self._pieces), []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            self._emit_item("response.function_call_arguments.done", arguments=text)
        else:
            self._close_part(item, text)
        self._open = None
        self._emit("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _close_part(self, item: Item, text: str) -> None:
        if item["type"] == "message":
            self._entries()  # of tokens at the end that have no text
        logprobs, self._told = self._told, []
        if item["type"] == "message":
            self._emit_part("response.output_text.done", text=text, logprobs=logprobs)
        else:
            self._emit_part("response.reasoning_text.done", text=text)
        part = _part(item["type"], text, logprobs)
        item["content"] = [part]
        self._emit_part("response.content_part.done", part=part)

    def _emit_item(self, name: str, **fields: Any) -> None:
        assert self._open is not None, "an event of no item"
        own_id, index = self._open["id"], len(self.output) - 1
        self._emit(name, item_id=own_id, output_index=index, **fields)

    def _emit_part(self, name: str, **fields: Any) -> None:
        self._emit_item(name, content_index=0, **fields)

    # ---- ends --------------------------------------------------------------------------------

    def _finish(self, event: Finish) -> None:
        if event.reason in CUT:
            self.status = "incomplete"
            self._incomplete = CUT[event.reason]
        else:
            self.status = "completed"
        if not self.output:  # clients look for a message
            self._within("message", {"role": "assistant", "content": []})
        self._close(self.status)
        self._completed_at = int(time.time()) if self.status == "completed" else None

    def stop(self, status: str, error: QuireError | None = None) -> None:
        """End early: `failed` or `cancelled`, with what there is."""
        self._close("incomplete")
        self.status, self._error = status, error


def _part(kind: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _code(error: QuireError) -> str:
    """OpenAI's word for a failure."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def quiet(name: str, **fields: Any) -> None:
    """Of events that nobody reads."""


async def write_whole(writer: ResponseWriter, generation: Generation) -> None:
    """Read a whole generation into a response.

    Raises:
        EngineError: the engine failed; what it said about it is in the log.
    """
    writer.usage, writer.seed = generation.usage, generation.seed
    async for batches in generation.events():
        for batch in batches:
            writer.add(batch)


async def stream_response(
    reply: ResponseReply,
    generation: Generation,
    keep: Callable[[ResponseWriter], None],
    request_id: str,
) -> AsyncGenerator[bytes]:
    """`response.created` and `response.in_progress`, the events of each item, and the one that says
    how the response ended, `response.failed` included.

    Args:
        reply: What the reply looks like.
        generation: Its output.
        keep: Called when the response has ended well, before the client is told.
        request_id: Under which the log tells of failures.
    """
    frames: list[bytes] = []
    number = 0

    def emit(name: str, **fields: Any) -> None:
        nonlocal number
        frames.append(named_event(name, {"sequence_number": number, **fields}))
        number += 1

    def take() -> bytes:
        taken = b"".join(frames)
        frames.clear()
        return taken

    writer = ResponseWriter(reply, emit)
    writer.usage, writer.seed = generation.usage, generation.seed
    emit("response.created", response=writer.body())
    emit("response.in_progress", response=writer.body())
    yield take()
    try:
        async for batches in generation.events():
            for batch in batches:
                writer.add(batch)
            if writer.status != "in_progress":
                keep(writer)
                emit(f"response.{writer.status}", response=writer.body())
            if frames:
                yield take()
    except Exception as error:
        writer.stop("failed", told_error(error, request_id))
        emit("response.failed", response=writer.body())
        yield take()
