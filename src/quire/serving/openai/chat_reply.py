"""Replies of `POST /v1/chat/completions`: turn events as chunks, or folded into one object.

Does not know how the events were produced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from quire.serving.generation import Generation, WholeTurns
from quire.serving.large_json import ONE_GO, Splices, glued, made, spliced_scores
from quire.serving.openai.logprobs import chat_logprobs
from quire.serving.openai.reply import Chunks, ReplyHead, usage_object
from quire.serving.openai.schema import ChatRequest
from quire.serving.token_texts import TokenTexts
from quire.serving.turns import (
    Batch,
    Begin,
    Finish,
    ModelTurn,
    PromptInfo,
    Reasoning,
    Text,
    Tokens,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    TurnEvent,
    num_candidates,
    num_scored,
)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the reply to one request looks like."""

    request: ChatRequest
    head: ReplyHead
    texts: TokenTexts
    prefixes: Sequence[str]
    """With `echo`: the unfinished assistant turn of each conversation, which the reply
    continues."""
    splices: Splices = field(default_factory=Splices)
    """Holds what is large in the object that is being encoded."""


def _finish_reason(finish: Finish) -> str:
    """OpenAI's finish reason, which names tool calls as a reason of its own."""
    return "tool_calls" if finish.num_calls and finish.reason == "stop" else finish.reason


def _prompt_extras(reply: ChatReply, prompt: PromptInfo) -> dict[str, Any]:
    """The information about the prompt that the client asked for; of several there is none."""
    extras: dict[str, Any] = {}
    if len(reply.prefixes) > 1:
        return extras
    if reply.request.return_token_ids:
        extras["prompt_token_ids"] = prompt.token_ids
    if reply.request.prompt_logprobs is not None and prompt.logprobs is not None:
        extras["prompt_logprobs"] = reply.splices.raw(spliced_scores(prompt.logprobs))
    return extras


def _logprobs(reply: ChatReply, tokens: Tokens | ModelTurn) -> dict[str, Any] | None:
    if tokens.logprobs is None:
        return None
    named = reply.request.logprob_token_ids
    top = -1 if named else reply.request.top_logprobs or 0
    return chat_logprobs(tokens.token_ids, tokens.logprobs, top, reply.texts, reply.splices)


# ---- whole ---------------------------------------------------------------------------------------


async def whole_reply(reply: ChatReply, generation: WholeTurns) -> list[bytes]:
    """The reply in pieces."""
    turns = await generation.turns()

    def work() -> list[bytes]:
        prompt = turns[0].prompt
        assert prompt is not None, "a turn without a beginning"
        body = reply.head.to_dict("chat.completion") | {
            "choices": [_choice(reply, turn) for turn in turns],
            "usage": usage_object(generation.usage),
            "seed": generation.seed,
            **generation.metrics,
            **_prompt_extras(reply, prompt),
        }
        return reply.splices.fill(msgspec.json.encode(body))

    pieces: list[bytes] = await made(num_scored(turns), work)
    return pieces


def _choice(reply: ChatReply, turn: ModelTurn) -> dict[str, Any]:
    assert turn.finish is not None, "a turn without an end"
    return {
        "index": turn.choice,
        "message": _message(reply, turn),
        "logprobs": _logprobs(reply, turn),
        "finish_reason": _finish_reason(turn.finish),
        "stop_reason": turn.finish.stop_reason,
        **({"token_ids": turn.token_ids} if reply.request.return_token_ids else {}),
    }


def _message(reply: ChatReply, turn: ModelTurn) -> dict[str, Any]:
    assert turn.prompt is not None, "a turn without a beginning"
    text, reasoning, calls = (
        reply.prefixes[turn.prompt.index] + turn.text,
        turn.reasoning,
        turn.calls,
    )
    content = None if calls and not text else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under both of its names, because clients read one or the other."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


# ---- streamed ------------------------------------------------------------------------------------


def _begin_call(event: ToolCallBegin) -> dict[str, Any]:
    call = {"index": event.call, **_call(ToolCall(event.id, event.name))}
    return {"tool_calls": [call]}


def _more_arguments(event: ToolCallArguments) -> dict[str, Any]:
    return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}


DELTAS: Final[dict[type[TurnEvent], Callable[[Any], dict[str, Any]]]] = {
    Text: lambda event: {"content": event.text},
    Reasoning: lambda event: _reasoning(event.text),
    ToolCallBegin: _begin_call,
    ToolCallArguments: _more_arguments,
}
"""The `delta` for each kind of event. The end of a call has none."""


async def stream_frames(reply: ChatReply, generation: Generation) -> AsyncGenerator[bytes]:
    """Role chunk, delta chunks and finish chunk of each choice, then the usage chunk."""
    stream = _Stream(reply, generation)
    generation.render_with(stream.render, stream.chunks.around)
    async for batches in generation.events():
        frames: list[bytes] = []
        for batch in batches:
            event = batch[0]
            if stream.is_first and type(event) is Begin and event.prompt.logprobs:
                size = num_candidates(event.prompt.logprobs)
                frames += await made(size, partial(stream.begin, event))
                batch = batch[1:]
            stream.add(batch, frames)
            if len(frames) > 1 and sum(map(len, frames)) > ONE_GO:
                yield await glued(frames)
                frames = []
        if frames:
            yield b"".join(frames)
    if stream.chunks.usage_last:
        yield stream.chunks.usage(generation.usage, generation.metrics)


class _Stream:
    """The chunks of one streamed reply."""

    def __init__(self, reply: ChatReply, generation: Generation) -> None:
        self.chunks = Chunks(reply.head, reply.request, b'"delta":{"content":', b"}")
        self._reply = reply
        self._generation = generation
        self.is_first = True
        """Whether no choice has begun."""

    def render(self, batches: list[Batch]) -> bytes:
        """The chunks of some batches, when nothing is large."""
        frames: list[bytes] = []
        for batch in batches:
            self.add(batch, frames)
        return b"".join(frames)

    def add(self, batch: Batch, frames: list[bytes]) -> None:
        """Append the chunks of a batch. Its tokens go into the first chunk with content."""
        tokens: Tokens | None = None
        for event in batch:
            if type(event) is Text and tokens is None:
                frames.append(self.chunks.text(event.choice, event.text))
            elif type(event) in DELTAS:
                delta = DELTAS[type(event)](event)
                frames += self._delta(event.choice, delta, tokens)
                tokens = None
            elif isinstance(event, Tokens):
                tokens = event
            elif isinstance(event, Begin):
                frames += self.begin(event)
            elif isinstance(event, Finish):
                if tokens is not None:
                    frames += self._delta(event.choice, {"content": ""}, tokens)
                    tokens = None
                frames.append(self._finish(event))
        if tokens is not None:
            frames += self._delta(tokens.choice, {"content": ""}, tokens)

    def begin(self, event: Begin) -> list[bytes]:
        """The role chunk of a choice, in pieces. The first one tells of the prompt."""
        extra: dict[str, Any] = {}
        if self.is_first:
            self.is_first = False
            extra = {"seed": self._generation.seed, **_prompt_extras(self._reply, event.prompt)}
        delta = {"role": "assistant", "content": self._reply.prefixes[event.prompt.index]}
        choice = {"index": event.choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._filled(choice, extra)

    def _delta(self, choice: int, delta: dict[str, Any], tokens: Tokens | None) -> list[bytes]:
        """A chunk with everything the client asked for, in pieces."""
        body = {
            "index": choice,
            "delta": delta,
            "logprobs": tokens and _logprobs(self._reply, tokens),
            "finish_reason": None,
        }
        if tokens is not None and self._reply.request.return_token_ids:
            body["token_ids"] = tokens.token_ids
        return self._filled(body)

    def _filled(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> list[bytes]:
        return self._reply.splices.fill(self.chunks.full(choice, self._generation.usage, extra))

    def _finish(self, event: Finish) -> bytes:
        choice = {
            "index": event.choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": _finish_reason(event),
            "stop_reason": event.stop_reason,
        }
        return self.chunks.full(choice, self._generation.usage)
