"""The bytes that are written for spans, read back with protobuf's own reader."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from quire.observability.traces.otlp_wire import request_bytes, span_bytes, varint
from quire.observability.traces.spans import Alike, Event, Span, SpanId

OFFSET = 1_700_000_000_000_000_000

ids = st.builds(SpanId, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(texts, max_size=3).map(tuple),
)
abouts = st.dictionaries(texts, values, max_size=4)
times = st.floats(0, 1e6)
events = st.builds(Event, texts, times, abouts)
spans = st.builds(
    Span,
    texts,
    ids,
    st.none() | ids,
    times,
    times,
    abouts,
    st.lists(ids, max_size=3),
    st.lists(events, max_size=2),
    st.booleans(),
    st.none() | texts,
    texts,
    st.none() | st.builds(Alike, abouts, st.lists(ids, max_size=2)),
)


def value(given: Any) -> AnyValue:
    match given:
        case str():
            return AnyValue(string_value=given)
        case bool():
            return AnyValue(bool_value=given)
        case int():
            return AnyValue(int_value=given)
        case float():
            return AnyValue(double_value=given)
        case _:
            return AnyValue(array_value=ArrayValue(values=[value(item) for item in given]))


def pairs(about: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=value(v)) for key, v in about.items()]


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9) + OFFSET


def plain(span: Span) -> trace_pb2.Span:
    """The definition: the same span, put together by protobuf."""
    remote = 0x200 if span.is_server and span.parent else 0
    made = trace_pb2.Span(
        trace_id=span.id.trace_id.to_bytes(16, "big"),
        span_id=span.id.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent.span_id.to_bytes(8, "big") if span.parent else b"",
        trace_state=span.tracestate,
        name=span.name,
        kind=trace_pb2.Span.SPAN_KIND_SERVER if span.is_server else 1,
        start_time_unix_nano=nanoseconds(span.start),
        end_time_unix_nano=nanoseconds(span.end),
        attributes=pairs(span.attributes) + pairs(span.alike.attributes if span.alike else {}),
        flags=0x101 | remote,
    )
    for link in span.links + (span.alike.links if span.alike else []):
        made.links.add(
            trace_id=link.trace_id.to_bytes(16, "big"),
            span_id=link.span_id.to_bytes(8, "big"),
            flags=0x101,
        )
    for event in span.events:
        made.events.add(
            name=event.name,
            time_unix_nano=nanoseconds(event.time),
            attributes=pairs(event.attributes),
        )
    if span.error is not None:
        made.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        made.status.message = span.error
    return made


@given(st.lists(spans, max_size=3), abouts)
def test_protobuf_reads_what_is_written(given: list[Span], resource: dict[str, Any]) -> None:
    message = request_bytes([span_bytes(span, OFFSET) for span in given], resource, ("q", "1.0"))
    read = ExportTraceServiceRequest.FromString(message)
    (group,) = read.resource_spans
    assert list(group.resource.attributes) == pairs(resource)
    (scope,) = group.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("q", "1.0")
    assert list(scope.spans) == [plain(span) for span in given]


def test_one_and_true_are_kept_apart() -> None:
    """Attributes are remembered by value, and in Python 1 == True == 1.0."""
    for one in (1, True, 1.0):
        span = Span("a", SpanId(1, 1), None, 0, 1, {"k": one})
        message = trace_pb2.Span.FromString(span_bytes(span, 0))
        assert message.attributes[0].value == value(one)


def test_a_lone_surrogate_is_sent_as_a_question_mark() -> None:
    read = trace_pb2.Span.FromString(span_bytes(Span("a\ud800", SpanId(1, 1), None, 0, 1), 0))
    assert read.name == "a?"


@given(st.integers(-(2**63), 2**63 - 1))
def test_varint(number: int) -> None:
    read, shift = 0, 0
    for byte in varint(number):
        read |= (byte & 127) << shift
        shift += 7
    assert read == number % 2**64
