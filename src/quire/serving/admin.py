"""Routes for operators: limits and priorities of the running scheduler, the prefix cache, the
profiler."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.errors import ConfigError, InvalidRequest
from quire.serving.decode import decode
from quire.serving.exchange import Exchange
from quire.serving.prompts import encode

LIMITS: Final = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "long_prefill_token_threshold",
)


PREFIX_FACTS: Final = ("num_tokens", "num_cached_tokens", "block_index", "first_difference")
"""What `POST /explain_prefix` tells: positions and counts, never tokens."""


class LimitsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /limits`: what is absent stays as it is."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str | None = None
    long_prefill_token_threshold: int | None = None
    priorities: dict[str, int] | None = None
    """By request id."""


class ExplainPrefixRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /explain_prefix`."""

    prompt: str | list[int]
    cache_salt: str | None = None
    model: str | None = None


async def limits(exchange: Exchange) -> None:
    """`GET`: the limits that hold. `POST`: change some of them, then the same."""
    engine = exchange.state.ready_engine()
    if exchange.scope["method"] == "POST":
        changes = decode(LimitsRequest, await exchange.body(), {})
        given: dict[str, Any] = {
            name: value for name in LIMITS if (value := getattr(changes, name)) is not None
        }
        await engine.set_limits(changes.priorities, **given)
    scheduler = engine.config.scheduler
    await exchange.reply(msgspec.json.encode({name: getattr(scheduler, name) for name in LIMITS}))


async def reset_prefix_cache(exchange: Exchange) -> None:
    """Forget cached prefixes; `reset` is false, and nothing happened, while requests run."""
    done = await exchange.state.ready_engine().reset_prefix_cache()
    await exchange.reply(msgspec.json.encode({"reset": done}))


async def explain_prefix(exchange: Exchange) -> None:
    """How far the prefix cache follows a prompt, and the position at which it stops.

    Which token stands there in the cache is not told: it is of another caller's prompt.
    """
    engine = exchange.state.ready_engine()
    request = decode(ExplainPrefixRequest, await exchange.body(), {})
    exchange.state.check_model(request.model, engine)
    ids = request.prompt
    if isinstance(ids, str):
        ids = await encode(engine, ids, True)
    answer = await engine.explain_prefix(ids, request.cache_salt)
    await exchange.reply(msgspec.json.encode({name: answer[name] for name in PREFIX_FACTS}))


async def start_profile(exchange: Exchange) -> None:
    """Begin a recording; 409 if one runs, 400 with what to set if no profiler is configured."""
    try:
        await exchange.state.ready_engine().start_profile()
    except ConfigError as error:
        raise InvalidRequest(error.message) from None
    await exchange.reply(msgspec.json.encode({"profiling": True}))


async def stop_profile(exchange: Exchange) -> None:
    """End the recording; the answer comes when its trace is written."""
    await exchange.state.ready_engine().stop_profile()
    await exchange.reply(msgspec.json.encode({"profiling": False}))
