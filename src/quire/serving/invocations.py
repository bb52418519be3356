"""`POST /invocations`: one path for all kinds of requests, as SageMaker calls containers.

The fields of the body say which kind it is. The first row of `SHAPES` whose fields are there and
whose model is run that way has it; a body whose fields belong to two kinds is refused, because a
guess could answer another question than the one that was asked. Knows only the routes in its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from quire.errors import InvalidRequest
from quire.serving.decode import decode, decode_any
from quire.serving.exchange import Exchange
from quire.serving.openai.chat import chat_completions
from quire.serving.openai.completions import completions
from quire.serving.pooling.classify import classify
from quire.serving.pooling.embeddings import embeddings
from quire.serving.pooling.score import rerank, score
from quire.serving.routes import Handler


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request."""

    fields: tuple[tuple[str, ...], ...]
    """The body has all fields of one of these groups."""
    path: str
    """The route that it is otherwise sent to."""
    handler: Handler
    task: str
    """`generate`, `embed` or `classify`: what the model does."""


_INPUT: Final = (("input",), ("messages",))
_PAIRS: Final = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"),
                 ("queries", "items"))  # fmt: skip

SHAPES: Final = (
    Shape((("messages",),), "/v1/chat/completions", chat_completions, "generate"),
    Shape((("prompt",),), "/v1/completions", completions, "generate"),
    Shape(_INPUT, "/v1/embeddings", embeddings, "embed"),
    Shape(_INPUT, "/classify", classify, "classify"),
    Shape(_PAIRS, "/score", score, "embed"),
    Shape(_PAIRS, "/score", score, "classify"),
    Shape((("query", "documents"),), "/rerank", rerank, "embed"),
    Shape((("query", "documents"),), "/rerank", rerank, "classify"),
)


class _Body(msgspec.Struct):
    """Any JSON object: what is in it, the route that it is for decodes."""


async def invocations(exchange: Exchange) -> None:
    """Answer a request by the shape of its body: a conversation, a text, inputs to embed or
    classify, pairs to score, documents to rank.

    Raises:
        InvalidRequest: the body has no known shape, or several.
    """
    given = _fields(await exchange.peek())
    pooler = exchange.state.engine_for(_model(given)).pooler
    task = "generate" if pooler is None else "embed" if pooler.task == "embed" else "classify"
    found = [shape for shape in SHAPES if shape.task == task and _fits(shape, set(given))]
    if len(found) != 1:
        raise _refused(found, task)
    await found[0].handler(exchange)


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, whose values are not looked at.

    Raises:
        InvalidRequest: it is no JSON object.
    """
    decode(_Body, body, {})
    fields: dict[str, msgspec.Raw] = decode_any(body, dict[str, msgspec.Raw])
    return fields


def _model(given: dict[str, msgspec.Raw]) -> str | None:
    """The model that is asked; `None` if there is none, or what the route will refuse."""
    value = bytes(given.get("model", b"null"))
    return decode_any(value, str) if value.startswith(b'"') else None


def _fits(shape: Shape, given: set[str]) -> bool:
    return any(given.issuperset(group) for group in shape.fields)


def _refused(found: list[Shape], task: str) -> InvalidRequest:
    if found:
        asked = " and ".join(shape.path for shape in found)
        return InvalidRequest(
            f"The body has fields of {asked}; send those of one, or send it there."
        )
    shapes = ", ".join(
        " or ".join("+".join(group) for group in shape.fields) + f" ({shape.path})"
        for shape in SHAPES
        if shape.task == task
    )
    return InvalidRequest(f"The body has no shape that this model answers. It takes {shapes}.")
