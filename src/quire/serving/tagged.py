"""Checks objects of a body that are told apart by their `type`: parts of messages, items, tools.

Such lists mix many kinds, of which a text model can take a few. So each API has a table of the
kinds it takes with their fields, and one of those it refuses by name. Knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.bounds import TYPE_WORDS
from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.unread_fields import unread_fields

_WORDS: Final = {dict: "object", list: "array", type(None): "null"}


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A field of an object."""

    kinds: tuple[type, ...] = (str,)
    required: bool = False
    values: tuple[Any, ...] = ()
    """The only values allowed, if there are any here."""


REQUIRED: Final = FieldRule(required=True)
"""A text that must be there."""
TEXT: Final = FieldRule()
ANY: Final = FieldRule((object,))
"""Accepted whatever it is, and not used."""

Shape = Mapping[str, FieldRule]
"""The fields of one kind of object, apart from `type`."""


def check_object(value: Any, shape: Shape, where: str) -> None:
    """Check the fields of an object. A field that is null counts as absent.

    Raises:
        InvalidRequest: a field is unknown, missing or of a wrong type; `param` is its place.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, got {show(value)}.", param=where)
    for name, given in value.items():
        if name not in shape and given is not None:
            unread_fields().unknown(name, shape, where)
    for name, field in shape.items():
        _check_field(value.get(name), field, f"{where}.{name}")


def _check_field(given: Any, field: FieldRule, where: str) -> None:
    if given is None:
        if field.required:
            raise InvalidRequest(f"{where} is required.", param=where)
        return
    is_bool = isinstance(given, bool)  # which is an int to Python
    if not isinstance(given, field.kinds) or (is_bool and not {bool, object} & {*field.kinds}):
        words = [_WORDS.get(kind, kind.__name__) for kind in field.kinds]
        rule = " or ".join(TYPE_WORDS.get(word, word) for word in words)
        raise InvalidRequest(f"{where} must be {rule}, got {show(given)}.", param=where)
    if field.values and given not in field.values:
        allowed = " or ".join(show(value) for value in field.values)
        raise InvalidRequest(f"{where} must be {allowed}, got {show(given)}.", param=where)


def check_tagged(
    value: Any,
    shapes: Mapping[str, Shape],
    refused: Mapping[str, str],
    where: str,
    default: str | None = None,
) -> str:
    """Check an object that its `type` tells apart; returns the type.

    Args:
        value: The object.
        shapes: The kinds that are taken, by type.
        refused: Why others are not, by type.
        where: Its place in the body.
        default: The type of an object without one.

    Raises:
        InvalidRequest: it is none of the kinds, or a field is wrong; `param` is its place.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, got {show(value)}.", param=where)
    kind = value.get("type")
    kind = default if kind is None else kind
    if isinstance(kind, str) and kind in refused:
        raise InvalidRequest(
            f'{where}: the type "{kind}" is not supported: {refused[kind]}.', param=f"{where}.type"
        )
    if not isinstance(kind, str) or kind not in shapes:
        known = ", ".join(shapes)
        raise InvalidRequest(
            f"{where}.type must be one of {known}, got {show(kind)}.", param=f"{where}.type"
        )
    check_object(value, {"type": ANY, **shapes[kind]}, where)
    return kind
