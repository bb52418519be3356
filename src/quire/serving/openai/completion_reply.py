"""Replies of `POST /v1/completions`: turn events as chunks, or folded into one object.

A chunk has the same form as a whole choice, so `_piece` makes both: from all events of a choice, or
from those of a batch. Does not know how the events were produced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.serving.generation import Generation, WholeTurns
from quire.serving.openai.logprobs import TextLogprobs, join
from quire.serving.openai.reply import Chunks, ReplyHead, usage_object
from quire.serving.openai.schema import CompletionRequest
from quire.serving.prompts import off_loop
from quire.serving.token_texts import TokenTexts, prompt_logprobs
from quire.serving.turns import ModelTurn, PromptInfo, Text, num_scored


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """What the reply to one request looks like, and the state of making it."""

    request: CompletionRequest
    head: ReplyHead
    texts: TokenTexts
    echoes: list[str]
    """With `echo`: the text of each prompt."""
    shows_tokens: bool
    """Whether chunks hold more than text."""
    logprobs: dict[int, TextLogprobs] = field(default_factory=dict)
    """Log-probabilities by choice."""
    scores: dict[int, msgspec.Raw] = field(default_factory=dict)
    """The `prompt_logprobs` of each prompt as JSON, which all its choices carry."""
    echoed: dict[int, TextLogprobs] = field(default_factory=dict)
    """The echoed `logprobs` of each prompt, with which each of its choices begins."""

    def prompt_scores(self, prompt: PromptInfo) -> msgspec.Raw:
        """`prompt_logprobs` of a prompt that was scored, made once for all choices."""
        if prompt.index not in self.scores:
            positions = prompt_logprobs(prompt.logprobs or [])
            self.scores[prompt.index] = msgspec.Raw(msgspec.json.encode(positions))
        return self.scores[prompt.index]

    def echoed_logprobs(self, prompt: PromptInfo, own: TextLogprobs) -> dict[str, list[Any]]:
        """`logprobs` of an echoed prompt, made once for all choices; `own` goes on after it."""
        if prompt.index not in self.echoed:
            made = self.echoed[prompt.index] = TextLogprobs(self.texts)
            made.piece(prompt.token_ids, prompt.logprobs or [])
        return own.follow(self.echoed[prompt.index])


async def whole_reply(reply: CompletionReply, generation: WholeTurns) -> bytes:
    """The reply in one piece, choices in the order of the prompts."""
    turns = await generation.turns()

    def work() -> bytes:
        body = reply.head.to_dict() | {
            "choices": [_piece(reply, turn) for turn in turns],
            "usage": usage_object(generation.usage),
            "seed": generation.seed,
            **generation.metrics,
        }
        return msgspec.json.encode(body)

    return await off_loop(num_scored(turns), work)


def _piece(reply: CompletionReply, turn: ModelTurn) -> dict[str, Any]:
    """A whole choice, or the next piece of one: the first begins with the echoed prompt."""
    prompt, finish = turn.prompt, turn.finish
    piece = {
        "index": turn.choice,
        "text": (reply.echoes[prompt.index] if prompt else "") + turn.text,
        "logprobs": _logprobs(reply, turn),
        "finish_reason": finish and finish.reason,
        "stop_reason": finish and finish.stop_reason,
    }
    if reply.request.return_token_ids:
        piece["token_ids"] = turn.token_ids
        if prompt:
            piece["prompt_token_ids"] = prompt.token_ids
    if prompt and prompt.logprobs and reply.request.prompt_logprobs is not None:
        piece["prompt_logprobs"] = reply.prompt_scores(prompt)
    return piece


def _logprobs(reply: CompletionReply, turn: ModelTurn) -> dict[str, list[Any]] | None:
    if reply.request.logprobs is None and not reply.request.logprob_token_ids:
        return None
    own = reply.logprobs.setdefault(turn.choice, TextLogprobs(reply.texts))
    pieces = []
    if turn.prompt and reply.request.echo and turn.prompt.logprobs is not None:
        pieces.append(reply.echoed_logprobs(turn.prompt, own))
    pieces.append(own.piece(turn.token_ids, turn.logprobs or []))
    return join(pieces)


async def stream_frames(reply: CompletionReply, generation: Generation) -> AsyncGenerator[bytes]:
    """Chunks of all choices as they arrive, then the usage chunk."""
    chunks = Chunks(reply.head, reply.request, b'"text":', b"")
    extra = {"seed": generation.seed}
    async for batches in generation.events():
        frames = []
        for batch in batches:
            event = batch[0]
            if type(event) is Text and len(batch) == 1 and not reply.shows_tokens:
                frames.append(chunks.text(event.choice, event.text))
            else:
                piece = _piece(reply, ModelTurn(event.choice).add(batch))
                frames.append(chunks.full(piece, generation.usage, extra))
                extra = {}
        if frames:
            yield b"".join(frames)
    if chunks.usage_last:
        yield chunks.usage(generation.usage, generation.metrics)
