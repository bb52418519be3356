"""Parsers: find reasoning and tool calls in the text of a model. One class per syntax.

A parser is fed the text of one choice, in pieces as it is generated or all at once. This must not
make a difference: a parser gives the same result however the text is split. What a model says is
not to be trusted: a parser never fails, takes time in proportion to the text, and evaluates
nothing. The parsers themselves are in `serving/parsers/`. Knows no engine and no wire format.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from quire.registry import Registry
from quire.serving.tools import ToolSpec
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
    tools: Sequence[ToolSpec] = ()
    """Empty if none are offered."""
    hidden: frozenset[str] = frozenset()
    """Special tokens that the parser is shown and the reader of the reply is not."""
    held: frozenset[str] = frozenset()
    """Tools whose calls a grammar holds to their schemas, in the parser's own syntax: there a value
    without a type is exactly what the grammar takes it for."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a syntax writes a call, for grammars that force one: `NAME` stands for the tool's name.
    Special tokens of the model are written as their text."""

    begin: str
    """What comes before the arguments."""
    end: str
    """What comes after them."""
    separator: str = ""
    """Between two calls."""
    before: str = ""
    after: str = ""
    """Around all calls."""
    trigger: str | None = None
    """What certainly begins a call in free text; a beginning of `begin`, or of `before` and
    `begin`. `None`: nothing does."""
    number: str = ""
    """A regular expression for what is between `begin` and `middle`, if there is something."""
    middle: str = ""
    one_call: bool = False
    """A reply has one call at most."""
    free: str = ""
    """Where there is no trigger because calls begin by their place: a regular expression for
    answers without calls."""
    leads: tuple[tuple[str, ...], ...] = ()
    """With `free`: what may come before all calls, a regular expression and a mark each, and
    perhaps what may come after them."""
    style: str = "json"
    """How arguments are written: a `style` of structural tags."""
    others: tuple[tuple[str, str], ...] = ()
    """Other ways in which a model may write what comes before and after the arguments: they are
    read as calls, too, so they are held to the schema where nothing forces a call."""
    names: str = ""
    """A regular expression for the names that a tool can have in this syntax; empty: any."""
    asides: tuple[tuple[str, str], ...] = ()
    """Where messages have headers of special tokens: beginnings and ends of those that may come
    before a call or an answer. The parser's `answer` begins an answer."""


class OutputParser(ABC):
    """Parses one choice. Subclasses override `feed`, and `finish` if they ever hold text back.

    Args:
        setup: What is known about the request.
        out: Receives what is found.
    """

    needs_tools: ClassVar[bool] = False
    """Requests without tools are not parsed by this class: their output is text."""
    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Marks of the syntax that may be special tokens. They are shown to the parser even though
    special tokens are otherwise left out of the text."""
    id_letters: ClassVar[int] = 0
    """If above 0, ids of calls are this many letters and digits (some templates insist)."""

    thoughts: ClassVar[tuple[str, str] | None] = None
    """The tags around reasoning, for parsers of reasoning, for grammars that apply after it."""
    answer: ClassVar[str] = ""
    """What begins the answer, with or without reasoning before it, if anything does."""

    @classmethod
    def thoughts_after(cls, prompt: str) -> tuple[str, str] | None:
        """`thoughts`, of models that learn from the prompt which tags to use.

        Args:
            prompt: As the template rendered it.
        """
        return cls.thoughts

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax | None:
        """How a call is written, for parsers of calls; `None` if no grammar can say it.

        Args:
            vocabulary: Texts of the model's special tokens.
        """
        return None

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        self.setup = setup
        self.out = out

    @abstractmethod
    def feed(self, text: str) -> None:
        """Parse the next piece of text; it may begin and end anywhere."""

    def finish(self) -> None:  # noqa: B027 - most hold nothing back
        """The text has ended: write whatever was held back."""


_HERE: Final = "quire.serving.parsers"
PARSERS: Final[Registry[type[OutputParser]]] = Registry(
    "tool parser",
    {
        "hermes": f"{_HERE}.hermes:Hermes",
        "qwen3_json": f"{_HERE}.hermes:Hermes",
        "granite4": f"{_HERE}.hermes:Hermes",
        "llama3_json": f"{_HERE}.call_list:Llama3Json",
        "llama4_json": f"{_HERE}.call_list:Llama3Json",
        "llama4_pythonic": f"{_HERE}.pythonic:Llama4Pythonic",
        "pythonic": f"{_HERE}.pythonic:Pythonic",
        "mistral": f"{_HERE}.mistral:Mistral",
        "qwen3_xml": f"{_HERE}.xml_calls:Qwen3Xml",
        "qwen3_coder": f"{_HERE}.xml_calls:Qwen3Xml",
        "deepseek_v3": f"{_HERE}.sections:DeepSeekV3",
        "deepseek_v31": f"{_HERE}.sections:DeepSeekV31",
        "deepseek_v3_1": f"{_HERE}.sections:DeepSeekV31",
        "glm45": f"{_HERE}.xml_calls:Glm45",
        "glm47": f"{_HERE}.xml_calls:Glm45",
        "kimi_k2": f"{_HERE}.sections:KimiK2",
        "granite": f"{_HERE}.call_list:Granite",
        "granite-20b-fc": f"{_HERE}.call_list:Granite20bFc",
        "phi4_mini_json": f"{_HERE}.call_list:Phi4Mini",
        "phi4": f"{_HERE}.call_list:Phi4Mini",
        "internlm": f"{_HERE}.call_list:InternLM",
        "openai": f"{_HERE}.harmony:Harmony",
        "json": f"{_HERE}.json_calls:JsonCalls",
    },
    plugins="output_parser",
    subclass_of="quire.serving.parsing:OutputParser",
)
"""Parsers of tool calls by name; vLLM's names."""

REASONING_PARSERS: Final[Registry[type[OutputParser]]] = Registry(
    "reasoning parser",
    {
        "think_tags": f"{_HERE}.think_tags:ThinkTags",
        "qwen3": f"{_HERE}.think_tags:ThinkTags",
        "deepseek_r1": f"{_HERE}.think_tags:DeepSeekR1",
        "deepseek_v3": f"{_HERE}.think_tags:ThinkTags",
        "glm45": f"{_HERE}.think_tags:ThinkTags",
        "glm47": f"{_HERE}.think_tags:ThinkTags",
        "kimi_k2": f"{_HERE}.think_tags:ThinkTags",
        "openai_gptoss": f"{_HERE}.harmony:Harmony",
        "granite": f"{_HERE}.granite_thoughts:GraniteThoughts",
        "mistral": f"{_HERE}.think_tags:MistralThink",
        "seed_oss": f"{_HERE}.think_tags:SeedThink",
    },
    plugins="reasoning_parser",
    subclass_of="quire.serving.parsing:OutputParser",
)
"""Parsers of reasoning by name; vLLM's names. They come before the parser of tool calls."""


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
    """The events of one choice, numbered and in order; neighbours of the same kind are joined.

    Args:
        choice: Of which choice.
        request_id: What ids of calls are derived from.
        rules: What of it the reply has.
        id_letters: See `OutputParser.id_letters`.
    """

    def __init__(self, choice: int, request_id: str, rules: ReplyRules, id_letters: int) -> None:
        self.num_calls = 0
        self.reasons = False
        """There was reasoning, whether or not the reply has it."""
        self._choice = choice
        self._request_id = request_id
        self._rules = rules
        self._id_letters = id_letters
        self._in_call = self._muted = False
        self._events: Batch = []
        self._pieces: list[str] = []
        """Text of the last event, joined at its end: many pieces may come at once."""

    def say(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if kind is Reasoning and text:
            self.reasons = True
            if not self._rules.reasoning:
                return
        if not text:
            return
        self.end_call()
        self._add(kind(self._choice, text), text)

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.end_call()
        if self.num_calls and not self._rules.parallel_calls:
            self._muted = True
            return
        number, self._in_call = self.num_calls, True
        self.num_calls += 1
        call_id = self._derived_id(number) if call_id is None else call_id
        self._close()
        self._events.append(ToolCallBegin(self._choice, number, call_id, name))

    def _derived_id(self, number: int) -> str:
        # Not drawn at random: a request that is repeated gets the same reply.
        text = f"{self._request_id} {self._choice} {number}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return digest[: self._id_letters] if self._id_letters else f"call_{digest[:24]}"

    def arguments(self, text: str) -> None:
        if self._muted or not text:
            return
        assert self._in_call, "arguments outside of a call"
        self._add(ToolCallArguments(self._choice, self.num_calls - 1, text), text)

    def end_call(self) -> None:
        self._muted = False
        if self._in_call:
            self._in_call = False
            self._close()
            self._events.append(ToolCallEnd(self._choice, self.num_calls - 1))

    def _add(self, event: Text | Reasoning | ToolCallArguments, text: str) -> None:
        if not self._pieces or type(self._events[-1]) is not type(event):
            self._close()
            self._events.append(event)
        self._pieces.append(text)

    def _close(self) -> None:
        """Give the last event its whole text."""
        if len(self._pieces) > 1:
            last = self._events[-1]
            assert isinstance(last, Text | Reasoning | ToolCallArguments)
            last.text = "".join(self._pieces)
        self._pieces = []

    def take(self) -> Batch:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """What the reply has of that which is found."""

    reasoning: bool = True
    """Otherwise it is left out."""
    parallel_calls: bool = True
    """Otherwise calls after the first are left out."""


class Parsing:
    """How the text of a request is parsed: by several parsers in turn, each of which reads what the
    previous one treats as text (reasoning is split off first, then tool calls).

    Args:
        kinds: The parsers, in that order.
        setup: What they may know about the request.
        rules: What the reply has of that which they find.
    """

    def __init__(
        self,
        kinds: Sequence[type[OutputParser]],
        setup: ParserSetup,
        rules: ReplyRules = ReplyRules(),
    ) -> None:
        self._kinds = [kind for kind in kinds if setup.tools or not kind.needs_tools]
        self._setup = setup
        self._rules = rules
        self.thoughts_end: int | None = None
        """The token that ends reasoning, if one does."""

    def begin(self, choice: int, request_id: str) -> ChoiceParser | None:
        """A parser for one choice; `None` if there is nothing to parse."""
        if not self._kinds:
            return None
        letters = max(kind.id_letters for kind in self._kinds)
        log = _TurnLog(choice, request_id, self._rules, letters)
        return ChoiceParser(self._kinds, self._setup, log, self.thoughts_end)


class ChoiceParser:
    """The parsers of one choice, in turn."""

    def __init__(
        self,
        kinds: Sequence[type[OutputParser]],
        setup: ParserSetup,
        log: _TurnLog,
        thoughts_end: int | None = None,
    ) -> None:
        self._log = log
        self._thoughts_end = thoughts_end
        self._before_end = 0
        """Tokens until reasoning ended, or all of them so far."""
        self._ended = False
        self._parsers: list[OutputParser] = []
        follower: OutputParser | None = None
        for kind in reversed(kinds):
            follower = kind(setup, TurnWriter(log, follower))
            self._parsers.insert(0, follower)

    @property
    def num_calls(self) -> int:
        """Number of tool calls so far."""
        return self._log.num_calls

    def count(self, token_ids: list[int]) -> None:
        """Note the next tokens, so that those of the reasoning can be told."""
        if self._thoughts_end is None or self._ended:
            return
        self._ended = self._thoughts_end in token_ids
        length = token_ids.index(self._thoughts_end) if self._ended else len(token_ids)
        self._before_end += length

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags left out as far as they come after it; 0 if no token
        says where it ends."""
        counted = self._log.reasons and self._thoughts_end is not None
        return self._before_end if counted else 0

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
