"""Hermes, Qwen 2.5 and 3, Granite 4, and quire's embedded model: JSON objects in XML-like tags.

`<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`, once per call.
"""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar, Final

from quire.serving.parsers.call_object import CallObject
from quire.serving.parsers.scan import Marks, Scanner
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter


class Hermes(Scanner):
    """See the module. What is in the tags and is no call stays text, tags and all."""

    needs_tools = True
    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"
    special_tokens = (opening, closing)

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        return CallSyntax(
            f'{cls.opening}\n{{"name": "NAME", "arguments": ',
            f"}}\n{cls.closing}",
            "\n",
            trigger=cls.opening,
        )

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._marks = Marks(self.opening, self.closing)
        self._call: CallObject | None = None

    def read_text(self) -> bool:
        """Text, until a call opens. A closing tag without its opening one is left out."""
        mark = self.take_text(self._marks)
        if mark == self.opening:
            self.skipped = []
            self.state = type(self).read_opened
        return bool(mark)

    def read_opened(self) -> bool:
        """After the opening tag."""
        if not self.skip_space():
            return False
        if self.text[self.at] != "{":
            self.say_opening(self.opening)
            self.state = type(self).read_text
            return True
        self._call = CallObject(self.begin, self.out.arguments)
        self.state = type(self).read_object
        return True

    def read_object(self) -> bool:
        """In the object."""
        call = self._call
        assert call is not None
        self.at = call.take(self.text, self.at)
        if not (call.done or call.failed):
            return False
        self._close(call)
        self.state = type(self).read_rest if call.begun else type(self).read_text
        return True

    def read_rest(self) -> bool:
        """After the object: white space and brackets too many, up to the closing tag."""
        while self.skip_space() and self.text[self.at] in _TOO_MANY:
            self.at += 1
        if self.at == len(self.text):
            return False
        self.state = type(self).read_text
        return True

    def end_of_text(self) -> None:
        """The text may end within a call."""
        if self.state is type(self).read_opened:
            self.say_opening(self.opening)
        elif self.state is type(self).read_object and self._call is not None:
            self._call.cut()
            self._close(self._call)

    def _close(self, call: CallObject) -> None:
        self._call = None
        if call.begun:
            self.out.end_call()
        else:
            self.say_opening(self.opening)
            self.say(call.raw)


_TOO_MANY: Final = "}]"
