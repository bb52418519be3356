"""Request fields that nothing reads: which of them are accepted, and what becomes of all others.

`CHANGES_NOTHING` has the fields that clients send to every server and that, by definition, change
no reply. Any other name that a route does not know is refused, or with
`--unknown-request-fields ignore` left out, with one warning for each name in the log. What was left
out is told in the reply. Knows no route and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import InvalidRequest
from quire.logger import get_logger
from quire.spelling import nearest

logger = get_logger(__name__)

HEADER: Final = b"x-ignored-fields"
"""Header of a reply to a request of which something had no effect: the fields, with commas."""
MAX_LOGGED: Final = 100
"""Names that the log hears of; clients may send any number of different ones."""
MAX_TOLD: Final = 16
"""Fields that the header of one reply names."""
MAX_NAME: Final = 200
"""Characters of a name in an error."""
_PLAIN: Final = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
"""What may stand in a header and in the log as it is."""


@dataclass(frozen=True, slots=True)
class Harmless:
    """A field that changes no reply."""

    why: str
    """Why it changes nothing."""
    kinds: tuple[str, ...] = ("str",)
    """JSON types of its values, by msgspec's words; null always counts as absent."""
    values: tuple[Any, ...] = ()
    """The only values that change nothing, if there are others."""


_LABEL: Final = "a label of the caller's"
_CACHE: Final = "what is in the prefix cache changes no reply"

CHANGES_NOTHING: Final[dict[str, Harmless]] = {
    "user": Harmless(_LABEL),
    "safety_identifier": Harmless(_LABEL),
    "metadata": Harmless(_LABEL, ("object",)),
    "client_metadata": Harmless(f"{_LABEL}; Codex sends it", ("object",)),
    "session_id": Harmless(f"{_LABEL}; the prefix cache finds a prompt by its tokens"),
    "prompt_cache_key": Harmless(f"{_LABEL}; {_CACHE}"),
    "prompt_cache_retention": Harmless(_CACHE),
    "cache_prompt": Harmless(f"{_CACHE}; llama.cpp's clients send it", ("bool",)),
    "keep_alive": Harmless(
        "a model stays loaded; Ollama's clients send it", ("str", "int", "float")
    ),
    "anthropic_version": Harmless("Anthropic's API has had one shape; Bedrock's clients send it"),
    "store": Harmless("nothing is stored", ("bool",), (False,)),
    "safe_prompt": Harmless("no prompt is added; Mistral's clients send it", ("bool",), (False,)),
}
"""Fields that every route takes, beside its own, and does not read."""


class UnknownFields:
    """What a server does about unknown fields, and which of them its log has.

    Args:
        ignore: Leave them out instead of refusing the request.
    """

    def __init__(self, ignore: bool) -> None:
        self.ignore = ignore
        self._logged: set[str] = set()

    def warn(self, field: str) -> None:
        """Log a name, the first time."""
        if field in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(field)
        if len(self._logged) > MAX_LOGGED:
            logger.warning("unknown request fields: more than %d names; no more are logged",
                           MAX_LOGGED)  # fmt: skip
        else:
            logger.warning("the unknown request field %s is ignored", field)


class UnreadFields:
    """The fields of one request that have no effect.

    Args:
        unknown: What the server does about unknown fields.
    """

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown
        self._names: dict[str, None] = {}

    @property
    def ignores(self) -> bool:
        """Whether unknown fields are left out."""
        return self._unknown.ignore

    def unknown(self, name: str, known: Iterable[str], where: str = "") -> None:
        """Meet an unknown field.

        Args:
            name: Its name.
            known: Names that it may have been meant to be.
            where: The object that has it, as in `messages[0]`; empty: the body.

        Raises:
            InvalidRequest: the server refuses unknown fields.
        """
        if not self._unknown.ignore:
            raise unknown_field(name, known, where)
        name = name if _PLAIN.fullmatch(name) else "(a name of other characters)"
        self._unknown.warn(re.sub(r"\[\d+\]", "[]", f"{where}.{name}") if where else name)
        self.note(f"{where}.{name}" if where else name)

    def note(self, field: str) -> None:
        """A field has no effect."""
        if len(self._names) < MAX_TOLD and _PLAIN.fullmatch(field):
            self._names[field] = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header that tells of them; none if there are none."""
        return [(HEADER, ", ".join(self._names).encode())] if self._names else []


def unknown_field(name: str, known: Iterable[str], where: str = "") -> InvalidRequest:
    """The error for an unknown field, with what may have been meant."""
    names = tuple(known)
    near = nearest(name, names)
    hint = f" Did you mean `{near}`?" if near else ""
    if not near and not where and 0 < len(names) <= 4:
        hint = f" Known here: {', '.join(names)}."
    place, told = f" in {where}" if where else "", name[:MAX_NAME]
    return InvalidRequest(
        f"Unknown field `{told}`{place}.{hint}", param=f"{where}.{told}" if where else told
    )


_CURRENT: ContextVar[UnreadFields] = ContextVar("unread_fields")
_REFUSING: Final = UnknownFields(ignore=False)


def unread_fields() -> UnreadFields:
    """Those of the request that is being read; outside of one, unknown fields are refused."""
    return _CURRENT.get(None) or UnreadFields(_REFUSING)


def begin(fields: UnreadFields) -> None:
    """A request is read from here on, in this task and those that it starts."""
    _CURRENT.set(fields)
