"""Calls in sections of special tokens: DeepSeek V3 and V3.1, Kimi K2.

`SECTION_BEGIN CALL_BEGIN header SEPARATOR body CALL_END ... SECTION_END`. The syntaxes differ in
the marks, and in whether the name is in the header or begins the body.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Final

from quire.serving.parsers.json_text import JsonValue
from quire.serving.parsers.scan import Marks, Scanner, is_name
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter


class SectionCalls(Scanner):
    """See the module."""

    needs_tools = True
    section: ClassVar[tuple[str, str]]
    """Begins and ends a section; left out wherever they are."""
    call: ClassVar[tuple[str, str]]
    """Begins and ends a call."""
    separator: ClassVar[str]
    """Between the header and the body."""

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        begin, end = self.call
        self._marks = Marks(*self.section, begin, end, self.separator)
        self._after_header = Marks(self.separator, begin, end, *self.section)
        self._ends = Marks(end, self.section[1], begin)
        self._header = ""
        self._value = JsonValue()
        self._other: list[str] = []

    def read_text(self) -> bool:
        """Text, until a call begins."""
        mark = self.take_text(self._marks)
        if mark == self.call[0]:
            self._header = ""
            self.state = type(self).read_header
        elif mark == self.separator:
            self.say_mark(mark)
        return bool(mark)

    def read_header(self) -> bool:
        """What comes before the separator."""
        self._header, mark = self.take_short(self._after_header, self._header)
        if mark is None:
            return False
        if mark != self.separator:
            self._give_up()
            return True
        self._headed(self._header.strip())
        if self.state is not type(self).read_text:
            self.at += len(mark)
        return True

    def _headed(self, header: str) -> None:
        """The header is complete: begin the call that it names."""
        self._start(header, None)

    def _start(self, name: str, call_id: str | None) -> None:
        if not is_name(name):
            self._give_up()
            return
        self.begin(name, call_id)
        self._value, self._other = JsonValue(), []
        self.state = type(self).read_body

    def _give_up(self) -> None:
        self.say_mark(self.call[0])
        self.say(self._header)
        self.state = type(self).read_text

    def read_body(self) -> bool:
        """The arguments: an object."""
        if not self._value.first:
            if not self.skip_space():
                return False
            if self.text[self.at] != "{":
                self.state = type(self).read_other
                return True
        end = self._value.take(self.text, self.at)
        self.out.arguments(self.text[self.at : end])
        self.at = end
        if self._value.done:
            self.state = type(self).read_rest
        return self._value.done

    def read_other(self) -> bool:
        """Arguments that are no object: passed on as they are, up to the end of the call."""
        end, mark = self._ends.find(self.text, self.at, self.final)
        self._other.append(self.text[self.at : end])
        self.at = end
        if mark:
            self._end_other()
            self.state = type(self).read_rest
        return bool(mark)

    def _end_other(self) -> None:
        self.out.arguments("".join(self._other).strip() or "{}")
        self._other = []

    def read_rest(self) -> bool:
        """After the arguments: to the end of the call."""
        end, mark = self._ends.find(self.text, self.at, self.final)
        self.at = end + (len(mark) if mark == self.call[1] else 0)
        if mark:
            self.out.end_call()
            self.state = type(self).read_text
        return bool(mark)

    def end_of_text(self) -> None:
        """The text may end within a call."""
        if self.state is type(self).read_header:
            self._give_up()
        elif self.state is type(self).read_other:
            self._end_other()


class DeepSeekV31(SectionCalls):
    """DeepSeek V3.1: the header is the name, the body the arguments."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"
    special_tokens = (*section, *call, separator)

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(
            f"{cls.call[0]}NAME{cls.separator}",
            cls.call[1],
            "",
            *cls.section,
            trigger=cls.section[0],
        )


class DeepSeekV3(DeepSeekV31):
    """DeepSeek V3 and R1: the header is the word `function`; the body begins with a line that is
    the name, and has the arguments fenced as JSON."""

    _fence: ClassVar[Marks] = Marks("```json", "{")

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(
            f"{cls.call[0]}function{cls.separator}NAME\n```json\n",
            f"\n```{cls.call[1]}",
            "\n",
            *cls.section,
            trigger=cls.section[0],
        )

    def _headed(self, header: str) -> None:
        if self.separator not in self.setup.hidden:
            self._header += self.separator
        self._name = ""
        self.state = type(self).read_name

    def read_name(self) -> bool:
        """The first line of the body."""
        self._name, mark = self.take_short(_LINE, self._name)
        if mark is None:
            return False
        self._header += self._name
        self._start(self._name.strip(), None)
        if self.state is type(self).read_body:
            self.state = type(self).read_fence
        return True

    def read_fence(self) -> bool:
        """White space, and the fence if there is one."""
        if not self.skip_space():
            return False
        fence = self._fence.begins(self.text, self.at, self.final)
        if fence is None:
            return False
        if fence == "```json":
            self.at += len(fence)
        self.state = type(self).read_body
        return True

    def end_of_text(self) -> None:
        """The text may end within the name."""
        if self.state is type(self).read_name:
            self._header += self._name
            self._give_up()
        else:
            super().end_of_text()


_LINE: Final = Marks("\n")


class KimiK2(SectionCalls):
    """Kimi K2: the header is the call's id, `functions.NAME:NUMBER`."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    separator = "<|tool_call_argument_begin|>"
    special_tokens = (*section, *call, separator)

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(
            f"{cls.call[0]}functions.NAME:",
            cls.call[1],
            "",
            *cls.section,
            trigger=cls.section[0],
            number="[0-9]{1,3}",
            middle=cls.separator,
        )

    def _headed(self, header: str) -> None:
        name, colon, number = header.removeprefix("functions.").rpartition(":")
        if colon and number.isdecimal() and number.isascii():
            self._start(name, header)
        else:
            self._start(header.removeprefix("functions."), None)
