"""Counts what a JSON body holds while it arrives, so that a body that would be expensive to decode
is refused before that.

Decoding holds the interpreter from beginning to end, and an object or a list takes fifty times as
long as a byte of text. Knows no fields, and does not say whether a body is valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from quire.serving.limits import CONTAINERS, DEPTH, ENTRIES, VALUES

SMALL: Final = 128 * 1024
"""Bodies up to this many bytes are not counted: decoding the worst of them takes some
milliseconds."""
PIECE: Final = 64 * 1024
"""Bytes that are counted at a time, in up to two milliseconds."""
_STRING: Final = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(")[^"\\]*+(?:\\.[^"\\]*+)*+\\?\Z', re.DOTALL
)
"""A whole string, or one that goes on after the piece, whose opening quote is kept."""
_BRACKETS: Final = b"[]{}"
_NO_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))


class BodyScan:
    """What has arrived of one body."""

    def __init__(self) -> None:
        self._in_string = self._is_escaped = False
        self._depth = self._containers = self._values = self._entries = 0

    def feed(self, piece: bytes) -> None:
        """Count the next bytes, at most `PIECE` of them.

        Raises:
            InvalidRequest: the body is over a limit.
        """
        if self._is_escaped:
            piece = piece[1:]
        if self._in_string:
            piece = b'"' + piece
        outside = _STRING.sub(rb"\1", piece)
        self._in_string = outside.endswith(b'"')
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        self._is_escaped = self._in_string and slashes % 2 == 1
        self._values += outside.count(b",")
        VALUES.check_arriving(self._values)
        self._entries += outside.count(b":")
        ENTRIES.check_arriving(self._entries)
        brackets = outside.translate(None, _NO_BRACKETS)
        self._containers += brackets.count(b"[") + brackets.count(b"{")
        CONTAINERS.check_arriving(self._containers)
        for bracket in brackets:
            self._depth += 1 if bracket in b"[{" else -1
            DEPTH.check_arriving(self._depth)


def pieces(data: bytes) -> Iterator[bytes]:
    """Bytes in pieces that are counted at a time."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
