"""The bodies of chat requests, read: what all conversations of a request have in common, and what
each of them is to the engine. Knows no route and no reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.checks import truncate
from quire.serving.conversation import read_tools, render_chat
from quire.serving.engine_protocol import EngineClient
from quire.serving.exchange import Exchange
from quire.serving.field_names import FieldNames
from quire.serving.forced_calls import call_names
from quire.serving.openai.reply import usage_each
from quire.serving.openai.sampling import build_params, check_common
from quire.serving.openai.schema import ChatRequest
from quire.serving.openai.structured import constraint_names
from quire.serving.parsing import Parsing
from quire.serving.prompts import encode
from quire.serving.server_state import ServedModel, require_runner
from quire.serving.tools import ToolUse

OWN_NAMES: Final = {"prompt": "messages", "logprobs": "top_logprobs"}
"""What chat calls fields of the engine."""


@dataclass(frozen=True, slots=True)
class ChatFields:
    """A body without its messages, checked."""

    priority: int
    max_tokens: int | None
    tools: ToolUse
    variables: dict[str, Any]
    """Of the template."""
    params: SamplingParams
    """Without what a conversation settles."""
    names: FieldNames
    """What the caller calls the fields that errors name."""
    shows_tokens: bool
    """Whether the reply has sampled tokens or their log-probabilities."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """One conversation, as the engine and the reader of its output get it."""

    ids: list[int]
    params: SamplingParams
    parsing: Parsing
    echoed: str
    """With `echo`: the unfinished assistant turn that the reply continues."""


def read_fields(
    exchange: Exchange, served: ServedModel, request: ChatRequest, conversations: int = 1
) -> ChatFields:
    """Read what all conversations have in common.

    Args:
        exchange: The request.
        served: The model.
        request: The body.
        conversations: How many there are.

    Raises:
        InvalidRequest: a field is wrong.
    """
    engine = served.engine
    require_runner(engine, "generate")
    priority = exchange.priority(request.priority, engine.config.scheduler.scheduling_policy)
    check_common(request)
    max_tokens = _max_tokens(request)
    logprobs = _logprobs(request, engine.config.model.max_logprobs)
    tools = read_tools(
        request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
    )
    served.parsers.check_tools(tools)
    variables = served.parsers.variables(request.reasoning_effort, request.chat_template_kwargs)
    if request.documents is not None:
        variables = {"documents": request.documents, **variables}
    params = build_params(
        request,
        engine.default_params,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        prompts=conversations,
        most=exchange.state.config.max_n_sequences,
        model=engine.config.model,
    )
    shows = params.num_logprobs is not None or request.return_token_ids or usage_each(request)
    names = call_names(tools) if tools.constrains else constraint_names(request)
    names = names.beside(OWN_NAMES)
    return ChatFields(priority, max_tokens, tools, variables, params, names, bool(shows))


async def read_conversation(
    served: ServedModel, request: ChatRequest, fields: ChatFields, place: str = "messages"
) -> ChatPrompt:
    """Render and tokenise the messages of a request, which errors call `place`.

    Raises:
        RequestError: a message is wrong, the template refuses, or the text is too long.
    """
    engine = served.engine
    prompt = await render_chat(
        engine,
        request.messages,
        fields.tools.for_template(),
        request.add_generation_prompt,
        request.continue_final_message,
        fields.variables,
        place,
    )
    with fields.names.beside({**OWN_NAMES, "prompt": place}).told():
        ids = await _encode(engine, prompt, request, fields)
    goes_on = bool(request.continue_final_message)
    parsing, params = served.parsers.parsing(
        prompt,
        fields.tools,
        fields.params,
        engine.tokenizer,
        reasoning=request.include_reasoning is not False,
        may_reason=not goes_on and served.parsers.may_reason(fields.variables),
    )
    return ChatPrompt(ids, params, parsing, _echoed(request))


async def _encode(
    engine: EngineClient, prompt: str, request: ChatRequest, fields: ChatFields
) -> list[int]:
    cut = request.truncate_prompt_tokens is not None
    ids = await encode(engine, prompt, bool(request.add_special_tokens), cut=cut)
    return truncate(ids, request, engine.max_model_len - (fields.max_tokens or 1))


def _max_tokens(request: ChatRequest) -> int | None:
    """The limit under its newer or older name; without either, up to the context length."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) are two names of one limit: "
            "give one of them.",
            param="max_tokens",
        )
    if new is not None:
        read_field("max_completion_tokens", new)
    return old if new is None else new


def _logprobs(request: ChatRequest, limit: int) -> int | None:
    """How many candidates to ask for, which chat requests say in two fields."""
    if not request.logprobs:
        if request.top_logprobs:  # 0 asks for nothing
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    top: int = read_field("top_logprobs", request.top_logprobs or 0)
    if top > limit >= 0:
        raise InvalidRequest(
            f"top_logprobs must be at most {limit} (--max-logprobs), got {top}.",
            param="top_logprobs",
        )
    return top


def _echoed(request: ChatRequest) -> str:
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return last.content if isinstance(last.content, str) else ""
