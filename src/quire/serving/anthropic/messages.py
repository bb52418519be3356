"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: from the body to a checked request, and
its reply sent.

`message_reply.py` says what replies look like.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.anthropic.dialogue import read_dialogue, read_format
from quire.serving.anthropic.message_reply import MessageReply, stream_message, whole_message
from quire.serving.anthropic.schema import (
    COUNT_UNSUPPORTED,
    MESSAGES_UNSUPPORTED,
    METADATA,
    CountTokensRequest,
    MessagesRequest,
)
from quire.serving.checks import make_params, read_xargs, renamed
from quire.serving.decode import show
from quire.serving.dialogue import Dialogue, RequestLabels, prepare, render
from quire.serving.exchange import Exchange
from quire.serving.generation import generate
from quire.serving.limits import LABEL
from quire.serving.prompts import TURN_CHARACTERS, off_loop
from quire.serving.rendered import rendered
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.streaming import send_stream
from quire.serving.submission import Submission
from quire.serving.tagged import check_object
from quire.serving.turn_reader import TurnReader

SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "repetition_detection")
"""Fields that have the same name and meaning in `SamplingParams`."""
_VERSION: Final = re.compile(rb"\d{4}-\d{2}-\d{2}")


async def messages(exchange: Exchange) -> None:
    """Answer one conversation.

    Raises:
        RequestError: the request is invalid; nothing has been sent yet.
    """
    request = await _record(exchange)
    served = exchange.admit(request.model)
    submission, reader = await _prepare(exchange, served, request)
    shows = (request.thinking or {}).get("display") != "omitted"
    reply = MessageReply(submission.request_ids[0], served.name, request.max_tokens, shows)

    async def answer() -> None:
        async with generate(exchange, served.engine, submission, reader) as generation:
            if request.stream:
                await send_stream(exchange, stream_message(reply, generation))
            else:
                await exchange.reply(await whole_message(reply, generation))

    await exchange.while_connected(answer())


async def render_message_request(exchange: Exchange) -> None:
    """Give a conversation as `/inference/v1/generate` takes it, and compute nothing.

    Raises:
        RequestError: the request is invalid.
    """
    request = await _record(exchange)
    served = exchange.state.model_for(request.model)
    submission, _ = await _prepare(exchange, served, request)
    (one,) = rendered(submission, served, bool(request.stream))
    await exchange.reply(msgspec.json.encode(one))


async def _record(exchange: Exchange) -> MessagesRequest:
    _check_version(exchange)
    return await exchange.record(MessagesRequest, MESSAGES_UNSUPPORTED)


async def _prepare(
    exchange: Exchange, served: ServedModel, request: MessagesRequest
) -> tuple[Submission, TurnReader]:
    require_runner(served.engine, "generate")
    policy = served.engine.config.scheduler.scheduling_policy
    priority = exchange.priority(request.priority, policy)
    labels = _labels(request, f"msg_{exchange.request_id}", priority)
    params = _params(request, served)
    dialogue = await _dialogue(request, served)
    return await prepare(exchange, served, dialogue, params, labels)


async def _dialogue(request: CountTokensRequest, served: ServedModel) -> Dialogue:
    size = TURN_CHARACTERS * len(request.messages)
    return await off_loop(size, lambda: read_dialogue(request, served.parsers))


async def count_tokens(exchange: Exchange) -> None:
    """Count the tokens of a conversation as the model would get it.

    Raises:
        RequestError: the request is invalid.
    """
    _check_version(exchange)
    request = await exchange.record(CountTokensRequest, COUNT_UNSUPPORTED)
    served = exchange.state.model_for(request.model)
    prompt = await render(served, await _dialogue(request, served))
    await exchange.reply(msgspec.json.encode({"input_tokens": len(prompt.ids)}))


def _check_version(exchange: Exchange) -> None:
    """Any version is taken: the API's shape has been the same in all."""
    given = exchange.header(b"anthropic-version")
    if given is not None and not _VERSION.fullmatch(given):
        raise InvalidRequest(
            f"anthropic-version must be a date as 2023-06-01, got {show(given.decode('latin-1'))}.",
            param="anthropic-version",
        )


def _labels(request: MessagesRequest, request_id: str, priority: int) -> RequestLabels:
    user = None
    if request.metadata is not None:
        check_object(request.metadata, METADATA, "metadata")
        user = request.metadata.get("user_id")
    for name, value in (("metadata.user_id", user), ("cache_salt", request.cache_salt)):
        if value is not None:
            LABEL.check(len(value), name)
    if request.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty.", param="cache_salt")
    return RequestLabels(request_id, user, priority, request.cache_salt)


def _params(request: MessagesRequest, served: ServedModel) -> SamplingParams:
    given: dict[str, Any] = {
        name: value for name in SAMPLING if (value := getattr(request, name)) is not None
    }
    if request.stop_sequences is not None:
        given["stop"] = request.stop_sequences
    thinking = request.thinking or {}
    if thinking.get("type") == "enabled" and served.parsers.can_limit(served.engine.tokenizer):
        given["thinking_token_budget"] = thinking["budget_tokens"]
    given["structured_outputs"] = read_format(request.output_config)
    given["extra_args"] = read_xargs(request.vllm_xargs, served.engine.config.model)
    budget = renamed("thinking_token_budget", "thinking.budget_tokens")
    with renamed("stop", "stop_sequences"), budget:
        return make_params(served.engine.default_params, given, stream=request.stream)
