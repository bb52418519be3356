"""The format of a journal file: a header, then records, each with a length and a checksum.

    header  8 bytes "QUIREJNL", version (2), flags (1: encrypted), 5 zero bytes, salt (16)
    record  4 bytes mark, length of the payload (4), kind (1), stream (8), place (4), checksum (8),
            payload

All numbers are little-endian. `stream` is the number of a stream in this file, `place` counts its
records from 0, so a missing one is noticed. The checksum is BLAKE2b over everything else in the
record, keyed with the file's salt: neither a flipped bit nor a record of another file passes. After
damage, reading goes on at the next mark with a right checksum. An encrypted payload has the rest of
the record as associated data; its nonce is stream and place, which occur once in a file, whose salt
makes its key unique.

Knows nothing of what payloads mean.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

MAGIC: Final = b"QUIREJNL"
VERSION: Final = 1
MARK: Final = b"\xf5QJ\n"
MAX_PAYLOAD: Final = 2**28
"""Longer payloads are not written, so a longer length is damage."""
_HEADER: Final = struct.Struct("<8sHB5x16s")
_FIXED: Final = struct.Struct("<4sIBQI")
_DIGEST: Final = 8
HEADER_BYTES: Final = _HEADER.size
RECORD_BYTES: Final = _FIXED.size + _DIGEST
"""What a record takes beside its payload."""


class Kind(IntEnum):
    """What a record is."""

    IDENTITY = 0
    """The model and version that wrote the file; stream 0."""
    OPEN = 1
    """A stream begins, with its first prompt."""
    PROMPT = 2
    """Another of its prompts."""
    STEP = 3
    """Outputs of the engine for it."""
    END = 4
    """Its reply is complete."""
    FORGET = 5
    """It is not kept any longer."""
    RELEASE = 6
    """The process that wrote this goes on with it no more: the next one may, at once. Versions
    that do not know this record wait until the process has ended."""


class Cipher(Protocol):
    """Encrypts the payloads of one file."""

    def encrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes:
        """The payload as written."""
        ...

    def decrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes | None:
        """The payload as it was; `None` if key or data are wrong."""
        ...


class BadHeader(Exception):
    """The file is no journal of this version; the message says what it is."""


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a file."""

    salt: bytes
    encrypted: bool

    @classmethod
    def new(cls, encrypted: bool) -> Header:
        """Of a new file."""
        return cls(os.urandom(16), encrypted)

    def encode(self) -> bytes:
        """As it is in the file."""
        return _HEADER.pack(MAGIC, VERSION, int(self.encrypted), self.salt)

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """From the beginning of a file.

        Raises:
            BadHeader: it is not that of a journal of this version.
        """
        if len(data) < HEADER_BYTES:
            raise BadHeader("it ends within its header")
        magic, version, flags, salt = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise BadHeader("it is not a journal")
        if version != VERSION:
            raise BadHeader(f"its format is {version}, and this version of quire reads {VERSION}")
        if flags not in (0, 1):
            raise BadHeader("its header is damaged")
        return cls(salt, bool(flags))


@dataclass(frozen=True, slots=True)
class Record:
    """One record, its payload in the clear."""

    kind: Kind
    stream: int
    place: int
    payload: bytes
    start: int = 0
    """Where it stands in its file."""
    end: int = 0


@dataclass(slots=True)
class Damage:
    """What could not be read of a file."""

    num_bytes: int = 0
    """Between records that could be read."""
    torn_bytes: int = 0
    """At the end, as a crash in the middle of writing leaves it."""
    undecrypted: int = 0
    """Records with a right checksum that the key does not fit."""
    spans: list[tuple[int, int]] = field(default_factory=list)


def encode(record: Record, header: Header, cipher: Cipher | None = None) -> bytes:
    """A record as it is in the file."""
    payload = record.payload
    length = len(payload) + (TAG_BYTES if cipher else 0)
    fixed = _FIXED.pack(MARK, length, record.kind, record.stream, record.place)
    if cipher is not None:
        payload = cipher.encrypt(_nonce(record.stream, record.place), payload, fixed)
    return b"".join((fixed, _checksum(header.salt, fixed, payload), payload))


TAG_BYTES: Final = 16
"""What encryption adds to a payload."""


def _nonce(stream: int, place: int) -> bytes:
    return struct.pack("<QI", stream, place)


def _checksum(salt: bytes, fixed: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(fixed, digest_size=_DIGEST, key=salt)
    digest.update(payload)
    return digest.digest()


def scan(
    data: bytes, header: Header, damage: Damage, cipher: Cipher | None = None
) -> Iterator[Record]:
    """The records of a file that can be read, in order.

    Args:
        data: The whole file.
        header: Its header.
        damage: Is told what was skipped.
        cipher: Of the file, if it is encrypted.
    """
    at = good_until = HEADER_BYTES
    while (at := data.find(MARK, at)) >= 0:
        record = _read(data, at, header, cipher, damage)
        if record is None:
            at += 1
            continue
        if at > good_until:
            damage.num_bytes += at - good_until
            damage.spans.append((good_until, at))
        at = good_until = record.end
        yield record
    damage.torn_bytes = max(0, len(data) - good_until)


def _read(
    data: bytes, at: int, header: Header, cipher: Cipher | None, damage: Damage
) -> Record | None:
    begin = at + RECORD_BYTES
    if begin > len(data):
        return None
    _, length, kind, stream, place = _FIXED.unpack_from(data, at)
    end = begin + length
    if length > MAX_PAYLOAD or end > len(data) or kind >= len(Kind):
        return None
    fixed, payload = data[at : at + _FIXED.size], data[begin:end]
    if _checksum(header.salt, fixed, payload) != data[at + _FIXED.size : begin]:
        return None
    if header.encrypted:
        assert cipher is not None, "an encrypted file is read with its cipher"
        clear = cipher.decrypt(_nonce(stream, place), payload, fixed)
        if clear is None:
            damage.undecrypted += 1
            return None
        payload = clear
    return Record(Kind(kind), stream, place, payload, at, end)
