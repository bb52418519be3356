"""A made-up HTTP API: a line of JSON for each thing said, or all of it as blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.serving.auth import Role
from quire.serving.checks import make_params
from quire.serving.dialect import Dialect
from quire.serving.exchange import Exchange
from quire.serving.generation import Generation, generate
from quire.serving.parsing import ParserSetup, Parsing
from quire.serving.prompts import encode
from quire.serving.routes import POST, RouteSpec
from quire.serving.server_state import require_runner
from quire.serving.streaming import send_stream
from quire.serving.submission import Submission
from quire.serving.tools import ToolSpec
from quire.serving.turn_reader import TurnReader
from quire.serving.turns import (
    Finish,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

NAMES = {
    Text: "say", Reasoning: "think", ToolCallBegin: "call", ToolCallArguments: "arguments",
    ToolCallEnd: "called", Finish: "end",
}  # fmt: skip


class SayRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    model: str | None = None
    stream: bool = False


def line(**value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def oops(error: QuireError, request_id: str) -> bytes:
    return line(oops=error.message)


async def say(exchange: Exchange) -> None:
    """Say something about a text."""
    request = await exchange.record(SayRequest, {})
    served = exchange.state.model_for(request.model)
    require_runner(served.engine, "generate")
    ids = await encode(served.engine, request.text, True)
    params = make_params(served.engine.default_params, {"max_tokens": 99}, stream=request.stream)
    submission = Submission([f"say-{exchange.request_id}"], [ids], params)
    reader = TurnReader(
        params, parsing=Parsing(served.parsers.kinds, ParserSetup(request.text, [ToolSpec("f")]))
    )

    async def answer() -> None:
        async with generate(exchange, served.engine, submission, reader) as generation:
            if request.stream:
                await send_stream(exchange, lines(generation))
            else:
                (turn,) = await generation.turns()
                await exchange.reply(line(said=turn.parts, tokens=generation.usage))

    await exchange.while_connected(answer())


async def lines(generation: Generation) -> AsyncGenerator[bytes]:
    async for batches in generation.events():
        for event in (event for batch in batches for event in batch if type(event) in NAMES):
            yield line(kind=NAMES[type(event)], event=event)


ROUTE = RouteSpec(POST, Role.USER, say, dialect=Dialect(oops, oops, b"", b"application/x-ndjson"))
