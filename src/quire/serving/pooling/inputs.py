"""Request fields to the prompts of a pooling model: token ids and parameters, within limits.

Long texts are tokenised in a thread. Knows nothing of replies.
"""

from __future__ import annotations

from itertools import chain

from quire.bounds import read_field
from quire.config import PoolerSpec
from quire.errors import ContextLengthExceeded, InvalidRequest
from quire.params import PoolingParams
from quire.serving.checks import check_labels
from quire.serving.conversation import render_chat
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.limits import INPUTS
from quire.serving.pooling.results import Prompt, prompt_names
from quire.serving.pooling.schema import InputRequest, PoolingBase
from quire.serving.prompts import TEXT_MARGIN, check_ids, encode_all, off_loop
from quire.serving.server_state import require_runner


def check_base(exchange: Exchange, request: PoolingBase, engine: EngineClient) -> PoolerSpec:
    """How the model pools, after the rules that all pooling endpoints share.

    Raises:
        UnsupportedTask: the model generates text.
        InvalidRequest: a label or number is out of range.
    """
    pooler = require_runner(engine, "pooling")
    assert pooler is not None, "a pooling model has one"
    check_labels(request)
    policy = engine.config.scheduler.scheduling_policy
    request.priority = exchange.priority(request.priority, policy)
    return pooler


def base_params(
    request: PoolingBase, task: str, use_activation: bool | None, dimensions: int | None = None
) -> PoolingParams:
    """The parameters of every prompt of the request.

    They say nothing of truncation: prompts are cut before they are submitted.

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
        text = await render_chat(
            engine, request.messages, None, bool(request.add_generation_prompt), None,
            request.chat_template_kwargs,
        )  # fmt: skip
        special = bool(request.add_special_tokens)
        found = await _texts(engine, [text], request, special)
        return [Prompt(ids, params) for ids in found]
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} needs messages, not input.", param=name)
    special = request.add_special_tokens is not False
    items = _items(request.input)
    texts = [item for item in items if isinstance(item, str)]
    found = (
        await _texts(engine, texts, request, special)
        if texts
        else _tokens(engine, [item for item in items if not isinstance(item, str)], request)
    )
    return [Prompt(ids, params) for ids in found]


def _items(given: object) -> list[str | list[int]]:
    """The four shapes of `input` as a list of texts or of token lists."""
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
    INPUTS.check(count, param)


async def _texts(
    engine: EngineClient, texts: list[str], request: PoolingBase, special: bool
) -> list[list[int]]:
    """Token ids of texts, cut as the request wants."""
    keep, side = _keep(request, engine), request.truncation_side or "right"
    if keep is None:
        with prompt_names(request).told():
            return await encode_all(engine, texts, special)
    tokenizer = engine.tokenizer

    def work() -> list[list[int]]:
        return [tokenizer.encode_within(text, keep, side, special) for text in texts]

    return await off_loop(sum(map(len, texts)), work)


def _tokens(engine: EngineClient, items: list[list[int]], request: PoolingBase) -> list[list[int]]:
    """Given token ids, checked and cut as the request wants."""
    check_ids(list(chain.from_iterable(items)), engine.vocab_size, "input")
    keep = _keep(request, engine)
    if keep is None:
        return items
    left = request.truncation_side == "left"
    return [item[-keep:] if left else item[:keep] for item in items]


def _keep(request: PoolingBase, engine: EngineClient) -> int | None:
    """How many tokens prompts are cut to; `None` if they are not cut."""
    keep = request.truncate_prompt_tokens
    return engine.max_model_len if keep == -1 else keep


async def read_pairs(
    engine: EngineClient,
    request: PoolingBase,
    params: PoolingParams,
    pairs: list[tuple[str, str]],
    max_first: int | None,
    max_second: int | None,
) -> list[Prompt]:
    """Each pair of texts as one prompt of a cross-encoder.

    Raises:
        ContextLengthExceeded: the texts of a pair are far too long.
    """
    keep, lengths = _keep(request, engine), [len(one) + len(two) for one, two in pairs]
    limit = TEXT_MARGIN * engine.max_model_len * engine.tokenizer.longest_token
    if max(lengths) > limit and keep is None and max_second is None:
        raise ContextLengthExceeded(
            f"A pair of texts has {max(lengths)} characters; more than {limit} cannot fit the "
            f"model's context of {engine.max_model_len} tokens."
        )
    tokenizer = engine.tokenizer

    def work() -> list[Prompt]:
        found = (tokenizer.encode_pair(*pair, keep, max_first, max_second) for pair in pairs)
        return [Prompt(p.ids, params.replace(token_type_split=p.split)) for p in found]

    return await off_loop(sum(lengths), work)


def check_lengths(max_first: int | None, max_second: int | None) -> None:
    """Refuse limits that leave nothing.

    Raises:
        InvalidRequest: a limit is below 1, or larger than any.
    """
    for name, value in (("max_tokens_per_query", max_first), ("max_tokens_per_doc", max_second)):
        if value is not None:
            read_field(name, value)
