"""`GET /server_info`: the configuration that holds now, and the versions of what is installed.

Who may call this may not be who started the server. So keys are not told, of paths only the last
part is, and of URLs not the part that may hold a password.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import sys
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.exchange import Exchange
from quire.serving.observe import parameters
from quire.version import __version__

FORMATS: Final = ("text", "json")
SECRET: Final = frozenset(("api_key", "admin_api_key"))
"""Fields that are not told."""
PACKAGES: Final = (
    "torch", "numpy", "msgspec", "tokenizers", "safetensors", "llguidance", "starlette", "uvicorn"
)  # fmt: skip
_USER: Final = re.compile(r"(?<=://)[^/@]*@")
_HIDDEN: Final = "(not shown)"


async def server_info(exchange: Exchange) -> None:
    """The configuration, with all that was settled at start, and versions.

    Raises:
        InvalidRequest: `config_format` is neither `text` nor `json`.
        ServiceUnavailable: the engine has not started yet.
    """
    form = parameters(exchange, "config_format").get("config_format", "text")
    if form not in FORMATS:
        raise InvalidRequest(
            f"config_format must be one of {', '.join(FORMATS)}, got {show(form)}.",
            param="config_format",
        )
    engine = exchange.state.engine_for()
    config = {**engine.config.to_dict(), "server": dataclasses.asdict(exchange.state.config)}
    told = {name: told_value(name, section) for name, section in config.items()}
    told["core"] = told_value("core", dict(engine.info))
    body = {
        "vllm_config": told if form == "json" else "\n".join(_lines(told)),
        "versions": _versions(),
        "system": {"platform": platform.platform(), "processor": platform.machine()},
    }
    await exchange.reply(msgspec.json.encode(body))


def told_value(name: str, value: Any) -> Any:
    """A value as it may be told, of a field with this name."""
    if name in SECRET:
        return _HIDDEN if value else value
    if isinstance(value, dict):
        return {str(key): told_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [told_value(name, inner) for inner in value]
    if isinstance(value, str):
        return _told_text(value)
    return value if isinstance(value, (int, float, type(None))) else _told_text(str(value))


def _told_text(text: str) -> str:
    if "://" in text:
        return _USER.sub("", text).partition("?")[0]
    if text.startswith(("/", "~", "./", "../")):
        return f".../{text.rstrip('/').rpartition('/')[2]}"
    return text


def _lines(told: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{name}={show(value, 200)}"
        for section, fields in told.items()
        for name, value in fields.items()
    ]


def _versions() -> dict[str, str]:
    found = {"quire": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"implementation": sys.implementation.name}
