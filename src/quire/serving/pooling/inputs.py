"""From request fields to prompts of a pooling model: token ids and parameters, within limits.

Long texts are tokenised in a thread. Knows no endpoint's reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from quire.config import PoolerSpec
from quire.errors import ContextLengthExceeded, InvalidRequest
from quire.params import PoolingParams
from quire.serving.decode import show
from quire.serving.engine_api import EngineClient
from quire.serving.openai.prompts import INLINE_CHARACTERS, TEXT_MARGIN, encode, render_chat
from quire.serving.openai.sampling import check_labels, check_priority
from quire.serving.pooling.run import Prompt
from quire.serving.pooling.schema import InputRequest, PoolingBase
from quire.serving.state import require_runner

MAX_INPUTS: Final = 2048
"""Most prompts of one HTTP request (OpenAI's limit)."""

T = TypeVar("T")


def check_base(request: PoolingBase, engine: EngineClient) -> PoolerSpec:
    """How the model pools, after the rules that all pooling endpoints share.

    Raises:
        UnsupportedTask: the model generates text.
        InvalidRequest: a label or number is out of range.
    """
    pooler = require_runner(engine, "pooling")
    assert pooler is not None, "a pooling model has one"
    check_labels(request)
    check_priority(request.priority or 0, engine.config.scheduler.scheduling_policy)
    return pooler


def base_params(
    request: PoolingBase, task: str, use_activation: bool | None, dimensions: int | None = None
) -> PoolingParams:
    """The parameters of every prompt of the request; prompts are cut here already.

    Raises:
        InvalidRequest: a value is out of range.
    """
    older, newer = use_activation, request.use_activation
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(
            "use_activation is given under two names, and they differ.", param="use_activation"
        )
    checked = PoolingParams(
        task=task,
        use_activation=older if newer is None else newer,
        dimensions=dimensions,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side or "right",
    )
    return checked.replace(truncate_prompt_tokens=None)


async def read_inputs(
    engine: EngineClient, request: InputRequest, params: PoolingParams
) -> list[Prompt]:
    """The prompts of `input` or `messages`.

    Raises:
        InvalidRequest: neither or both are given, or one has a wrong form.
        ContextLengthExceeded: a text is far too long.
    """
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("Give either input or messages.", param="input")
    if request.messages is not None:
        text = render_chat(
            engine, request.messages, None, bool(request.add_generation_prompt), None,
            request.chat_template_kwargs,
        )  # fmt: skip
        special = bool(request.add_special_tokens)
        return [Prompt(await _ids(engine, text, request, special), params)]
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} needs messages, not input.", param=name)
    special = request.add_special_tokens is not False
    items = _items(request.input)
    return [Prompt(await _ids(engine, item, request, special), params) for item in items]


def _items(given: object) -> list[str | list[int]]:
    """The four shapes of `input` as a list of texts and token lists."""
    if isinstance(given, str):
        return [given]
    assert isinstance(given, list)
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        raise InvalidRequest(
            "input must be a string, a list of strings, a list of token ids, or a list of such "
            f"lists, got {'a mixed' if given else 'an empty'} list.",
            param="input",
        )
    if kinds == {int}:
        return [given]
    check_count(len(given), "input")
    return given


def check_count(count: int, param: str) -> None:
    """Refuse more prompts than one request may hold.

    Raises:
        InvalidRequest: there are none or too many.
    """
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(
            f"{param} must hold from 1 to {MAX_INPUTS} texts, got {count}.", param=param
        )


async def _ids(
    engine: EngineClient, item: str | list[int], request: PoolingBase, special: bool
) -> list[int]:
    keep = _keep(request, engine)
    side = request.truncation_side or "right"
    if isinstance(item, str):
        if keep is None:
            return await encode(engine, item, special)
        tokenizer = engine.tokenizer
        return await off_loop(len(item), lambda: tokenizer.encode_within(item, keep, side, special))
    for token_id in item:
        if not 0 <= token_id < engine.vocab_size:
            raise InvalidRequest(
                f"input must hold token ids from 0 to {engine.vocab_size - 1}, got {token_id}.",
                param="input",
            )
    if keep is None:
        return item
    return item[:keep] if side == "right" else item[-keep:]


def _keep(request: PoolingBase, engine: EngineClient) -> int | None:
    """Tokens that prompts are cut to; `None`: they are not."""
    keep = request.truncate_prompt_tokens
    return engine.max_model_len if keep == -1 else keep


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """Run tokenisation: on the loop if it is short, else in a thread."""
    return work() if characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


async def read_pair(
    engine: EngineClient,
    request: PoolingBase,
    params: PoolingParams,
    first: str,
    second: str,
    max_first: int | None,
    max_second: int | None,
) -> Prompt:
    """Two texts as one prompt of a cross-encoder.

    Raises:
        ContextLengthExceeded: the texts are far too long.
    """
    keep, length = _keep(request, engine), len(first) + len(second)
    limit = TEXT_MARGIN * engine.max_model_len * engine.tokenizer.longest_token
    if length > limit and keep is None and max_second is None:
        raise ContextLengthExceeded(
            f"A pair of texts has {length} characters; more than {limit} cannot fit the model's "
            f"context of {engine.max_model_len} tokens."
        )
    tokenizer = engine.tokenizer
    pair = await off_loop(
        length, lambda: tokenizer.encode_pair(first, second, keep, max_first, max_second)
    )
    return Prompt(pair.ids, params.replace(token_type_split=pair.split))


def check_lengths(max_first: int | None, max_second: int | None) -> None:
    """Refuse limits that leave nothing.

    Raises:
        InvalidRequest: a limit is below 1.
    """
    for name, value in (("max_tokens_per_query", max_first), ("max_tokens_per_doc", max_second)):
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {show(value)}.", param=name)
