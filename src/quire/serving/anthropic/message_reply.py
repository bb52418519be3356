"""Replies of `POST /v1/messages`: turn events as blocks, streamed, or folded into one message.

Does not know how the events were produced.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from quire.serving.generation import Generation
from quire.serving.named_events import named_event
from quire.serving.turns import (
    Batch,
    Begin,
    Finish,
    ModelTurn,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    TurnEvent,
    Usage,
)

INVALID: Final = "INVALID_JSON"
"""Key under which a call's arguments are told that are no JSON object: the model may have been cut
short within them. The name is from Anthropic's documentation of fine-grained tool streaming."""


@dataclass(frozen=True, slots=True)
class MessageReply:
    """What the reply to one request looks like."""

    id: str
    model: str
    max_tokens: int
    shows_thinking: bool = True
    """Otherwise thinking blocks are there, and empty."""


def _message(reply: MessageReply, usage: Usage, **more: Any) -> dict[str, Any]:
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
        **more,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts tokens that came from the cache apart from the other input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(reply: MessageReply, finish: Finish, usage: Usage) -> dict[str, Any]:
    """Why the message ended. A request that is ended at its deadline is told as `max_tokens`: to a
    client both are a reply that was cut. So is one that ended because it repeated itself."""
    reason, sequence = "max_tokens", None
    if finish.reason == "length" and usage.completion_tokens < reply.max_tokens:
        reason = "model_context_window_exceeded"
    elif finish.reason == "stop" and finish.num_calls:
        reason = "tool_use"
    elif finish.reason == "stop" and isinstance(finish.stop_reason, str):
        reason, sequence = "stop_sequence", finish.stop_reason
    elif finish.reason not in ("length", "abort", "repetition"):
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _call_id(given: str) -> str:
    """A call's id with Anthropic's prefix in place of OpenAI's."""
    return f"toolu_{given.removeprefix('call_')}"


def _signature(text: str) -> str:
    """Stands where Anthropic proves that a thought is its own. Proves nothing; repeatable."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- whole ---------------------------------------------------------------------------------------


async def whole_message(reply: MessageReply, generation: Generation) -> bytes:
    """The reply in one piece."""
    (turn,) = await generation.turns()
    usage = generation.usage
    assert turn.finish is not None, "a turn without an end"
    content = _content(reply, turn)
    stop = _stop(reply, turn.finish, usage)
    return msgspec.json.encode(_message(reply, usage, content=content, **stop))


def _content(reply: MessageReply, turn: ModelTurn) -> list[dict[str, Any]]:
    return [_block(reply, part) for part in turn.parts]


def _block(reply: MessageReply, part: Text | Reasoning | ToolCall) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Reasoning():
            shown = part.text if reply.shows_thinking else ""
            return {"type": "thinking", "thinking": shown, "signature": _signature(part.text)}
        case ToolCall():
            return {
                "type": "tool_use",
                "id": _call_id(part.id),
                "name": part.name,
                "input": _input(part.arguments),
            }


def _input(arguments: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID: arguments}


# ---- streamed ------------------------------------------------------------------------------------


async def stream_message(reply: MessageReply, generation: Generation) -> AsyncGenerator[bytes]:
    """`message_start`, the events of each block, `message_delta` and `message_stop`."""
    stream = _Stream(reply, generation.usage)
    async for batches in generation.events():
        for batch in batches:
            stream.add(batch)
        if frames := stream.take():
            yield frames


class _Stream:
    """The events of one streamed reply. Blocks do not overlap, so at most one is open."""

    def __init__(self, reply: MessageReply, usage: Usage) -> None:
        self._reply = reply
        self._usage = usage
        self._frames: list[bytes] = []
        self._index = -1
        self._open: type[TurnEvent] | None = None
        """Kind of the block that is open."""
        self._thought: list[str] = []

    def take(self) -> bytes:
        """The frames since the last call."""
        frames, self._frames = self._frames, []
        return b"".join(frames)

    def _emit(self, name: str, **fields: Any) -> None:
        self._frames.append(named_event(name, fields))

    def add(self, batch: Batch) -> None:
        """Take the next events."""
        for event in batch:
            match event:
                case Text():
                    self._within(Text, {"type": "text", "text": ""})
                    self._delta(type="text_delta", text=event.text)
                case Reasoning():
                    self._within(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                    self._thought.append(event.text)
                    if self._reply.shows_thinking:
                        self._delta(type="thinking_delta", thinking=event.text)
                case ToolCallBegin():
                    self._begin_call(event)
                case ToolCallArguments():
                    self._delta(type="input_json_delta", partial_json=event.text)
                case ToolCallEnd():
                    self._close()
                case Begin():
                    message = _message(self._reply, self._usage)
                    self._emit("message_start", message=message)
                case Finish():
                    self._finish(event)

    def _within(self, kind: type[TurnEvent], block: dict[str, Any]) -> None:
        """Open a block of this kind, unless one is open."""
        if self._open is not kind:
            self._close()
            self._index += 1
            self._open = kind
            self._emit("content_block_start", index=self._index, content_block=block)
            if self._index == 0:
                self._emit("ping")

    def _delta(self, **delta: Any) -> None:
        self._emit("content_block_delta", index=self._index, delta=delta)

    def _begin_call(self, event: ToolCallBegin) -> None:
        self._close()  # two calls in a row are two blocks
        call = {"type": "tool_use", "id": _call_id(event.id), "name": event.name, "input": {}}
        self._within(ToolCallBegin, call)

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open is Reasoning:
            thought, self._thought = "".join(self._thought), []
            self._delta(type="signature_delta", signature=_signature(thought))
        self._open = None
        self._emit("content_block_stop", index=self._index)

    def _finish(self, event: Finish) -> None:
        self._close()
        stop = _stop(self._reply, event, self._usage)
        self._emit("message_delta", delta=stop, usage=_usage(self._usage))
        self._emit("message_stop")
