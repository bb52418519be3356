"""Spans encoded as OTLP bytes directly, which is several times cheaper than building a library's
objects first.

A traced server makes a span per token, so the cost of one decides whether tracing can stay on.
Field numbers are those of `opentelemetry/proto/trace/v1/trace.proto`; the wire format is protobuf's
(https://protobuf.dev/programming-guides/encoding/). Knows no network and needs no package; its test
reads the bytes back with protobuf's own parser.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from quire.observability.traces.spans import Alike, Event, Span, SpanId, Value

_FIXED64: Final = struct.Struct("<BQ")
_TIMES: Final = struct.Struct("<BQBQ")
_DOUBLE: Final = struct.Struct("<Bd")
_SAMPLED, _IS_KNOWN, _IS_REMOTE = 0x001, 0x100, 0x200
"""Bits of `flags`: W3C's sampled bit, and whether the parent belongs to another process."""
_LOCAL_FLAGS: Final = b"\x85\x01" + (_SAMPLED | _IS_KNOWN).to_bytes(4, "little")
_REMOTE_FLAGS: Final = b"\x85\x01" + (_SAMPLED | _IS_KNOWN | _IS_REMOTE).to_bytes(4, "little")
_LINK_FLAGS: Final = b"\x35" + (_SAMPLED | _IS_KNOWN).to_bytes(4, "little")
_INTERNAL, _SERVER = b"\x30\x01", b"\x30\x02"
_ERROR: Final = b"\x18\x02"
_LINK_HEAD: Final = bytes([13 << 3 | 2, 16 + 2 + 8 + 2 + len(_LINK_FLAGS), 1 << 3 | 2, 16])


def varint(value: int) -> bytes:
    """A whole number in seven bits per byte; negative numbers as 64 bits."""
    if 0 <= value < 128:
        return _SMALL[value]
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_SMALL: Final = [bytes([value]) for value in range(128)]


def field(number: int, body: bytes) -> bytes:
    """A field of bytes, a text or a message."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def _text(text: str) -> bytes:
    # UTF-8 cannot represent a lone surrogate, which the caller's tracestate or an id may contain.
    return text.encode("utf-8", "replace")


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return field(1, _text(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return _DOUBLE.pack(4 << 3 | 1, value)
    return field(5, b"".join(field(1, _any_value(item)) for item in value))


def _pair(key: str, value: Value) -> bytes:
    return field(1, _text(key)) + field(2, _any_value(value))


# Most attributes repeat (names of models, numbers of steps and of requests), so their bytes are
# cached. `typed` matters: 1, 1.0 and True are equal but are encoded differently.
_known_pair = lru_cache(8192, typed=True)(_pair)


def attributes(number: int, about: Mapping[str, Value]) -> bytes:
    """Attributes as the repeated field of this number."""
    tag = varint(number << 3 | 2)
    parts: list[bytes] = []
    for key, value in about.items():
        # Floats are measurements that hardly ever repeat; they would only push others out.
        pair = _pair(key, value) if type(value) is float else _known_pair(key, value)
        parts += (tag, varint(len(pair)), pair)
    return b"".join(parts)


def _event(event: Event, offset: int) -> bytes:
    time = _FIXED64.pack(1 << 3 | 1, int(event.time * 1e9) + offset)
    return field(11, time + field(2, _text(event.name)) + attributes(3, event.attributes))


def _link(link: SpanId) -> bytes:
    trace, span = link
    return b"%b%b\x12\x08%b%b" % (
        _LINK_HEAD,
        trace.to_bytes(16, "big"),
        span.to_bytes(8, "big"),
        _LINK_FLAGS,
    )


def _alike(alike: Alike) -> bytes:
    if not alike.written:
        links = b"".join(_link(link) for link in alike.links)
        alike.written = attributes(9, alike.attributes) + links
    return alike.written


@lru_cache(256)
def _name(name: str) -> bytes:
    return field(5, _text(name))


def span_bytes(span: Span, offset: int) -> bytes:
    """One span as a `Span` message.

    Args:
        span: What happened.
        offset: Nanoseconds to add to the engine's clock to get wall time.
    """
    trace, own = span.id
    parts = [
        b"\x0a\x10%b\x12\x08%b" % (trace.to_bytes(16, "big"), own.to_bytes(8, "big")),
        _name(span.name),
        _SERVER if span.is_server else _INTERNAL,
        _TIMES.pack(57, int(span.start * 1e9) + offset, 65, int(span.end * 1e9) + offset),
        _REMOTE_FLAGS if span.is_server and span.parent else _LOCAL_FLAGS,
    ]
    if span.attributes:
        parts.append(attributes(9, span.attributes))
    if span.links:
        parts += [_link(link) for link in span.links]
    if span.alike:
        parts.append(_alike(span.alike))
    if span.parent:
        parts.append(b"\x22\x08" + span.parent.span_id.to_bytes(8, "big"))
    if span.events:
        parts += [_event(event, offset) for event in span.events]
    if span.tracestate:
        parts.append(field(3, _text(span.tracestate)))
    if span.error is not None:
        parts.append(field(15, field(2, _text(span.error)) + _ERROR))
    return b"".join(parts)


def request_bytes(
    spans: Iterable[bytes], resource: Mapping[str, Value], scope: tuple[str, str]
) -> bytes:
    """An `ExportTraceServiceRequest`.

    Args:
        spans: `Span` messages.
        resource: Attributes of whoever made them.
        scope: Name and version of the library that did.
    """
    name, version = scope
    scoped = [field(1, field(1, _text(name)) + field(2, _text(version)))]
    scoped += [b"\x12" + varint(len(span)) + span for span in spans]
    about = field(1, attributes(1, resource))
    return field(1, about + field(2, b"".join(scoped)))
