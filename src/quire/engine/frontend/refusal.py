"""How a gate refuses: the field, what is wrong with it, and the value as far as it can be shown."""

from __future__ import annotations

from typing import NoReturn

from quire.errors import InvalidRequest


def refuse(param: str, text: str) -> NoReturn:
    """Refuse a request because of one field; `text` goes on from the field's name.

    Raises:
        InvalidRequest: always.
    """
    glue = " " if text.startswith(("must", "is ")) else ": "
    raise InvalidRequest(f"{param}{glue}{text}", param=param)


def shown(value: object) -> str:
    """A value for the message of a refusal: short and printable, whatever a client sent.

    Python refuses to print integers of more than 4300 digits; long texts would fill logs.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 40:
        return f"a string of {len(value)} characters"
    if isinstance(value, (str, int, float, type(None))):
        return ascii(value)
    return type(value).__name__
