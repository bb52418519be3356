"""What a body of `POST /v1/responses` asks for: checked, with the conversation that it continues.

Knows nothing of how the reply is made.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.params import SamplingParams, StructuredOutputsParams
from quire.serving.checks import check_labels, make_params, read_xargs, renamed
from quire.serving.decode import show
from quire.serving.dialogue import Dialogue, RequestLabels, prepare
from quire.serving.exchange import Exchange
from quire.serving.field_names import ENGINE, FieldNames
from quire.serving.prompts import TURN_CHARACTERS, off_loop
from quire.serving.responses.items import (
    Item,
    TurnsOfItems,
    normalised,
    resolved,
    with_instructions,
)
from quire.serving.responses.keeping import (
    ConversationInput,
    KeptResponse,
    find,
    owner,
    turns_after,
)
from quire.serving.responses.response_reply import ResponseReply
from quire.serving.responses.schema import (
    FORMATS,
    INCLUDED,
    LOGPROBS,
    REASONING,
    REFUSED_TOOLS,
    TEXT_CONFIG,
    TOOL_CHOICES,
    TOOLS,
    InputTokensRequest,
    ResponsesRequest,
)
from quire.serving.server_state import ServedModel
from quire.serving.submission import Submission
from quire.serving.tagged import check_object, check_tagged
from quire.serving.token_texts import TokenTexts
from quire.serving.tools import ToolChoice, ToolSpec, ToolUse, tool_spec, tool_use
from quire.serving.turn_reader import TurnReader

SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "repetition_detection",
    "thinking_token_budget",
)  # fmt: skip
"""Fields that have the same name and meaning in `SamplingParams`."""
FORM: Final = FieldNames(
    {ENGINE: "text.format", f"{ENGINE}.json": "text.format.schema"},
    others={"prompt": "input", "logprobs": "top_logprobs"},
)
_HEX: Final = re.compile("[0-9a-f]{32}")
MAX_KEY, MAX_VALUE = 64, 512
"""Characters of a key and a value of `metadata`."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request: what to submit, how to read the output, and what becomes of it."""

    served: ServedModel
    submission: Submission
    reader: TurnReader
    reply: ResponseReply
    conversation: ConversationInput
    store: bool


async def prepare_response(
    exchange: Exchange, served: ServedModel, request: ResponsesRequest
) -> PreparedResponse:
    """Check a request, and say what to submit and what becomes of it.

    Raises:
        RequestError: something is wrong or not supported; `param` is its place.
    """
    engine = served.engine
    priority = exchange.priority(request.priority, engine.config.scheduler.scheduling_policy)
    check_labels(request)
    _check_metadata(request.metadata)
    store = _store(exchange, request)
    top = _top_logprobs(request, engine.config.model.max_logprobs)
    response_id = _new_id(exchange)
    conversation = await read_conversation(exchange, request, response_id)
    dialogue = dialogue_for(served, request, conversation)
    params = _params(request, served, top)
    labels = RequestLabels(response_id, request.user, priority, request.cache_salt)
    submission, reader = await prepare(
        exchange,
        served,
        dialogue,
        params,
        labels,
        reasoning=request.include_reasoning is not False,
    )
    settings = _settings(request, served, params, store)
    texts = TokenTexts(engine.tokenizer, False)
    reply = ResponseReply(response_id, settings, texts, top, exchange.created)
    return PreparedResponse(served, submission, reader, reply, conversation, store)


def _new_id(exchange: Exchange) -> str:
    """The response's id: made of that of the HTTP request, if that is new to the caller."""
    digits = exchange.request_id
    if not _HEX.fullmatch(digits):
        digits = hashlib.sha256(digits.encode()).hexdigest()[:32]
    name = f"resp_{digits}"
    known = exchange.state.responses.get(owner(exchange), name) is not None
    return f"resp_{uuid.uuid4().hex}" if known else name


async def read_conversation(
    exchange: Exchange, request: InputTokensRequest, response_id: str
) -> ConversationInput:
    """The conversation, with the one before it.

    Raises:
        InvalidRequest, NotFound: an item is wrong, or a response or item is not there.
    """
    before: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = find(exchange, request.previous_response_id, "previous_response_id")
        if not isinstance(previous, KeptResponse):
            raise InvalidRequest(
                f"previous_response_id: the response {show(request.previous_response_id)} has not "
                "ended yet.",
                param="previous_response_id",
            )
        before = turns_after(previous)
    given: list[Item]
    if isinstance(request.input, str):
        given = [{"role": "user", "content": request.input}]
    else:
        given = await resolved(request.input, lambda name: _output(exchange, name))

    def work() -> ConversationInput:
        turns = TurnsOfItems(before).add(given).turns
        if not turns:
            raise InvalidRequest("input must not be empty.", param="input")
        items = [normalised(item, response_id, i) for i, item in enumerate(given)]
        return ConversationInput(items, turns)

    return await off_loop(TURN_CHARACTERS * len(given), work)


def _output(exchange: Exchange, name: str) -> list[Item] | None:
    kept = exchange.state.responses.get(owner(exchange), name)
    return msgspec.json.decode(kept.body)["output"] if isinstance(kept, KeptResponse) else None


def dialogue_for(
    served: ServedModel, request: InputTokensRequest, conversation: ConversationInput
) -> Dialogue:
    """The conversation as the model's template takes it.

    Raises:
        InvalidRequest: something is wrong or not supported; `param` is its place.
    """
    effort = None
    if request.reasoning is not None:
        check_object(request.reasoning, REASONING, "reasoning")
        effort = request.reasoning.get("effort")
    with renamed("reasoning_effort", "reasoning.effort"):
        variables = served.parsers.variables(effort, request.chat_template_kwargs)
    read_format(request.text)
    turns = with_instructions(conversation.turns, request.instructions)
    return Dialogue(turns, _tools(request), variables=variables, form=FORM)


def read_format(text: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The form that the output must have. `strict` changes nothing: a schema always holds.

    Raises:
        InvalidRequest: something is wrong or not supported; `param` is its place.
    """
    if text is None:
        return None
    check_object(text, TEXT_CONFIG, "text")
    form = text.get("format")
    match "text" if form is None else check_tagged(form, FORMATS, {}, "text.format"):
        case "json_schema":
            with FORM.told():
                return StructuredOutputsParams(json=form["schema"])  # type: ignore[index]
        case "json_object":
            return StructuredOutputsParams(json_object=True)
    return None


def _tools(request: InputTokensRequest) -> ToolUse:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None:
        return tool_use(tools, ToolChoice("auto", parallel=parallel) if tools else None)
    if choice in ("none", "auto", "required"):
        if not tools and choice == "auto":  # OpenAI's default, which clients send along
            return tool_use(tools, None)
        return tool_use(tools, ToolChoice(choice, parallel=parallel))  # type: ignore[arg-type]
    if not isinstance(choice, dict):
        raise InvalidRequest(
            f'tool_choice must be "none", "auto", "required" or an object, got {show(choice)}.',
            param="tool_choice",
        )
    if check_tagged(choice, TOOL_CHOICES, REFUSED_TOOLS, "tool_choice") == "function":
        return tool_use(tools, ToolChoice("named", choice["name"], parallel))
    allowed = _allowed(choice["tools"])
    return tool_use(tools, ToolChoice(choice["mode"], parallel=parallel, allowed=allowed))


def _tool(tool: dict[str, Any], where: str) -> ToolSpec:
    check_tagged(tool, TOOLS, REFUSED_TOOLS, where)
    return tool_spec(
        where, tool["name"], tool.get("description"), tool.get("parameters"), tool.get("strict")
    )


def _allowed(tools: list[Any]) -> dict[str, str]:
    """Names, and where each is."""
    names = {}
    for i, tool in enumerate(tools):
        where = f"tool_choice.tools[{i}]"
        check_tagged(tool, {"function": TOOL_CHOICES["function"]}, REFUSED_TOOLS, where)
        names[tool["name"]] = f"{where}.name"
    return names


def _store(exchange: Exchange, request: ResponsesRequest) -> bool:
    """Whether the response is kept."""
    enabled = exchange.state.responses.enabled
    if request.store and not enabled:
        raise InvalidRequest(
            "store must be false: this server keeps no responses (--max-stored-responses 0).",
            param="store",
        )
    store = enabled if request.store is None else request.store
    if request.background and not store:
        raise InvalidRequest(
            "background needs store to be true, because the response is retrieved later.",
            param="background",
        )
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported: events are not padded.",
            param="stream_options.include_obfuscation",
        )
    return store


def _top_logprobs(request: ResponsesRequest, limit: int) -> int | None:
    """Candidates of each token; `None`: no log-probabilities."""
    for name in request.include or ():
        if why := INCLUDED.get(name, "unknown"):
            known = ", ".join(value for value, refused in INCLUDED.items() if not refused)
            told = why if why != "unknown" else f"it must be one of {known}"
            raise InvalidRequest(
                f"include: {show(name)} is not supported: {told}.", param="include"
            )
    if request.top_logprobs is None:
        return 0 if LOGPROBS in (request.include or ()) else None
    top: int = read_field("top_logprobs", request.top_logprobs)
    if top > limit >= 0:
        raise InvalidRequest(
            f"top_logprobs must be at most {limit} (--max-logprobs), got {top}.",
            param="top_logprobs",
        )
    return top if top or LOGPROBS in (request.include or ()) else None


def _params(request: ResponsesRequest, served: ServedModel, top: int | None) -> SamplingParams:
    given: dict[str, Any] = {
        name: value for name in SAMPLING if (value := getattr(request, name)) is not None
    }
    given |= {"max_tokens": request.max_output_tokens, "logprobs": top}
    given["structured_outputs"] = read_format(request.text)
    given["extra_args"] = read_xargs(request.vllm_xargs, served.engine.config.model)
    # Token by token also for a whole reply, where it matters which tokens said what: those of
    # reasoning are counted, and only those of text have log-probabilities.
    piecewise = bool(request.stream or served.parsers.kinds or top is not None)
    with renamed("max_tokens", "max_output_tokens"):
        return make_params(served.engine.default_params, given, stream=piecewise)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidRequest(
                f"metadata may have keys of at most {MAX_KEY} and values of at most {MAX_VALUE} "
                f"characters, got {len(key)} and {len(value)}.",
                param="metadata",
            )


def _settings(
    request: ResponsesRequest, served: ServedModel, params: SamplingParams, store: bool
) -> dict[str, Any]:
    """The fields of a response object that repeat the request, with what was used where it said
    nothing."""
    reasoning = request.reasoning or {}
    text = request.text or {}
    return {
        "model": served.name,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "background": bool(request.background),
        "store": store,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": reasoning.get("summary"),
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
