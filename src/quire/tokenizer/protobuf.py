"""Just enough of protocol buffers to read a sentencepiece model file.

Wire format: https://protobuf.dev/programming-guides/encoding/. Field numbers:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Every length is
checked against the remaining bytes. Knows no tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT: Final = 10


class NotAMessage(ValueError):
    """The bytes are not a message."""


def fields(data: object) -> Iterator[tuple[int, Any]]:
    """Number and value of each field; values are whole numbers, floats (fixed32) or bytes.

    Raises:
        NotAMessage: a field is truncated or of an unknown kind, or `data` is not bytes.
    """
    if not isinstance(data, bytes):
        raise NotAMessage("a number stands where a message should")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            size, at = _varint(data, at)
            yield tag >> 3, _slice(data, at, size)
            at += size
        elif kind == _FIXED32:
            yield tag >> 3, struct.unpack("<f", _slice(data, at, 4))[0]
            at += 4
        elif kind == _FIXED64:
            yield tag >> 3, struct.unpack("<d", _slice(data, at, 8))[0]
            at += 8
        else:
            raise NotAMessage(f"unknown kind {kind} of field at byte {at}")


def _slice(data: bytes, at: int, size: int) -> bytes:
    if size > len(data) - at:
        raise NotAMessage(f"{size} bytes are missing at byte {at}")
    return data[at : at + size]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise NotAMessage(f"a number without end at byte {at}")
