"""Parsers: find reasoning and tool calls in the text of a model. One class per syntax.

A parser is fed the text of one choice, in pieces as it is generated or all at once. This must not
make a difference: a parser gives the same result however the text is split. Knows no engine and no
wire format.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from quire.registry import Registry
from quire.serving.turns import (
    Batch,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """What a parser may know about the request."""

    prompt: str
    """The prompt as the template rendered it; some prompts end inside the model's reasoning."""
    tools: Sequence[dict[str, Any]] = ()
    """OpenAI's tool objects; empty if none are offered."""


class OutputParser(ABC):
    """Parses one choice. Subclasses override `feed`, and `finish` if they ever hold text back.

    Args:
        setup: What is known about the request.
        out: Receives what is found.
    """

    needs_tools: ClassVar[bool] = False
    """Requests without tools are not parsed by this class: their output is text."""

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        self.setup = setup
        self.out = out

    @abstractmethod
    def feed(self, text: str) -> None:
        """Parse the next piece of text; it may begin and end anywhere."""

    def finish(self) -> None:  # noqa: B027 - most hold nothing back
        """The text has ended: write whatever was held back."""


PARSERS: Final[Registry[type[OutputParser]]] = Registry(
    "output parser", plugins="output_parser", subclass_of="quire.serving.parsing:OutputParser"
)
"""Parsers by name."""


class TurnWriter:
    """The writer that a parser is given.

    Args:
        log: Receives everything found in one choice.
        follower: The parser that reads what this one treats as text, if there is one.
    """

    def __init__(self, log: _TurnLog, follower: OutputParser | None = None) -> None:
        self._log = log
        self._follower = follower

    def text(self, text: str) -> None:
        """A piece of the answer. Ends an open call."""
        if self._follower is None:
            self._log.say(Text, text)
        elif text:
            self._follower.feed(text)

    def reasoning(self, text: str) -> None:
        """A piece of the reasoning. Ends an open call."""
        self._log.say(Reasoning, text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins. Ends the previous call if it is still open.

        Args:
            name: Name of the tool.
            call_id: The model's id for the call; by default one is derived from the request's id.
        """
        self._log.begin_call(name, call_id)

    def arguments(self, text: str) -> None:
        """A piece of the JSON text of the call's arguments."""
        self._log.arguments(text)

    def end_call(self) -> None:
        """The call is complete. Does nothing if no call is open."""
        self._log.end_call()


class _TurnLog:
    """The events of one choice, numbered and in order; neighbours of the same kind are joined."""

    def __init__(self, choice: int, request_id: str) -> None:
        self.num_calls = 0
        self._choice = choice
        self._request_id = request_id
        self._in_call = False
        self._events: Batch = []

    def say(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if not text:
            return
        self.end_call()
        last = self._events[-1] if self._events else None
        if isinstance(last, Text | Reasoning) and type(last) is kind:
            last.text += text
        else:
            self._events.append(kind(self._choice, text))

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.end_call()
        number, self._in_call = self.num_calls, True
        self.num_calls += 1
        if call_id is None:
            # Not drawn at random: a request that is repeated gets the same reply.
            text = f"{self._request_id} {self._choice} {number}"
            call_id = f"call_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        self._events.append(ToolCallBegin(self._choice, number, call_id, name))

    def arguments(self, text: str) -> None:
        assert self._in_call, "arguments outside of a call"
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments):
            last.text += text
        elif text:
            self._events.append(ToolCallArguments(self._choice, self.num_calls - 1, text))

    def end_call(self) -> None:
        if self._in_call:
            self._in_call = False
            self._events.append(ToolCallEnd(self._choice, self.num_calls - 1))

    def take(self) -> Batch:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class Parsing:
    """How the text of a request is parsed: by several parsers in turn, each of which reads what the
    previous one treats as text (reasoning is split off first, then tool calls).

    Args:
        kinds: The parsers, in that order.
        setup: What they may know about the request.
    """

    def __init__(self, kinds: Sequence[type[OutputParser]], setup: ParserSetup) -> None:
        self._kinds = [kind for kind in kinds if setup.tools or not kind.needs_tools]
        self._setup = setup

    def begin(self, choice: int, request_id: str) -> ChoiceParser | None:
        """A parser for one choice; `None` if there is nothing to parse."""
        if not self._kinds:
            return None
        return ChoiceParser(self._kinds, self._setup, _TurnLog(choice, request_id))


class ChoiceParser:
    """The parsers of one choice, in turn."""

    def __init__(
        self, kinds: Sequence[type[OutputParser]], setup: ParserSetup, log: _TurnLog
    ) -> None:
        self._log = log
        self._parsers: list[OutputParser] = []
        follower: OutputParser | None = None
        for kind in reversed(kinds):
            follower = kind(setup, TurnWriter(log, follower))
            self._parsers.insert(0, follower)

    @property
    def num_calls(self) -> int:
        """Number of tool calls so far."""
        return self._log.num_calls

    def feed(self, text: str) -> Batch:
        """The events of the next piece of text."""
        if text:
            self._parsers[0].feed(text)
        return self._log.take()

    def finish(self) -> Batch:
        """The events that were held back."""
        for parser in self._parsers:
            parser.finish()
        self._log.end_call()
        return self._log.take()
