"""Calls written as Python: Llama 3.2, Llama 4, and other models that were trained to.

`[f(city="Paris", days=2), g()]`, the whole answer or the beginning of it. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import ClassVar, Final

from quire.serving.parsers.json_text import encoded
from quire.serving.parsers.python_text import PythonValue
from quire.serving.parsers.scan import MAX_SHORT, Marks, Scanner
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter

_WORD: Final = re.compile(r"[\w.]*")
_BEFORE: Final = re.compile(r"[\s,]*")
_FREE: Final = r"[\s\x1C-\x1F]*([^\s\x1C-\x1F\[](?s:.*))?"
"""An answer that does not begin with a bracket."""


class Pythonic(Scanner):
    """See the module. Only calls of tools that are offered count, because an answer may begin with
    a bracket as well."""

    needs_tools = True
    opening: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    """Marks around the list, left out wherever they are."""

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. An answer does not begin with a bracket."""
        leads: tuple[tuple[str, ...], ...] = (("", ""),)
        if cls.opening and cls.opening[0] in vocabulary:
            leads += ((_FREE, cls.opening[0], cls.closing[0]),)
        # Text that is a mark, and no token of its own, may be anywhere in an answer.
        told = not cls.opening or len(leads) > 1
        return CallSyntax(
            "NAME(", ")", ", ", "[", "]",
            free=_FREE if told else "", leads=leads, style="python", names=r"[A-Za-z0-9_.]+",
        )  # fmt: skip

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        marks = (*self.opening, *self.closing)
        self._marks = Marks(*marks) if marks else None
        self._starts = Marks(*self.opening) if self.opening else None
        self._offered = {tool.name: tool for tool in setup.tools}
        self._before: list[str] = []
        """What was read of a list until it has a call."""
        self._word = ""
        self._any_call = False
        self._value = PythonValue(out.arguments)
        self._names: list[str] = []
        """Of the parameters of the tool that is called."""
        self._num_arguments = 0
        self.state = type(self).read_start

    def read_start(self) -> bool:
        """The first character of a list, or of text."""
        if not self.skip_space():
            return False
        mark = self._starts.begins(self.text, self.at, self.final) if self._starts else ""
        if mark is None:
            return False
        self.at += len(mark)
        self._before += [*self.skipped, *([] if mark in self.setup.hidden else [mark])]
        self.skipped = []
        if mark:
            return True
        if self.text[self.at] == "[":
            self._before.append("[")
            self.at += 1
            self._any_call = False
            self._begin_name()
        else:
            self._give_up()
        return True

    def _begin_name(self) -> None:
        self._word = ""
        self.state = type(self).read_name

    def read_text(self) -> bool:
        """Text, until a mark."""
        if self._marks is None:
            if self.at < len(self.text):
                self.say(self.text[self.at :])
                self.at = len(self.text)
            return False
        mark = self.take_text(self._marks)
        if mark in self.opening:
            self._before = [] if mark in self.setup.hidden else [mark]
            self.skipped = []
            self.state = type(self).read_start
        return bool(mark)

    def read_name(self) -> bool:
        """The name of a call."""
        if not self._word:
            if not self.skip_space():
                return False
            self._before += self.skipped
            self.skipped = []
        if not self._take_word():
            return False
        if not self._word and self._any_call and self.text[self.at] == "]":
            self.at += 1
            self._before = []
            self.state = type(self).read_text
        elif self.text[self.at] == "(" and self._word in self._offered:
            self.at += 1
            self._before, self._any_call = [], True
            self.begin(self._word)
            schema = self._offered[self._word].parameters or {}
            properties = schema.get("properties")
            self._names = list(properties) if isinstance(properties, dict) else []
            self._num_arguments = 0
            self.state = type(self).read_argument
        else:
            self._before.append(self._word)
            self._give_up()
        return True

    def _take_word(self) -> bool:
        """Add to `_word`; whether it is complete and something follows. Too long a word is cut."""
        found = _WORD.match(self.text, self.at)
        assert found is not None
        end = min(found.end(), self.at + MAX_SHORT + 1 - len(self._word))
        self._word += self.text[self.at : end]
        self.at = end
        return self.at < len(self.text)

    def _give_up(self) -> None:
        before, self._before = self._before, []
        for piece in before:
            self.say(piece)
        self.state = type(self).read_text

    def read_argument(self) -> bool:
        """Before an argument, or the end of the call."""
        found = _BEFORE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if self.at == len(self.text):
            return False
        here = self.text[self.at]
        if here == ")":
            self.at += 1
            self._end_call()
        elif here in "]}:=":
            self._end_call()
        elif here.isalpha() or here == "_":
            self._word = ""
            self.state = type(self).read_key
        else:
            self._begin_value(self._positional())
        return True

    def read_key(self) -> bool:
        """A word that may be the name of an argument."""
        if not self._take_word() or not self.skip_space():
            return False
        if self.text[self.at] == "=":
            self.at += 1
            self._key(self._word)
            self.state = type(self).read_value_start
        else:
            self._begin_value(self._positional())
            self._value.take(self._word + " ", 0)
            self.state = type(self).read_argument
        return True

    def _key(self, name: str) -> None:
        self.out.arguments("{" if self._num_arguments == 0 else ", ")
        self._num_arguments += 1
        self.out.arguments(f'"{encoded(name)}": ')

    def _positional(self) -> str:
        """The name of an argument that is given by its place: that of the parameter there."""
        number = self._num_arguments
        return self._names[number] if number < len(self._names) else f"arg{number}"

    def _begin_value(self, name: str) -> None:
        self._key(name)
        self._value = PythonValue(self.out.arguments)
        self.state = type(self).read_value

    def read_value_start(self) -> bool:
        """After `=`."""
        if not self.skip_space():
            return False
        if self.text[self.at] in ",)]}:=":
            self.out.arguments("null")
            self.state = type(self).read_argument
        else:
            self._value = PythonValue(self.out.arguments)
            self.state = type(self).read_value
        return True

    def read_value(self) -> bool:
        """In a value."""
        self.at = self._value.take(self.text, self.at)
        if self._value.done:
            self.state = type(self).read_argument
        return self._value.done

    def _end_call(self) -> None:
        self.out.arguments("}" if self._num_arguments else "{}")
        self.out.end_call()
        self.state = type(self).read_next

    def read_next(self) -> bool:
        """After a call: another one, or the end of the list."""
        if not self.skip_space():
            return False
        if self.text[self.at] == ",":
            self.at += 1
            self.skipped = []
            self._begin_name()
        else:
            self.at += self.text[self.at] == "]"
            self.state = type(self).read_text
        return True

    def end_of_text(self) -> None:
        """The text may end within a list."""
        if self.state is type(self).read_value:
            self._value.end()
        elif self.state in (type(self).read_start, type(self).read_name):
            self._before += [*self.skipped, self._word]
            self._give_up()


class Llama4Pythonic(Pythonic):
    """Llama 4: the list may be between `<|python_start|>` and `<|python_end|>`."""

    opening = ("<|python_start|>",)
    closing = ("<|python_end|>",)
    special_tokens = (*opening, *closing)
