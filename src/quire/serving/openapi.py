"""`GET /openapi.json` and `GET /docs`: the routes as an OpenAPI 3.1 document, and as a page.

The document is made from the table of routes and the types of their bodies, so it cannot differ
from what the server decodes. It describes requests exactly and replies by their content type only,
because replies are rendered piece by piece and have no type. Knows no handler.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from quire.errors import NotFound
from quire.serving.admin import Ask
from quire.serving.auth import Role
from quire.serving.exchange import Exchange
from quire.serving.routes import RouteSpec
from quire.version import __version__

_HTML: Final = b"text/html; charset=utf-8"
_REFS: Final = "#/components/schemas/{name}"
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)(?::path)?\}")

ERRORS: Final[Mapping[int, str]] = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or unknown.",
    403: "The key is not allowed to do this.",
    404: "There is no such path, model or object.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    409: "The object is in a state that does not allow this.",
    413: "The body or one of its fields is too large.",
    415: "The body is not declared as JSON.",
    422: "The idempotency key was used with another body.",
    429: "Too many requests; `Retry-After` says when to try again.",
    501: "The model cannot do this.",
    503: "The server takes no requests now; `Retry-After` says when to try again.",
    504: "The deadline of the request passed before there was any output.",
}
"""What a reply with an error means, by status."""

_ALWAYS: Final = (400, 401, 403, 404, 405)
_WITH_BODY: Final = (408, 409, 413, 415, 422, 429, 501, 503, 504)


async def openapi(exchange: Exchange, routes: Mapping[str, RouteSpec]) -> None:
    """The document.

    Raises:
        NotFound: the server was started with `--disable-fastapi-docs`.
    """
    _check_shown(exchange)
    await exchange.reply(msgspec.json.encode(document(routes)))


async def docs(exchange: Exchange, routes: Mapping[str, RouteSpec]) -> None:
    """The page, which needs nothing from elsewhere.

    Raises:
        NotFound: the server was started with `--disable-fastapi-docs`.
    """
    _check_shown(exchange)
    await exchange.reply(_page(document(routes)).encode(), content_type=_HTML)


def _check_shown(exchange: Exchange) -> None:
    if exchange.state.config.disable_fastapi_docs:
        raise NotFound("This server does not describe its routes (--disable-fastapi-docs).")


def document(routes: Mapping[str, RouteSpec]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    bodies = {path: found for path, spec in routes.items() if (found := _body_types(spec))}
    kinds = list(dict.fromkeys(kind for found in bodies.values() for kind in found))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFS)
    by_kind = dict(zip(kinds, schemas, strict=True))
    by_path = {path: _any_of([by_kind[kind] for kind in found]) for path, found in bodies.items()}
    paths: dict[str, dict[str, Any]] = {}
    for path, spec in routes.items():
        shown = _PATH_PARAMETER.sub(r"{\1}", path)
        paths[shown] = {
            method.lower(): _operation(path, method, spec, by_path.get(path))
            for method in spec.methods
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def body_type(spec: RouteSpec) -> type[msgspec.Struct] | None:
    """The type of a route's JSON body; `None` if it takes none."""
    if isinstance(spec.handler, Ask):
        asked = spec.handler.body_type()
        return asked if asked.__struct_fields__ else None
    return spec.body


def _body_types(spec: RouteSpec) -> tuple[type[msgspec.Struct], ...]:
    """The types of which a route's body is one."""
    body = body_type(spec)
    return spec.bodies if body is None else (body,)


def _any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _operation(path: str, method: str, spec: RouteSpec, schema: Any) -> dict[str, Any]:
    has_body = schema is not None and method == "POST"
    name = re.sub(r"[^A-Za-z0-9]+", "_", path).strip("_") or "home"
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "summary": _summary(spec),
        "responses": _responses(spec, has_body),
    }
    if names := _PATH_PARAMETER.findall(path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if spec.query:
        described.setdefault("parameters", []).extend(
            {"name": name, "in": "query", "schema": {"type": kind}}
            for name, kind in spec.query.items()
        )
    if has_body:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if spec.role is not Role.OPEN:
        described["security"] = [{"key": []}]
    return described


def _summary(spec: RouteSpec) -> str:
    if spec.about:
        return f"Send {spec.about}." if "get" in spec.about.split() else f"{spec.about}."
    if isinstance(spec.handler, Ask):
        return f"The control verb {spec.handler.verb}."
    return (inspect.getdoc(spec.handler) or "").split("\n\n")[0].replace("\n", " ")


def _responses(spec: RouteSpec, has_body: bool) -> dict[str, Any]:
    statuses: Iterable[int] = (*_ALWAYS, *_WITH_BODY) if has_body else (*_ALWAYS, 408, 409, 503)
    found: dict[str, Any] = {"200": {"description": "Done."}}
    if spec.replies:
        found["200"]["content"] = {kind: {} for kind in spec.replies}
    for status in sorted(statuses):
        found[str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _error_schema()}},
        }
    return found


def _error_schema() -> dict[str, Any]:
    """All dialects have an object `error` with a type and a message in it."""
    text = {"type": "string"}
    return {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": text, "type": text},
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    }


# ---- page ----------------------------------------------------------------------------------------

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1em .3em}summary{cursor:pointer;padding:.3rem 0}"
    "td{padding:.1rem 1rem .1rem 0;vertical-align:top}:root{color-scheme:light dark}"
)


def _page(described: dict[str, Any]) -> str:
    rows = "".join(
        _route(path, method, operation, described)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>quire: routes</title>'
        f"<style>{_STYLE}</style></head><body><h1>quire {html.escape(__version__)}</h1>"
        f'<p>As a document for programs: <a href="openapi.json">openapi.json</a>.</p>{rows}'
        "</body></html>"
    )


def _route(path: str, method: str, operation: dict[str, Any], described: dict[str, Any]) -> str:
    head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation['summary'])}"
    fields = _fields(operation, described)
    if not fields:
        return f"<p>{head}</p>"
    table = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(kind)}</td></tr>"
        for name, kind in fields
    )
    return f"<details><summary>{head}</summary><table>{table}</table></details>"


def _fields(operation: dict[str, Any], described: dict[str, Any]) -> list[tuple[str, str]]:
    found = [
        (parameter["name"], f"{parameter['schema']['type']}, in the {parameter['in']}")
        for parameter in operation.get("parameters", ())
    ]
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        if "$ref" not in schema:
            return [*found, ("the body", kind_of(schema))]
        record = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        needed = record.get("required", ())
        found += [
            (name, kind_of(field) + (", required" if name in needed else ""))
            for name, field in record["properties"].items()
        ]
    return found


def kind_of(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        kinds = [kind_of(one) for one in schema["anyOf"]]
        return " or ".join(kind for kind in kinds if kind != "null")
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
