"""For models without a syntax of their own: JSON objects that name an offered tool.

At the start of a line, alone, in a list, or fenced as code. An object that names no offered tool,
or has no arguments, stays text.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from quire.serving.parsers.call_list import CallList
from quire.serving.parsers.scan import Marks
from quire.serving.parsing import CallSyntax

_FENCE: Final = Marks("```")
_LINE: Final = Marks("\n")
_LEAD: Final = r"[^\S\n]*([^\s\[{`][^\n]*)?"
"""A line that begins no call."""
_LANGUAGE: Final = re.compile(r"[A-Za-z_]*")


class JsonCalls(CallList):
    """See the module."""

    opening = ()
    at_start = True
    name_keys = ("name", "tool", "tool_name", "function")
    argument_keys = ("arguments", "parameters", "args", "input")
    _fenced = False

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. No line of an answer begins with a brace, a bracket or a fence."""
        return CallSyntax(
            '{"name": "NAME", "arguments": ', "}", ", ", "[", "]",
            free=rf"({_LEAD}\n)*{_LEAD}", leads=((rf"({_LEAD}\n)*", ""),),
        )  # fmt: skip

    def read_start(self) -> bool:
        """The beginning of a line."""
        if not self.skip_space():
            return False
        fence = _FENCE.begins(self.text, self.at, self.final)
        if fence is None:
            return False
        before, self.skipped = self.skipped, []
        if fence:
            self.at += len(fence)
            self._before = [*before, fence]
            self.state = type(self).read_language
        else:
            self._fenced = False
            self._try(before)
        return True

    def read_language(self) -> bool:
        """After a fence: the language, which may be missing."""
        found = _LANGUAGE.match(self.text, self.at)
        assert found is not None
        if found.group():
            self._before.append(found.group())
            self.at = found.end()
        if self.at == len(self.text):
            return False
        before, self._before, self._fenced = self._before, [], True
        self._try(before)
        return True

    def _try(self, before: list[str]) -> None:
        if self._fenced or self.text[self.at] in "{[":
            self._open(before, bare=True)
        else:
            for piece in before:
                self.say(piece)
            self.state = type(self).read_text

    def read_text(self) -> bool:
        """Text to the end of the line."""
        end, mark = _LINE.find(self.text, self.at, self.final)
        end += len(mark)
        if end > self.at:
            self.say(self.text[self.at : end])
        self.at = end
        if mark:
            self.skipped = []
            self.state = type(self).read_start
        return bool(mark)

    def _ended(self) -> None:
        self.skipped = []
        self.state = type(self).read_fence_end if self._fenced else type(self).read_start

    def read_fence_end(self) -> bool:
        """After fenced calls: the end of the fence."""
        if not self.skip_space():
            return False
        fence = _FENCE.begins(self.text, self.at, self.final)
        if fence is None:
            return False
        self.at += len(fence)
        self.skipped = []
        self._fenced = False
        self.state = type(self).read_start
        return True

    def end_of_text(self) -> None:
        """The text may end within a list or a fence."""
        if self.state is type(self).read_language:
            self._give_up()
        else:
            super().end_of_text()
