"""Calls written as JSON objects in a row or in a list, after a mark or at the start of the text.

`MARK[{"name": "f", "arguments": {...}}, ...]`, `MARK{...}`, or the objects alone. The syntaxes of
this kind differ in their marks only.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Final

from quire.serving.parsers.call_object import ARGUMENT_KEYS, NAME_KEYS, CallObject
from quire.serving.parsers.scan import Marks, Scanner
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter

_BETWEEN: Final = ",;"
_BEGIN: Final = '{"name": "NAME", "arguments": '


class CallList(Scanner):
    """See the module. What follows a mark and is no call stays text, mark and all."""

    needs_tools = True
    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]] = ()
    """Marks that are left out wherever they are."""
    at_start: ClassVar[bool] = False
    """Whether a text may begin with calls without any mark. Then they must be of tools that are
    offered, because an answer may be JSON as well."""
    name_keys: ClassVar[tuple[str, ...]] = NAME_KEYS
    argument_keys: ClassVar[tuple[str, ...]] = ARGUMENT_KEYS

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        marks = (*self.opening, *self.closing)
        self._marks = Marks(*marks) if marks else None
        self._offered = frozenset(tool.name for tool in setup.tools)
        self._call: CallObject | None = None
        self._bare = False
        self._in_list = False
        self._before: list[str] = []
        """What was read since the list may have begun, until there is a call."""
        if self.at_start:
            self.state = type(self).read_start

    def read_start(self) -> bool:
        """The first word of the text, or of a line."""
        if not self.skip_space():
            return False
        before, self.skipped = self.skipped, []
        if self.text[self.at] in "{[":
            self._open(before, bare=True)
        else:
            for space in before:
                self.say(space)
            self.state = type(self).read_text
        return True

    def read_text(self) -> bool:
        """Text, until a mark."""
        assert self._marks is not None, "a subclass without marks reads text itself"
        mark = self.take_text(self._marks)
        if mark in self.opening:
            self._open([] if mark in self.setup.hidden else [mark], bare=False)
        return bool(mark)

    def _open(self, before: list[str], *, bare: bool) -> None:
        self._before, self._bare, self._in_list = before, bare, False
        self.skipped = []
        self.state = type(self).read_first

    def read_first(self) -> bool:
        """What must be the first call, perhaps in a list."""
        if not self.skip_space():
            return False
        self._before += self.skipped
        self.skipped = []
        here = self.text[self.at]
        if here == "[" and not self._in_list:
            self._in_list = True
            self._before.append(here)
            self.at += 1
        elif here == "{":
            self._begin_object()
        else:
            self._give_up()
        return True

    def _begin_object(self) -> None:
        self._call = CallObject(
            self.begin,
            self.out.arguments,
            self._offered if self._bare else None,
            bare=self._bare,
            name_keys=self.name_keys,
            argument_keys=self.argument_keys,
        )
        self.state = type(self).read_object

    def read_object(self) -> bool:
        """In an object."""
        call = self._call
        assert call is not None
        self.at = call.take(self.text, self.at)
        if not (call.done or call.failed):
            return False
        self._close(call)
        return True

    def _close(self, call: CallObject) -> None:
        self._call = None
        if call.begun:
            self.out.end_call()
            self._before = []
            self.state = type(self).read_next
        else:
            self._before.append(call.raw)
            self._give_up()

    def read_next(self) -> bool:
        """After a call: another one, or the end of the list."""
        while self.skip_space() and self.text[self.at] in _BETWEEN:
            self.at += 1
        if self.at == len(self.text):
            return False
        if self.text[self.at] == "{":
            self._begin_object()
            return True
        if self.text[self.at] == "]" and self._in_list:
            self.at += 1
        self._ended()
        return True

    def _ended(self) -> None:
        """The list is over."""
        self.state = type(self).read_text

    def _give_up(self) -> None:
        """There is no call here: it was text."""
        before, self._before = self._before, []
        for piece in before:
            self.say(piece)
        self.state = type(self).read_text

    def end_of_text(self) -> None:
        """The text may end within a list."""
        if self._call is not None:
            self._call.cut()
            self._close(self._call)
        elif self.state is type(self).read_first:
            self._before += self.skipped
            self._give_up()
        elif self.state is type(self).read_start:
            for space in self.skipped:
                self.say(space)


class Llama3Json(CallList):
    """Llama 3.1 to 3.3 and Llama 4 in JSON form: `{"name": "f", "parameters": {...}}`, several with
    `;` between them, with or without `<|python_tag|>` before."""

    opening = ("<|python_tag|>",)
    closing = ("<|eom_id|>", "<|eot_id|>")
    special_tokens = opening
    at_start = True

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. An answer begins with neither a brace nor a bracket."""
        begin = '{"name": "NAME", "parameters": '
        if cls.opening[0] not in vocabulary:  # then it may be anywhere in a text
            return CallSyntax(begin, "}", "; ")
        free = r"\s*([^\s\[{](?s:.*))?"
        return CallSyntax(begin, "}", "; ", free=free, leads=(("", ""), (free, cls.opening[0])))


class Granite(CallList):
    """Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}]`; some versions write
    `<tool_call>`."""

    opening = ("<|tool_call|>", "<tool_call>")
    closing = ("</tool_call>",)
    special_tokens = (*opening, *closing)

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(_BEGIN, "}", ", ", "<|tool_call|>[", "]", "<|tool_call|>")


class Granite20bFc(CallList):
    """Granite 20B Functioncalling: `<function_call> {"name": "f", "arguments": {...}}`, once per
    call."""

    opening = ("<function_call>",)
    special_tokens = opening

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(f"<function_call> {_BEGIN}", "}", "\n", trigger="<function_call>")


class Phi4Mini(CallList):
    """Phi-4-mini: `functools[{"name": "f", "arguments": {...}}]`, or the list between
    `<|tool_call|>` and `<|/tool_call|>`."""

    opening = ("functools", "<|tool_call|>")
    closing = ("<|/tool_call|>",)
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(_BEGIN, "}", ", ", "functools[", "]", "functools[")


class InternLM(CallList):
    """InternLM 2 and 2.5: `<|action_start|><|plugin|>{"name": "f", "parameters": {...}}
    <|action_end|>`."""

    opening = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    closing = ("<|action_end|>",)
    special_tokens = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(
            '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
            "}<|action_end|>",
            trigger="<|action_start|><|plugin|>",
        )
