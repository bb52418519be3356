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
from quire.serving.large_json import ONE_GO, SLICE, Splices, glued, joined, made, spliced_scores
from quire.serving.openai.logprobs import TextLogprobs
from quire.serving.openai.reply import Chunks, ReplyHead, usage_object
from quire.serving.openai.schema import CompletionRequest
from quire.serving.token_texts import TokenTexts
from quire.serving.turns import (
    Batch,
    Begin,
    ModelTurn,
    PromptInfo,
    Text,
    num_candidates,
    num_scored,
)


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
    scores: dict[int, list[bytes]] = field(default_factory=dict)
    """The `prompt_logprobs` of each prompt as JSON, which all its choices carry."""
    echoed: dict[int, tuple[TextLogprobs, dict[str, list[bytes]]]] = field(default_factory=dict)
    """The echoed `logprobs` of each prompt, with which each of its choices begins."""
    splices: Splices = field(default_factory=Splices)
    """Holds what is large in the object that is being encoded."""

    def prompt_scores(self, prompt: PromptInfo) -> list[bytes]:
        """`prompt_logprobs` of a prompt that was scored, made once for all choices."""
        if prompt.index not in self.scores:
            # An echo may have asked for more of them.
            most = self.request.prompt_logprobs
            self.scores[prompt.index] = spliced_scores(
                prompt.logprobs or [], -1 if most is None else most
            )
        return self.scores[prompt.index]

    def echoed_logprobs(self, prompt: PromptInfo) -> tuple[TextLogprobs, dict[str, list[bytes]]]:
        """`logprobs` of an echoed prompt as JSON, made once for all choices."""
        if prompt.index not in self.echoed:
            # `prompt_logprobs` may have asked for more of them.
            most = self.request.logprobs
            made = TextLogprobs(self.texts, -1 if most is None else most)
            found = made.items(prompt.token_ids, prompt.logprobs or [])
            self.echoed[prompt.index] = made, found
        return self.echoed[prompt.index]

    async def look_at(self, prompt: PromptInfo) -> None:
        """Make what all choices of a prompt carry, without keeping others waiting."""
        if not prompt.logprobs:
            return
        size = num_candidates(prompt.logprobs)
        if self.request.prompt_logprobs is not None and prompt.index not in self.scores:
            await made(size, lambda: self.prompt_scores(prompt))
        if self._shows_echoed and prompt.index not in self.echoed:
            await made(size, lambda: self.echoed_logprobs(prompt))

    @property
    def _shows_echoed(self) -> bool:
        return bool(self.request.echo) and self.shows_logprobs

    @property
    def shows_logprobs(self) -> bool:
        """Whether choices have log-probabilities."""
        return self.request.logprobs is not None or bool(self.request.logprob_token_ids)


async def whole_reply(reply: CompletionReply, generation: WholeTurns) -> list[bytes]:
    """The reply in pieces, choices in the order of the prompts."""
    turns = await generation.turns()

    def work() -> list[bytes]:
        body = reply.head.to_dict() | {
            "choices": [_piece(reply, turn) for turn in turns],
            "usage": usage_object(generation.usage),
            "seed": generation.seed,
            **generation.metrics,
        }
        return reply.splices.fill(msgspec.json.encode(body))

    pieces: list[bytes] = await made(num_scored(turns), work)
    return pieces


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
        piece["prompt_logprobs"] = reply.splices.raw(reply.prompt_scores(prompt))
    return piece


def _logprobs(reply: CompletionReply, turn: ModelTurn) -> dict[str, Any] | None:
    if not reply.shows_logprobs:
        return None
    own = reply.logprobs.get(turn.choice)
    if own is None:
        echo = reply.echoes[turn.prompt.index] if turn.prompt else ""
        own = reply.logprobs[turn.choice] = TextLogprobs(reply.texts, offset=len(echo))
    ids, positions = turn.token_ids, turn.logprobs or []
    if turn.prompt and reply.request.echo and turn.prompt.logprobs is not None:
        before, echoed = reply.echoed_logprobs(turn.prompt)
        own.follow(before)
        more = own.items(ids, positions)
        return {key: reply.splices.raw(joined(echoed[key], more[key])) for key in more}
    if num_candidates(positions) <= SLICE:
        return own.piece(ids, positions)
    return {
        key: reply.splices.raw(joined(values)) for key, values in own.items(ids, positions).items()
    }


async def stream_frames(reply: CompletionReply, generation: Generation) -> AsyncGenerator[bytes]:
    """Chunks of all choices as they arrive, then the usage chunk."""
    chunks = Chunks(reply.head, reply.request, b'"text":', b"")
    extra = {"seed": generation.seed}

    def add(batch: Batch, frames: list[bytes]) -> None:
        nonlocal extra
        event = batch[0]
        if type(event) is Text and len(batch) == 1 and not reply.shows_tokens:
            frames.append(chunks.text(event.choice, event.text))
        else:
            piece = _piece(reply, ModelTurn(event.choice).add(batch))
            frames += reply.splices.fill(chunks.full(piece, generation.usage, extra))
            extra = {}

    def render(batches: list[Batch]) -> bytes:
        frames: list[bytes] = []
        for batch in batches:
            add(batch, frames)
        return b"".join(frames)

    generation.render_with(render, None if reply.shows_tokens else chunks.around)
    async for batches in generation.events():
        frames: list[bytes] = []
        for batch in batches:
            event = batch[0]
            if type(event) is Begin and event.prompt.logprobs:
                await reply.look_at(event.prompt)
            add(batch, frames)
            if len(frames) > 1 and sum(map(len, frames)) > ONE_GO:
                yield await glued(frames)
                frames = []
        if frames:
            yield b"".join(frames)
    if chunks.usage_last:
        yield chunks.usage(generation.usage, generation.metrics)
