"""Conversations in Anthropic's form, read into the turns of chat templates.

A user's message may hold the results of tools, which are turns of their own to a template, and come
before what the user says. Knows no reply.
"""

from __future__ import annotations

from typing import Any, Final

from quire.errors import InvalidRequest
from quire.params import StructuredOutputsParams
from quire.serving.anthropic.schema import (
    ASSISTANT_BLOCKS,
    CACHE_CONTROL,
    FORMATS,
    OUTPUT_CONFIG,
    REFUSED_BLOCKS,
    REFUSED_THINKING,
    TEXT_BLOCKS,
    THINKING,
    TOOL,
    TOOL_CHOICES,
    USER_BLOCKS,
    CountTokensRequest,
    MessageParam,
)
from quire.serving.checks import renamed
from quire.serving.decode import show
from quire.serving.dialogue import Dialogue
from quire.serving.field_names import ENGINE, FieldNames
from quire.serving.model_parsers import ModelParsers
from quire.serving.tagged import check_object, check_tagged
from quire.serving.tools import Mode, ToolChoice, ToolSpec, ToolUse, tool_spec, tool_use

ROLES: Final = ("user", "assistant", "system")
FORM: Final = FieldNames(
    {ENGINE: "output_config.format", f"{ENGINE}.json": "output_config.format.schema"},
    others={"prompt": "messages"},
)
LEAST_BUDGET: Final = 1024
"""Anthropic's lower limit of `thinking.budget_tokens`."""


def read_dialogue(request: CountTokensRequest, parsers: ModelParsers) -> Dialogue:
    """The conversation of a body, for a model whose output these parsers read.

    Raises:
        InvalidRequest: something in it is wrong, or not supported; `param` is its place.
    """
    if not request.messages:
        raise InvalidRequest("messages must not be empty.", param="messages")
    _check_cache_control(request.cache_control, "cache_control")
    turns: list[dict[str, Any]] = []
    if request.system is not None:
        turns.append({"role": "system", "content": _text(request.system, "system")})
    for i, message in enumerate(request.messages):
        turns += _turns(message, f"messages[{i}]")
    return Dialogue(
        turns,
        _tools(request),
        continues=request.messages[-1].role == "assistant",
        variables=_variables(request, parsers),
        form=FORM,
    )


def _turns(message: MessageParam, where: str) -> list[dict[str, Any]]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, got {show(message.role)}.",
            param=f"{where}.role",
        )
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "user":
        return _user_turns(message.content, f"{where}.content")
    if message.role == "assistant":
        return [_assistant_turn(message.content, f"{where}.content")]
    return [{"role": "system", "content": _text(message.content, f"{where}.content")}]


def _user_turns(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    results, texts = [], []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if _block(block, USER_BLOCKS, place) == "text":
            texts.append(block["text"])
        else:
            content = _text(block.get("content") or "", f"{place}.content")
            results.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            )
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant_turn(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        match _block(block, ASSISTANT_BLOCKS, f"{where}[{i}]"):
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case _:
                function = {"name": block["name"], "arguments": block["input"]}
                calls.append({"id": block["id"], "type": "function", "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _text(content: Any, where: str) -> str:
    """A text, or the texts of blocks."""
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        _block(block, TEXT_BLOCKS, f"{where}[{i}]")
    return "\n".join(block["text"] for block in content)


def _block(block: Any, shapes: Any, where: str) -> str:
    kind = check_tagged(block, shapes, REFUSED_BLOCKS, where)
    _check_cache_control(block.get("cache_control"), f"{where}.cache_control")
    return kind


def _check_cache_control(given: dict[str, Any] | None, where: str) -> None:
    if given is not None:
        check_object(given, CACHE_CONTROL, where)


# ---- tools ---------------------------------------------------------------------------------------

MODES: Final[dict[str, Mode]] = {
    "auto": "auto", "any": "required", "tool": "named", "none": "none"
}  # fmt: skip
"""Anthropic's types of `tool_choice`."""


def _tools(request: CountTokensRequest) -> ToolUse:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    given = request.tool_choice
    choice = None
    if given is not None:
        kind = check_tagged(given, TOOL_CHOICES, {}, "tool_choice")
        parallel = not given.get("disable_parallel_tool_use")
        choice = ToolChoice(MODES[kind], given.get("name"), parallel)
    return tool_use(tools, choice, param="tool_choice")


def _tool(tool: dict[str, Any], where: str) -> ToolSpec:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f'{where}.type must be "custom": the server runs no tools, offer your own, got '
            f"{show(kind)}.",
            param=f"{where}.type",
        )
    check_object({k: v for k, v in tool.items() if k != "type"}, TOOL, where)
    _check_cache_control(tool.get("cache_control"), f"{where}.cache_control")
    return tool_spec(
        where,
        tool["name"],
        tool.get("description"),
        tool["input_schema"],
        tool.get("strict"),
        schema="input_schema",
    )


# ---- thinking and output -------------------------------------------------------------------------


def _variables(request: CountTokensRequest, parsers: ModelParsers) -> dict[str, Any]:
    """The variables of the template, among them those that say how much the model shall think. A
    template that cannot be told whether to think is not told: the model does as it does."""
    variables: dict[str, Any] = {}
    if (thinking := request.thinking) is not None:
        kind = check_tagged(thinking, THINKING, REFUSED_THINKING, "thinking")
        if kind == "enabled" and thinking["budget_tokens"] < LEAST_BUDGET:
            raise InvalidRequest(
                f"thinking.budget_tokens must be at least {LEAST_BUDGET}, got "
                f"{thinking['budget_tokens']}.",
                param="thinking.budget_tokens",
            )
        told = parsers.told & {"enable_thinking", "thinking"}
        variables |= dict.fromkeys(sorted(told), kind != "disabled")
    effort = None
    if (config := request.output_config) is not None:
        read_format(config)
        effort = config.get("effort")
    with renamed("reasoning_effort", "output_config.effort"):
        return parsers.variables(effort, variables | (request.chat_template_kwargs or {}))


def read_format(config: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """The form that the output must have, of `output_config`.

    Raises:
        InvalidRequest: something is wrong; `param` is its place.
    """
    if config is None:
        return None
    check_object(config, OUTPUT_CONFIG, "output_config")
    form = config.get("format")
    if form is None:
        return None
    check_tagged(form, FORMATS, {}, "output_config.format")
    with FORM.told():
        return StructuredOutputsParams(json=form["schema"])
