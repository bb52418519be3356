"""Turns texts and conversations into token ids, as every API has to do with the prompts of a body.

Long work (a long text, many texts, a long conversation) runs on a thread, off the event loop. Knows
no endpoint and no format of bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from quire.errors import ContextLengthExceeded, InvalidRequest
from quire.serving.decode import show
from quire.serving.engine_protocol import EngineClient
from quire.tokenizer.chat_template import check_template_kwargs
from quire.tokenizer.template_cost import rendering_work, template_degree
from quire.tokenizer.template_helper import MAX_WORK

TEXT_MARGIN: Final = 4
"""A text may have this many times the characters that the longest tokens could cover within the
context, because normalisers may shorten it."""
INLINE_CHARACTERS: Final = 8192
"""Texts up to this total length are tokenised on the event loop, because a thread would cost
more."""
TURN_CHARACTERS: Final = 100
"""Number of characters that take as long to tokenise as one message or tool takes to render."""

T = TypeVar("T")


async def encode(
    engine: EngineClient, text: str, add_special_tokens: bool, *, cut: bool = False
) -> list[int]:
    """Token ids of a text. With `cut` the caller truncates them, so a long text is allowed.

    Raises:
        ContextLengthExceeded: the text is so long that it is not worth tokenising.
    """
    return (await encode_all(engine, [text], add_special_tokens, cut=cut))[0]


async def encode_all(
    engine: EngineClient, texts: Sequence[str], add_special_tokens: bool, *, cut: bool = False
) -> list[list[int]]:
    """Token ids of each text, as `encode` gives them.

    Raises:
        ContextLengthExceeded: a text is so long that it is not worth tokenising.
    """
    if not cut:
        check_text_length(engine, texts)
    tokenizer = engine.tokenizer

    def work() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await off_loop(sum(map(len, texts)), work)


def check_text_length(engine: EngineClient, texts: Sequence[str]) -> None:
    """Refuse texts that are so long that they are not worth tokenising.

    Raises:
        ContextLengthExceeded: one is.
    """
    limit = TEXT_MARGIN * engine.max_model_len * engine.tokenizer.longest_token
    longest = max(map(len, texts), default=0)
    if longest > limit:
        raise ContextLengthExceeded(
            f"The prompt has {longest} characters; more than {limit} cannot fit the model's "
            f"context of {engine.max_model_len} tokens.",
            param="prompt",
        )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run work on the loop if it is small, otherwise on a thread. `size` is the number of
    characters to tokenise, or the equivalent of other work."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: naming the first one.
    """
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = next(i for i in ids if not 0 <= i < vocab_size)
    raise InvalidRequest(
        f"{param} must hold token ids from 0 to {vocab_size - 1}, got {show(bad)}.", param=param
    )


async def render_turns(
    engine: EngineClient,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any],
) -> str:
    """The prompt that the model's template renders from turns.

    A cheap template renders a short conversation on the event loop and a longer one on a thread; a
    very long one, and any other template, is rendered in a process that may be killed.

    Args:
        engine: The engine whose template is used.
        turns: Dictionaries as templates expect them, with `role` and `content` and, if set, `name`,
            `tool_calls` (with arguments as objects), `tool_call_id` and `reasoning`.
        tools: OpenAI's tool objects.
        add_generation_prompt: Whether the prompt ends where the assistant's turn begins. `None`:
            yes, unless the last message is continued.
        continue_final_message: Whether the prompt ends inside the last turn.
        template_kwargs: Further variables of the template.

    Raises:
        InvalidRequest: an option is wrong, the template refuses, or rendering exceeds a limit.
        TooManyRequests: other conversations are being rendered, and its turn did not come in time.
    """
    if not turns:
        raise InvalidRequest("messages must not be empty.", param="messages")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other.",
            param="continue_final_message",
        )
    kwargs = check_template_kwargs(template_kwargs)
    if "self" in kwargs:  # the one name that Python itself would stumble over
        raise InvalidRequest(
            "chat_template_kwargs must not set 'self'.", param="chat_template_kwargs"
        )
    goes_on = bool(continue_final_message)
    begins = not goes_on if add_generation_prompt is None else add_generation_prompt

    def work() -> str:
        return engine.tokenizer.apply_chat_template(
            turns,
            tools=tools or None,
            add_generation_prompt=begins,
            continue_final_message=goes_on,
            **kwargs,
        )

    size = TURN_CHARACTERS * (len(turns) + len(tools or ()))
    template, helper = engine.tokenizer.chat_template, engine.templates
    if template is None or helper is None:
        return await off_loop(size, work)
    degree = template_degree(template.source(tools))
    passes = MAX_WORK + 1
    if degree is not None:
        passes = rendering_work(degree, (turns, tools, kwargs), MAX_WORK)
    if passes > MAX_WORK:
        return await helper.render(turns, tools or None, begins, goes_on, kwargs)
    return await off_loop(max(size, passes), work)
