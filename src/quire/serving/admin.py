"""Routes for operators: control verbs over HTTP, one row each.

`Ask` makes a handler from a verb (`engine/verbs.py`): it decodes the body, runs the verb and
replies with its result. Knows only the verbs in the rows below.
"""

from __future__ import annotations

import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from quire.config import SchedulerConfig
from quire.core.admission import LIVE_LIMITS
from quire.engine.verbs import find_verb
from quire.errors import ConfigError, InvalidRequest
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.prompts import encode

PREFIX_FACTS: Final = ("num_tokens", "num_cached_tokens", "block_index", "first_difference")
"""The part of the answer that `POST /explain_prefix` returns: positions and counts, never
tokens."""


def _as_it_is(result: Any) -> Any:
    return result


async def _own_fields(exchange: Exchange, engine: EngineClient, body: Any) -> dict[str, Any]:
    """The fields that were given; the verb has defaults for the rest."""
    values = msgspec.structs.asdict(body)
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Ask:
    """A handler that runs a control verb.

    The request needs no body if the verb has no arguments. A `ConfigError` becomes status 400,
    because the server is running and only lacks something that the error names.
    """

    verb: str
    body: type[msgspec.Struct] | None = None
    """Type of the body; by default, the verb's own arguments."""
    arguments: Callable[[Exchange, EngineClient, Any], Awaitable[dict[str, Any]]] = _own_fields
    """Turns the decoded body into the verb's arguments."""
    reply: Callable[[Any], Any] = _as_it_is
    """Turns the verb's result into the reply."""

    def body_type(self) -> type[msgspec.Struct]:
        """Type of the body; without fields if the request needs none."""
        return self.body or find_verb(self.verb).arguments

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request."""
        body = self.body_type()
        given: Any = None
        if body.__struct_fields__:
            given = await exchange.record(body, {})
        engine = exchange.state.engine_for(getattr(given, "model", None))
        args = {} if given is None else await self.arguments(exchange, engine, given)
        try:
            result = await engine.call(self.verb, **args)
        except ConfigError as error:
            raise InvalidRequest(error.message) from None
        await exchange.reply(msgspec.json.encode(self.reply(result)))


# ---- limits --------------------------------------------------------------------------------------

_TYPES: Final = typing.get_type_hints(SchedulerConfig)
LimitsRequest: Final = msgspec.defstruct(
    "LimitsRequest",
    [
        *((name, _TYPES[name] | None, None) for name in LIVE_LIMITS),
        ("priorities", dict[str, int] | None, None),
    ],
    kw_only=True,
    forbid_unknown_fields=True,
)
"""Body of `POST /limits`: what is absent stays as it is. `priorities` go by request id."""

_set_limits: Final = Ask("set_limits", LimitsRequest)


async def limits(exchange: Exchange) -> None:
    """`GET`: the current limits. `POST`: change some of them and return all."""
    if exchange.scope["method"] == "POST":
        return await _set_limits(exchange)
    scheduler = exchange.state.engine_for().config.scheduler
    now = {name: getattr(scheduler, name) for name in LIVE_LIMITS}
    await exchange.reply(msgspec.json.encode(now))


# ---- the prefix cache ----------------------------------------------------------------------------


class ExplainPrefixRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /explain_prefix`."""

    prompt: str | list[int]
    cache_salt: str | None = None
    model: str | None = None
    key: str | None = None
    """Name of the key in whose part of the cache to look; the caller's own if absent."""


async def _prefix_of(
    exchange: Exchange, engine: EngineClient, body: ExplainPrefixRequest
) -> dict[str, Any]:
    client = exchange.client(None)
    if body.key is not None:
        client = exchange.state.keys.client_of(body.key)
    ids = body.prompt
    if isinstance(ids, str):
        ids = await encode(engine, ids, True)
    return {"prompt_token_ids": ids, "cache_salt": client.salt(body.cache_salt)}


def _positions(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without tokens: a cached token comes from another caller's prompt."""
    return {name: answer[name] for name in PREFIX_FACTS}


explain_prefix: Final = Ask("explain_prefix", ExplainPrefixRequest, _prefix_of, _positions)
reset_prefix_cache: Final = Ask("reset_prefix_cache", reply=lambda done: {"reset": done})
"""`reset` is false, and nothing happened, while requests run."""
start_profile: Final = Ask("start_profile", reply=lambda _: {"profiling": True})
"""409 if one runs, 400 with what to set if no profiler is configured."""
stop_profile: Final = Ask("stop_profile", reply=lambda _: {"profiling": False})
"""The answer comes when the trace is written."""
