"""`GET /`: what this server is and its main routes, as JSON or, for browsers, as a small page.

Lists the routes that say what they are for; does not know what they do.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quire.errors import Unauthorized
from quire.serving.exchange import Exchange
from quire.serving.routes import RouteSpec
from quire.serving.server_state import ServerState
from quire.version import __version__

ABOUT: Final = "An LLM inference and serving engine with OpenAI's API"
DOCS: Final = {
    "flags": "quire serve --help",
    "pages": "docs/ of the source: cli.md, config.md, http.md, models.md, observability.md, "
    "operations.md",
}
DESCRIPTIONS: Final = ("/openapi.json", "/docs")
"""The routes that `--disable-fastapi-docs` turns off."""
_HTML: Final = b"text/html; charset=utf-8"


async def home(exchange: Exchange, routes: Mapping[str, RouteSpec]) -> None:
    """Name, version, model and main routes. If there are keys, only callers with one see the names
    of models."""
    facts = _facts(exchange.state, _is_known(exchange), routes)
    headers = [(b"vary", b"accept")]
    if b"text/html" in (exchange.header(b"accept") or b""):
        return await exchange.reply(_page(facts).encode(), content_type=_HTML, headers=headers)
    await exchange.reply(msgspec.json.encode(facts), headers=headers)


def _is_known(exchange: Exchange) -> bool:
    try:
        exchange.state.keys.caller(exchange.scope["headers"])
    except Unauthorized:
        return False
    return True


def _facts(state: ServerState, known: bool, routes: Mapping[str, RouteSpec]) -> dict[str, Any]:
    engine = state.engine
    runner = "generate" if engine is None or engine.pooler is None else "pooling"
    hidden = DESCRIPTIONS if state.config.disable_fastapi_docs else ()
    facts: dict[str, Any] = {
        "name": "quire",
        "version": __version__,
        "about": ABOUT,
        "status": state.status(),
        "models": list(state.models) if engine is not None and known else None,
        "routes": {
            path: f"{spec.methods[0]} {spec.about}"
            for path, spec in routes.items()
            if spec.about and spec.runner in (None, runner) and path not in hidden
        },
        "docs": DOCS,
    }
    if state.keys:
        facts["key"] = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return facts


def _page(facts: dict[str, Any]) -> str:
    """The same as a page for browsers."""
    name = html.escape(f"{facts['name']} {facts['version']}")
    models = ", ".join(facts["models"] or ()) or "shown to callers with a key, or when loaded"
    rows = [("status", facts["status"]), ("model", models), *facts["routes"].items()]
    rows += [*facts["docs"].items(), *(("key", facts[k]) for k in facts if k == "key")]
    cells = (f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        "<style>body{font:16px/1.5 sans-serif;margin:3em}th{text-align:left;padding-right:2em}"
        f"</style><h1>{name}</h1><p>{html.escape(facts['about'])}.</p>"
        f"<table>{''.join(cells)}</table></html>\n"
    )
