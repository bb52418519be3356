"""Wraps text that arrives in pieces at words, to fit a terminal.

A word is held back until it is complete, so nothing on the screen ever moves. Control characters
are dropped, because a model's output must not control the terminal.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

_TAB = "    "


def terminal_width() -> int:
    """The current number of columns of the terminal."""
    return max(20, shutil.get_terminal_size().columns)


def columns(text: str) -> int:
    """Columns that a text takes on a terminal (Unicode TR 11: wide and full-width characters take
    two)."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


class Plain:
    """Writes pieces as they are: for pipes and files."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def feed(self, piece: str) -> None:
        """Write a piece."""
        print(piece, end="", file=self._out, flush=True)

    def end(self) -> None:
        """The text is complete."""
        print(file=self._out, flush=True)


class Wrapped:
    """Writes pieces with line breaks between words, at the terminal's current width."""

    def __init__(self, out: TextIO, width: Callable[[], int] = terminal_width) -> None:
        self._out = out
        self._width = width
        self._column = 0
        self._gap = self._word = ""
        self._goes_on = False

    def feed(self, piece: str) -> None:
        """Take a piece and write all words that are complete."""
        for character in piece:
            if character == "\n":
                self._put()
                self._out.write("\n")
                self._column, self._gap, self._goes_on = 0, "", False
            elif character in " \t":
                self._put()
                self._gap += " " if character == " " else _TAB
                self._goes_on = False
            elif unicodedata.category(character) != "Cc":
                self._letter(character)
        self._out.flush()

    def end(self) -> None:
        """The text is complete: write the rest and end the line."""
        self.feed("\n")

    def _letter(self, character: str) -> None:
        """Scripts with wide characters have no spaces, so a line may break before and after each
        character.

        A word longer than a line is not broken here but by the terminal, so that it can be copied
        whole.
        """
        wide = columns(character) == 2
        if wide:
            self._put()
            self._goes_on = False
        self._word += character
        if wide:
            self._put()
        elif self._goes_on or columns(self._word) >= self._width():
            self._put()
            self._goes_on = True

    def _put(self) -> None:
        if not self._word:
            return
        size = columns(self._word)
        if (
            not self._goes_on
            and self._column
            and self._column + len(self._gap) + size > self._width()
        ):
            self._out.write("\n")
            self._column, self._gap = 0, ""
        self._out.write(self._gap + self._word)
        self._column = (self._column + len(self._gap) + size - 1) % self._width() + 1
        self._gap = self._word = ""


def writer() -> Plain | Wrapped:
    """The writer for replies: wrapped at words on a terminal, unchanged elsewhere."""
    return Wrapped(sys.stdout) if sys.stdout.isatty() else Plain(sys.stdout)
