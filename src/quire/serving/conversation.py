"""Conversations in OpenAI's form, which several APIs take: the messages of a body, read into turns
for the model's chat template, and its tools, read into their neutral form.

Knows no endpoint. An API whose messages have another form makes its own turns and calls
`prompts.render_turns`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.engine_protocol import EngineClient
from quire.serving.prompts import TURN_CHARACTERS, off_loop, render_turns
from quire.serving.tools import ToolChoice, ToolSpec, ToolUse, tool_spec, tool_use

TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of content parts that are text; the last two are those of the Responses API, which clients
send here as well. As in vLLM, the texts of a message are joined by newlines."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_NAMED: Final = '{"type": "function", "function": {"name": ...}}'


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. The fields after `tool_call_id` are those of replies, so that a reply can be sent
    back unchanged."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


async def render_chat(
    engine: EngineClient,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    place: str = "messages",
) -> str:
    """The prompt that the model's template renders from a conversation, which errors call
    `place`.

    Raises:
        InvalidRequest: a message or option is wrong, or the template refuses.
    """

    def work() -> list[dict[str, Any]]:
        return [_turn(message, f"{place}[{i}]") for i, message in enumerate(messages)]

    return await render_turns(
        engine,
        await off_loop(TURN_CHARACTERS * len(messages), work),
        tools,
        add_generation_prompt,
        continue_final_message,
        template_kwargs or {},
    )


def read_tools(
    tools: list[dict[str, Any]] | None, choice: Any = None, *, parallel: bool = True
) -> ToolUse:
    """The tools of a request, and its choice among them.

    Args:
        tools: OpenAI's nested tool objects.
        choice: `none`, `auto`, `required`, `{"type": "function", "function": {"name": ...}}` or
            `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`.
        parallel: OpenAI's `parallel_tool_calls`.

    Raises:
        InvalidRequest: a value is wrong, or the choice does not fit the tools.
    """
    specs = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    chosen = None if choice is None else _choice(choice, parallel)
    if chosen is None and specs:
        chosen = ToolChoice("auto", parallel=parallel)
    return tool_use(specs, chosen, place="tools[{}].function.name".format)


def _tool(tool: dict[str, Any], where: str) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "function": {{...}}}}, got {show(tool)}.',
            param=where,
        )
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return tool_spec(
        f"{where}.function",
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
        function.get("strict"),
        shown={"type": "function", "function": shown},
    )


def _choice(choice: Any, parallel: bool) -> ToolChoice:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), parallel)
    name = _name(choice)
    if name is not None:
        return ToolChoice("named", name, parallel)
    raise InvalidRequest(
        f'tool_choice must be "none", "auto", "required", {_NAMED} or '
        f'{{"type": "allowed_tools", ...}}, got {show(choice)}.',
        param="tool_choice",
    )


def _allowed(given: Any, parallel: bool) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (0, 0)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise InvalidRequest(
            f'{where} must be {{"mode": "auto" or "required", "tools": [...]}}, got {show(given)}.',
            param=where,
        )
    names = {}
    for i, tool in enumerate(tools):
        name = _name(tool)
        if name is None:
            raise InvalidRequest(
                f"{where}.tools[{i}] must be {_NAMED}, got {show(tool)}.",
                param=f"{where}.tools[{i}]",
            )
        names[name] = f"{where}.tools[{i}].function.name"
    return ToolChoice(mode, parallel=parallel, allowed=names)


def _name(given: Any) -> str | None:
    """The name in a reference to a function; `None`: it is none."""
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and given.get("type") == "function" else None


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    """A turn as templates expect it, with only the keys that are set."""
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
    if message.tool_call_id is not None and role != "tool":
        raise InvalidRequest(
            f"{where}.tool_call_id belongs to tool messages only.", param=f"{where}.tool_call_id"
        )
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
        if kind not in TEXT_PARTS:
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
    """A tool call with its arguments as an object, because templates print them with `tojson`."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        name = function.get("name") if isinstance(function, dict) else None
        raise InvalidRequest(
            f"{where}.function.name must be a string, got {show(name)}.", param=where
        )
    given = arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(
            f"{where}.function.arguments must be a JSON object in a string, got {show(given)}.",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}
