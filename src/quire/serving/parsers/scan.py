"""What most parsers are made of: marks found in text that comes in pieces, and a machine of states.

A parser that waits for more text holds back only what could still be the beginning of a mark, so
its buffer stays short and its time is proportional to the text, however that is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from quire.serving.parsing import OutputParser, ParserSetup, TurnWriter

State = Callable[[Any], bool]
"""A state reads from `Scanner.text` at `Scanner.at`. It returns whether to go on: false if it needs
more text. While it returns true it must have consumed something or changed the state."""

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


MAX_SHORT: Final = 256
"""Longest name, key or header that is read, in characters. What is longer is none."""


def is_name(text: str) -> bool:
    """Whether a tool can have this name."""
    return _NAME.fullmatch(text) is not None


class Marks:
    """Fixed strings to look for. None may be the beginning of another."""

    def __init__(self, *marks: str) -> None:
        assert not any(a != b and b.startswith(a) for a in marks for b in marks), marks
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._longest = max(map(len, marks))
        self._firsts = frozenset(mark[0] for mark in marks)
        self._beginnings = frozenset(mark[:i] for mark in marks for i in range(1, len(mark)))

    def find(self, text: str, at: int, final: bool) -> tuple[int, str]:
        """The first mark in `text[at:]`: where it begins, and the mark.

        Without one: how far the text is certain to hold none, and the empty string. `final`: no
        more text comes.
        """
        if found := self._pattern.search(text, at):
            return found.start(), found.group()
        if not final:
            for i in range(max(at, len(text) - self._longest + 1), len(text)):
                if text[i] in self._firsts and text[i:] in self._beginnings:
                    return i, ""
        return len(text), ""

    def begins(self, text: str, at: int, final: bool) -> str | None:
        """The mark that `text[at:]` begins with, empty if it begins with none; `None`: too early to
        say."""
        if found := self._pattern.match(text, at):
            return found.group()
        if final or len(text) - at >= self._longest:
            return ""
        return None if at == len(text) or text[at:] in self._beginnings else ""


class Scanner(OutputParser):
    """A machine of states over the text. Subclasses begin in the state `read_text`, which they
    write, and say text and calls by the methods here.

    White space between a call and the text next to it belongs to the syntax and is left out. Text
    without calls stays as it is.
    """

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self.text = ""
        self.at = 0
        self.final = False
        self.state: State = type(self).read_text
        self._spaces: list[str] = []
        """White space that is said if more text follows, and left out before a call."""
        self._after_call = False
        self.skipped: list[str] = []
        """White space that `skip_space` consumed; states that may need it begin with none."""

    def feed(self, text: str) -> None:
        """See `OutputParser`."""
        self.text = self.text[self.at :] + text
        self.at = 0
        self._run()

    def finish(self) -> None:
        """See `OutputParser`."""
        self.final = True
        self._run()
        self.end_of_text()
        for space in self._spaces:
            self.out.text(space)

    def _run(self) -> None:
        while self.state(self):
            pass

    def read_text(self) -> bool:
        """The first state."""
        raise NotImplementedError

    def end_of_text(self) -> None:
        """The states have read everything: say what they still hold back."""

    def say(self, text: str) -> None:
        """A piece of the answer."""
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            for space in self._spaces:
                self.out.text(space)
            self._spaces = []
            self._after_call = False
            self.out.text(kept)
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def say_mark(self, mark: str) -> None:
        """A mark that turned out to be text."""
        if mark not in self.setup.hidden:
            self.say(mark)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._spaces = []
        self._after_call = True
        self.out.begin_call(name, call_id)

    def take_text(self, marks: Marks) -> str:
        """Say the text up to the next mark, and consume it and the mark. Returns the mark; empty if
        there is none yet."""
        end, mark = marks.find(self.text, self.at, self.final)
        if end > self.at:
            self.say(self.text[self.at : end])
        self.at = end + len(mark)
        return mark

    def take_short(self, marks: Marks, taken: str) -> tuple[str, str | None]:
        """Read a name or the like up to the next mark, which is not consumed.

        Args:
            marks: What may come after it.
            taken: What was read of it before.

        Returns:
            All of it so far, and the mark; the empty string if it is too long, `None` if more text
            is needed.
        """
        end, mark = marks.find(self.text, self.at, self.final)
        most = self.at + MAX_SHORT + 1 - len(taken)
        if end > most:
            end, mark = most, ""
        taken += self.text[self.at : end]
        self.at = end
        return taken, mark or (None if len(taken) <= MAX_SHORT else "")

    def skip_to(self, marks: Marks) -> str:
        """The same, but what is before the mark is dropped."""
        end, mark = marks.find(self.text, self.at, self.final)
        self.at = end + len(mark)
        return mark

    def skip_space(self) -> bool:
        """Consume white space; whether anything else follows."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None, "the pattern matches everywhere"
        if self.at < found.end():
            self.skipped.append(found.group())
        self.at = found.end()
        return self.at < len(self.text)

    def say_opening(self, mark: str) -> None:
        """A mark opened nothing: it is text, and so is the white space that was skipped since."""
        self.say_mark(mark)
        skipped, self.skipped = self.skipped, []
        for space in skipped:
            self.say(space)
