"""Conversations and texts to token ids. Long inputs, and many, are tokenised in a thread, off the
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from quire.errors import ContextLengthExceeded, InvalidRequest
from quire.serving.decode import show
from quire.serving.engine_protocol import EngineClient
from quire.serving.openai.schema import ChatMessage
from quire.tokenizer.chat_template import check_template_kwargs

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
TEXT_MARGIN: Final = 4
"""A text may have this many times the characters that the longest tokens could cover within the
context, because normalisers may shorten it."""
INLINE_CHARACTERS: Final = 8192
"""Texts up to this length together are tokenised on the event loop: a thread costs more."""
TURN_CHARACTERS: Final = 100
"""Characters that take as long to tokenise as a message or tool takes to be shown by a template."""

T = TypeVar("T")


async def encode(
    engine: EngineClient, text: str, add_special_tokens: bool, *, cut: bool = False
) -> list[int]:
    """Token ids of a text. `cut`: the caller shortens them, so a long text is welcome.

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
            f"context of {engine.max_model_len} tokens."
        )


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run work: on the loop if it is small, else in a thread. `size`: characters to tokenise, or
    what takes about as long."""
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


async def render_chat(
    engine: EngineClient,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> str:
    """The prompt that the model's template makes of a conversation.

    Raises:
        InvalidRequest: a message or option is wrong, or the template refuses.
    """
    turns = TURN_CHARACTERS * (len(messages) + len(tools or ()))
    return await off_loop(
        turns,
        lambda: _render(
            engine,
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            template_kwargs or {},
        ),
    )


def _render(
    engine: EngineClient,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any],
) -> str:
    if not messages:
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
    turns = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return engine.tokenizer.apply_chat_template(
        turns,
        tools=tools or None,
        add_generation_prompt=not goes_on
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=goes_on,
        **kwargs,
    )


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A turn as templates expect it: only the keys that are set."""
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, got {show(message.role)}.",
            param=f"{where}.role",
        )
    if message.audio or message.function_call or message.annotations or message.refusal:
        name = next(
            name
            for name in ("audio", "function_call", "annotations", "refusal")
            if getattr(message, name)
        )
        raise InvalidRequest(f"{where}.{name} is not supported.", param=f"{where}.{name}")
    # `developer` is OpenAI's newer name of `system`, which is the one that templates know.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequest(
                f"{where}.tool_calls belongs to assistant messages only.",
                param=f"{where}.tool_calls",
            )
        turn["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(f"{where}.content is required.", param=f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise InvalidRequest(
                f'{where}.content[{i}]: only parts of type "text" are supported, got {show(kind)}.',
                param=f"{where}.content[{i}].type",
            )
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}.content[{i}].text must be a string, got {show(text)}.",
                param=f"{where}.content[{i}].text",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates print them with `tojson`."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function.name must be a string.", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments must be a JSON object in a string.",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}
