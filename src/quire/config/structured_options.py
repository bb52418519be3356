"""`--structured-outputs-config`: an operator's word on the forms of all requests. vLLM's option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.bounds import show
from quire.errors import ConfigError

BACKENDS: Final = ("auto", "guidance")
_SWITCHES: Final = (
    "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning",
    "disable_fallback",
)  # fmt: skip
_ELSEWHERE: Final = {
    "reasoning_parser": "use --reasoning-parser",
    "reasoning_parser_plugin": "quire runs no code from a plugin of vLLM",
}
_KEYS: Final = ("backend", *_SWITCHES, *_ELSEWHERE)


def check_structured(options: Mapping[str, Any]) -> None:
    """Refuse what the option cannot hold.

    Raises:
        ConfigError: an entry is unknown, has a bad value, or asks for what quire does elsewhere or
            not at all.
    """
    for name, value in options.items():
        if name not in _KEYS:
            raise _wrong(f"unknown key {name!r}; known are {', '.join(_KEYS)}")
        if name in _SWITCHES and not isinstance(value, bool):
            raise _wrong(f"{name} must be true or false, got {show(value)}")
        if name in _ELSEWHERE and value not in ("", None):
            raise _wrong(f"{name} {show(value)} is not taken here; {_ELSEWHERE[name]}")
        if name == "backend" and value not in BACKENDS:
            raise _wrong(
                f"backend must be one of {', '.join(BACKENDS)}, got {show(value)}: llguidance "
                "follows all grammars"
            )


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"--structured-outputs-config: {what}")
