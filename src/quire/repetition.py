"""What a request may say about output that repeats itself.

`RepetitionDetectionParams` is vLLM's class. Whether an output does repeat itself is found where
tokens are appended (`core/repetition.py`). Knows no token.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.bounds import FIELDS, show
from quire.errors import InvalidRequest

LEAST_COUNT: Final = 2
"""A pattern that is there once is not repeated."""


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """End an output whose last tokens are one pattern, several times in a row.

    Names and meanings are vLLM's.

    Raises:
        InvalidRequest: a number is out of range; the message names the limit and the value.
    """

    max_pattern_size: int = 0
    """Tokens of the longest pattern that is looked for, at most 2048; 0: none is. A token takes at
    most so many comparisons."""
    min_pattern_size: int = 0
    """Tokens of the shortest; 0 means 1."""
    min_count: int = 0
    """How often the pattern must be there in a row, at least 2."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            self._read(name)
        if self.min_pattern_size > self.max_pattern_size:
            rule = f"at most max_pattern_size ({self.max_pattern_size})"
            raise _bad("min_pattern_size", rule, self.min_pattern_size)
        if self.max_pattern_size and self.min_count < LEAST_COUNT:
            raise _bad("min_count", f"at least {LEAST_COUNT}", self.min_count)

    def _read(self, name: str) -> None:
        value = getattr(self, name)
        try:
            found = 0 if value is None else FIELDS[name].read(value)
        except ValueError as error:
            raise _bad(name, str(error), value) from None
        msgspec.structs.force_setattr(self, name, found)

    @classmethod
    def read(cls, given: object) -> RepetitionDetectionParams | None:
        """What a caller gave as `repetition_detection`: an object of this class, its fields as a
        dictionary, or nothing; `None` if it asks for nothing.

        Raises:
            InvalidRequest: it is neither, or a field is unknown or wrong.
        """
        if isinstance(given, dict):
            given = cls(**_known(given))
        if given is None:
            return None
        if not isinstance(given, cls):
            raise InvalidRequest(
                "repetition_detection must be RepetitionDetectionParams or an object of its "
                f"fields, got {show(given)}.",
                param="repetition_detection",
            )
        return given if given.max_pattern_size else None


def _known(given: dict[Any, Any]) -> dict[str, Any]:
    known = RepetitionDetectionParams.__struct_fields__
    for name in given:
        if name not in known:
            raise InvalidRequest(
                f"repetition_detection has no field {show(name)}; its fields are "
                f"{', '.join(known)}.",
                param="repetition_detection",
            )
    return given


def _bad(name: str, rule: str, given: object) -> InvalidRequest:
    param = f"repetition_detection.{name}"
    return InvalidRequest(f"{param} must be {rule}, got {show(given)}.", param=param)
