"""Decodes bodies into typed records, and says what is wrong with them: field, rule, given value.

msgspec checks the types while it parses. Only if it refuses is the body examined again: to name the
value, to suggest a field, or to accept a field that quire lacks if its value means "not used", that
changes nothing, or that the server is told to ignore. Knows no endpoint.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, NoReturn, TypeVar, get_args

import msgspec

from quire.bounds import TYPE_WORDS
from quire.errors import InvalidRequest
from quire.serving.limits import DEPTH
from quire.serving.unread_fields import (
    CHANGES_NOTHING,
    Harmless,
    UnreadFields,
    unknown_field,
    unread_fields,
)

_EXPECTED: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_AT: Final = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$", re.DOTALL)
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
"""What msgspec takes for one in a key."""
_CONTAINERS: Final = (dict, list, msgspec.Struct)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that clients know and quire lacks."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values besides null that mean "not used"."""


def refused(why: str, *neutral: Any) -> Unsupported:
    """A row of a table of unsupported fields."""
    return Unsupported(why, neutral)


@functools.cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[T], body: bytes, unsupported: Mapping[str, Unsupported]) -> T:
    """The record in a JSON body.

    Raises:
        InvalidRequest: the body is not JSON, or a field is unknown, unsupported or of a wrong
            type; `param` is the field.
    """
    try:
        record: T = _decoder(kind).decode(body)
    except msgspec.ValidationError:
        record = _second_look(kind, body, unsupported)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _not_json(error)
    _check_depth(record)
    return record


def decode_any(body: bytes, kind: Any = Any) -> Any:
    """The value of a type in a JSON text.

    Raises:
        InvalidRequest: it is not JSON, or of another type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _not_json(error)


def without_mark(body: bytes) -> bytes:
    """A body without the byte order mark that editors and shells of Windows put before UTF-8.

    Raises:
        InvalidRequest: the mark is that of UTF-16.
    """
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequest("The body is not valid JSON: it is UTF-16, not UTF-8.")
    return body.removeprefix(codecs.BOM_UTF8)


def is_not_utf8(error: Exception) -> bool:
    """Whether that is what msgspec minds. From 0.23 on it is told by the words alone."""
    return isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8")


def _not_json(error: Exception) -> NoReturn:
    if isinstance(error, RecursionError):
        raise _too_deep()
    if is_not_utf8(error):
        what = "it is not UTF-8"
    elif "truncated" in str(error):
        what = "it ends too early, or within a character"
    else:
        # msgspec's own fixed words, ending in "(byte 12)".
        what = str(error).removeprefix("JSON is malformed: ")
    raise InvalidRequest(f"The body is not valid JSON: {what}.") from None


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"{DEPTH.rule.format(most=DEPTH.most)}, got more.")


def _second_look(kind: type[T], body: bytes, unsupported: Mapping[str, Unsupported]) -> T:
    """Name what is wrong, or drop unsupported fields with neutral values and decode the rest."""
    raw = decode_any(body)
    if not isinstance(raw, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {show(raw)}.")
    known, unread = kind.__struct_fields__, unread_fields()
    kept = {}
    for name, value in raw.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not _among(value, unsupported[name].neutral):
                why = unsupported[name].why
                raise InvalidRequest(f"{name} is not supported: {why}.", param=name)
        elif name in CHANGES_NOTHING:
            _check_harmless(name, value, CHANGES_NOTHING[name])
        else:
            unread.unknown(name, (*known, *unsupported, *CHANGES_NOTHING))
    if unread.ignores:
        for field in msgspec.structs.fields(kind):
            if field.name in kept:
                kept[field.name] = _pruned(kept[field.name], field.type, field.name, unread)
    try:
        return msgspec.convert(kept, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kept, kind) from None


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Membership that distinguishes `1` from `true`."""
    return any(type(value) is type(other) and value == other for other in neutral)


def _check_harmless(name: str, value: Any, rule: Harmless) -> None:
    """Check a field that changes nothing: a client that sends something else means another."""
    if value is None:
        return
    if _type_of(value) not in rule.kinds:
        kinds = " or ".join(TYPE_WORDS.get(kind, kind) for kind in rule.kinds)
        raise InvalidRequest(f"{name} must be {kinds}, got {show(value)}.", param=name)
    if rule.values and not _among(value, rule.values):
        allowed = " or ".join(map(show, rule.values))
        raise InvalidRequest(
            f"{name} must be {allowed}, got {show(value)}: {rule.why}.", param=name
        )


def _pruned(value: Any, annotation: Any, where: str, unread: UnreadFields) -> Any:
    """The value without the fields that the records in it do not know."""
    if isinstance(value, list):
        return [_pruned(v, annotation, f"{where}[{i}]", unread) for i, v in enumerate(value)]
    record = _find_struct(annotation) if isinstance(value, dict) else None
    if record is None:
        return value
    types = {field.name: field.type for field in msgspec.structs.fields(record)}
    for name in value:
        if name not in types:
            unread.unknown(name, types, where)
    return {
        name: _pruned(inner, types[name], f"{where}.{name}", unread)
        for name, inner in value.items()
        if name in types
    }


def _explain(text: str, raw: Any, kind: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec's error in our words."""
    at = _AT.search(text)
    path = at.group(1) if at else ""
    text = text[: at.start()] if at else text
    of_keys = bool(at and at.group(0).startswith(" - at `key`"))
    param = path.removeprefix(".").replace("[...]", "") or None
    if match := _UNKNOWN.match(text):
        name = match.group(1)
        nested = _struct_at(kind, path)
        known = nested.__struct_fields__ if nested else ()
        told = unknown_field(name, known)
        return InvalidRequest(told.message, param=f"{param}.{told.param}")
    if match := _MISSING.match(text):
        name = f"{param}.{match.group(1)}" if param else match.group(1)
        return InvalidRequest(f"{name} is required.", param=name)
    if of_keys:
        keys = _value_at(raw, path, [])
        bad = next((key for key in keys if not _INTEGER.fullmatch(key)), "")
        return InvalidRequest(f"{param} must be keyed by integers, got {show(bad)}.", param=param)
    if match := _EXPECTED.match(text):
        wanted = [TYPE_WORDS.get(word, word) for word in match.group(1).split(" | ")]
        rule = " or ".join(word for word in wanted if word != "null")
        value = _value_at(raw, path, match.group(1).split(" | "))
        got = f", got {show(value)}"
        inner = " made of values that are" if "[...]" in path else ""
        return InvalidRequest(f"{param} must be{inner} {rule}{got}.", param=param)
    return InvalidRequest(f"{param} has a value out of range.", param=param)


def _value_at(raw: Any, path: str, wanted: list[str]) -> Any:
    """The value at a path. Where msgspec does not name the key, the first value of a wrong type."""
    for name, index, any_key in _STEP.findall(path):
        if any_key:
            raw = next((v for v in raw.values() if _type_of(v) not in wanted), None)
        else:
            raw = raw[name] if name else raw[int(index)]
    return raw


def _type_of(value: Any) -> str:
    """msgspec's word for the type of a JSON value."""
    return {dict: "object", list: "array", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _struct_at(kind: type[msgspec.Struct], path: str) -> type[msgspec.Struct] | None:
    """The record type at a path, to know which fields exist there."""
    here: Any = kind
    for name, *_ in _STEP.findall(path):
        if not name:
            continue
        types = {f.name: f.type for f in msgspec.structs.fields(here)}
        here = _find_struct(types.get(name))
        if here is None:
            return None
    return here  # type: ignore[no-any-return]


def _find_struct(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    found: list[Any] = [_find_struct(inner) for inner in get_args(annotation)]
    return next((inner for inner in found if inner is not None), None)


def show(value: Any, limit: int = 60) -> str:
    """A JSON value for an error message, shortened."""
    text = msgspec.json.encode(_start(value, [limit + 1])).decode()
    return text if len(text) <= limit else f"{text[:limit]}..."


def _start(value: Any, room: list[int]) -> Any:
    """As much of a value as the first `room[0]` characters of its JSON show, and of more at least
    one more: to write megabytes takes long."""
    if isinstance(value, str):
        kept = value[: max(room[0], 0)]
        room[0] -= len(kept) + 2
        return kept
    if not isinstance(value, (list, dict)):
        return value
    room[0] -= 1
    if isinstance(value, list):
        return [_start(inner, room) for inner in takewhile(lambda _: _takes_one(room), value)]
    items = takewhile(lambda _: _takes_one(room), value.items())
    return {_start(key, room): _start(inner, room) for key, inner in items}


def _takes_one(room: list[int]) -> bool:
    room[0] -= 1
    return room[0] >= 0


def _check_depth(record: msgspec.Struct) -> None:
    """Refuse deep free-form content; typed fields cannot be deep. How much there may be of it was
    checked when the body arrived."""
    layer = [getattr(record, name) for name in getattr(record, "FREE_FORM", ())]
    depth = 1
    while layer := [value for value in layer if isinstance(value, _CONTAINERS)]:
        depth += 1
        if depth > DEPTH.most:
            raise _too_deep()
        layer = [inner for value in layer for inner in _children(value)]


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return value
