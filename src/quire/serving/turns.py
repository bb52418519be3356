"""What the model says, as typed events: the common language of all HTTP APIs and parsers.

Between the engine's outputs and the bytes of a reply there is one stream of events per choice: it
begins, says text, reasons, calls tools, and finishes. A streamed reply renders the events as they
come; a whole one renders their fold, `ModelTurn`, so that the two cannot differ. Knows no engine
and no wire format.

A choice is numbered over all prompts of its request: prompt times `n` plus the choice's own index.
Events of one choice that come at the same time make a batch. In a stream of batches, each choice
has one `Begin`, then any of the others in the order in which they were said, then one `Finish`;
calls of tools do not overlap. `Usage` is counted alongside: some replies tell it with every chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.outputs import Pooled, PositionLogprobs


class PromptInfo(msgspec.Struct, gc=False):
    """The prompt of a choice, as far as replies tell of it."""

    index: int
    """Which of the request's prompts."""
    token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    logprobs: Sequence[PositionLogprobs | None] | None
    """If they were asked for; entry 0 is `None`."""
    scored: Pooled | None = None
    """Of tokens that the caller named, in prompts that are read as a whole."""


class TurnEvent(msgspec.Struct, gc=False):
    """Something that happens in a choice. Many are made: structs cost a third of dataclasses."""

    choice: int


class Begin(TurnEvent):
    """The choice's first event."""

    prompt: PromptInfo
    """Shared by all choices of the prompt."""


class Tokens(TurnEvent):
    """Sampled tokens, for replies that show ids or log-probabilities; others do not get them.

    Comes before what their text says. Text may come later than its tokens, and fewer of it: parts
    of characters wait for the rest, and stop strings and parsers hold text back.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    """One per token, if they were asked for."""


class Text(TurnEvent):
    """A piece of the answer; never empty."""

    text: str


class Reasoning(TurnEvent):
    """A piece of what the model thinks before it answers; never empty."""

    text: str


class ToolCallBegin(TurnEvent):
    """The model begins to call a tool."""

    call: int
    """Calls of a choice are counted from 0."""
    id: str
    name: str


class ToolCallArguments(TurnEvent):
    """A piece of the JSON text of a call's arguments; never empty."""

    call: int
    text: str


class ToolCallEnd(TurnEvent):
    """A call is complete, or the model stopped within it."""

    call: int


class Finish(TurnEvent):
    """The choice's last event."""

    reason: str
    """`stop`, `length` or `abort`."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended it; `None` for end of sequence."""
    num_calls: int
    """Tools that the choice called; many APIs name them as the reason of the end."""


class Usage(msgspec.Struct, gc=False):
    """Tokens of one HTTP request so far, over all its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of `completion_tokens`, those before the end of the reasoning, of choices that have ended."""


Batch = list[TurnEvent]
"""Events of one choice that came at the same time."""


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ModelTurn:
    """The fold of one choice's events, of all of them or of those of a batch."""

    choice: int
    prompt: PromptInfo | None = None
    """`None` if the choice began earlier."""
    parts: list[Text | Reasoning | ToolCall] = field(default_factory=list)
    """In the order in which they were said; neighbours of a kind are one."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish: Finish | None = None

    def add(self, events: Iterable[TurnEvent]) -> ModelTurn:
        """Take the choice's next events; returns the turn itself."""
        for event in events:
            match event:
                case Text() | Reasoning():
                    self._say(event)
                case Tokens():
                    self.token_ids = [*self.token_ids, *event.token_ids]
                    if event.logprobs is not None:
                        self.logprobs = [*(self.logprobs or ()), *event.logprobs]
                case ToolCallBegin():
                    self.parts.append(ToolCall(event.id, event.name))
                case ToolCallArguments():
                    call = self.parts[-1]
                    assert isinstance(call, ToolCall), "arguments without a call"
                    call.arguments += event.text
                case Begin():
                    self.prompt = event.prompt
                case Finish():
                    self.finish = event
        return self

    def _say(self, event: Text | Reasoning) -> None:
        last = self.parts[-1] if self.parts else None
        if type(last) is type(event):
            last.text += event.text
        else:
            self.parts.append(type(event)(event.choice, event.text))

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of tools."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


def num_candidates(positions: Sequence[PositionLogprobs | None] | None) -> int:
    """Log-probabilities in a list, about: all positions have as many as the last."""
    return len(positions) * len(positions[-1] or ()) if positions else 0


def num_scored(turns: Iterable[ModelTurn]) -> int:
    """Log-probabilities in a reply, about: a measure of the work of building it."""
    turns = list(turns)
    prompts = {turn.prompt.index: turn.prompt for turn in turns if turn.prompt is not None}
    scored = sum(num_candidates(prompt.logprobs) for prompt in prompts.values())
    return scored + sum(num_candidates(turn.logprobs) for turn in turns)
