"""Grammars that make a model call tools, in the syntax that its parser reads.

A structural tag (`structured/tags.py`): for `tool_choice` required or named, calls and nothing
else; for strict tools that may be called, and where others may not, free text in which what begins
a call must go on as one. Knows no reasoning, which comes before, and no llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import msgspec

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.field_names import AS_THE_ENGINE, ENGINE, FieldNames
from quire.serving.parsing import CallSyntax, OutputParser
from quire.serving.tools import ToolSpec, ToolUse
from quire.structured.params import StructuredOutputsParams
from quire.structured.settle import settle

Format = dict[str, Any]
MAX_CHECKED_CHARS: Final = 32_768
"""Longest structural tag whose grammar is written to find out whether a syntax can carry it: this
is done where requests are read, and takes milliseconds."""


def call_grammar(
    use: ToolUse,
    parser: type[OutputParser],
    vocabulary: Container[str],
) -> StructuredOutputsParams | None:
    """What the output must be, given the request's tools and choice; `None`: anything.

    Args:
        use: The tools and the choice.
        parser: The parser of calls; it has a `call_syntax`.
        vocabulary: Texts of the model's special tokens.

    Raises:
        InvalidRequest: a tool is strict, or others may not be called, and nothing tells a call in
            this model's syntax.
    """
    syntax = parser.call_syntax(vocabulary)
    assert syntax is not None, f"no grammar can say what {parser.__name__} reads"
    mode, tools = use.choice.mode, use.offered
    if mode == "auto":
        if not use.constrains:
            return None
        for tool in tools:
            _check_name(syntax, tool)
        form = _auto(syntax, parser.answer, tools)
    else:
        once = mode == "named" or not use.choice.parallel or syntax.one_call
        form = _calls(syntax, _chosen(use), once)
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def can_force(use: ToolUse, parser: type[OutputParser], vocabulary: Container[str]) -> bool:
    """Whether the parser's own syntax can carry all calls that are forced: some cannot say all that
    a schema may ask for, which JSON can."""
    syntax = parser.call_syntax(vocabulary)
    if syntax is None:
        return False
    if syntax.style == "json":
        return True
    if not all(_fits_name(syntax, tool) for tool in _chosen(use)):
        return False
    grammar = call_grammar(use, parser, vocabulary)
    if grammar is None or len(msgspec.json.encode(grammar)) > MAX_CHECKED_CHARS:
        return False
    try:
        settle(grammar, {})
    except InvalidRequest:
        return False
    return True


def held_tools(use: ToolUse) -> frozenset[str]:
    """The tools whose calls `call_grammar` holds to their schemas."""
    tools = _chosen(use) if use.constrains else ()
    forced = use.choice.mode != "auto"
    return frozenset(tool.name for tool in tools if forced or tool.strict)


def _fits_name(syntax: CallSyntax, tool: ToolSpec) -> bool:
    return not syntax.names or re.fullmatch(syntax.names, tool.name) is not None


def _check_name(syntax: CallSyntax, tool: ToolSpec) -> None:
    if not _fits_name(syntax, tool):
        raise InvalidRequest(
            f"{tool.place}: this model's syntax of calls, to which strict and allowed tools are "
            f"held, has no names such as {show(tool.name)}; it has letters, digits, `_` and `.`.",
            param="tools",
        )


def call_names(use: ToolUse) -> FieldNames:
    """What errors about the grammar of `call_grammar` name: the tools in the caller's request."""
    if not use.constrains:
        return AS_THE_ENGINE
    return FieldNames({ENGINE: "tools"}, [tool.place for tool in _chosen(use)])


def _chosen(use: ToolUse) -> Sequence[ToolSpec]:
    """The tools that a call may be of, in the order of the grammar's tags."""
    if use.choice.mode != "named":
        return use.offered
    return [tool for tool in use.offered if tool.name == use.choice.name]


def _calls(syntax: CallSyntax, tools: Sequence[ToolSpec], once: bool) -> Format:
    tags: Format = {
        "type": "tags_with_separator",
        "tags": [_tag(syntax, tool) for tool in tools],
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": once,
    }
    if not (syntax.before or syntax.after):
        return tags
    around = [_const(syntax.before), tags, _const(syntax.after)]
    return {"type": "sequence", "elements": around}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _tag(syntax: CallSyntax, tool: ToolSpec) -> Format:
    begin = syntax.begin.replace("NAME", tool.name)
    # The caller's schema is left as it is, whatever becomes of this one.
    schema = msgspec.json.decode(msgspec.json.encode(tool.parameters or {}))
    content: Format = {"type": "json_schema", "json_schema": {"type": "object", **schema}}
    if syntax.style != "json":
        content["style"] = syntax.style
    if syntax.middle:
        number = {"type": "regex", "pattern": syntax.number}
        parts = [number, _const(syntax.middle), content]
        content = {"type": "sequence", "elements": parts}
    return {"begin": begin, "content": content, "end": syntax.end}


def refuse_strict() -> NoReturn:
    """Refuse strict tools, or a part of the tools, that the model is free to call or not.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(
        'strict tools, and a part of the tools, need tool_choice "required" or a named tool here: '
        "this model's syntax of calls cannot be told from an answer before it ends, or is not "
        "known.",
        param="tools",
    )


def _auto(syntax: CallSyntax, answer: str, tools: Sequence[ToolSpec]) -> Format:
    """An answer, or calls. Tools that are not strict take any object."""
    tools = [tool if tool.strict else ToolSpec(tool.name) for tool in tools]
    if syntax.asides:
        return _messages(syntax, answer, tools)
    if syntax.trigger is not None:
        return _triggered(syntax, syntax.trigger, tools)
    if not syntax.free:
        refuse_strict()
    calls = _calls(syntax, tools, once=False)
    ways: list[Format] = [{"type": "regex", "pattern": syntax.free}]
    for text, mark, *ends in syntax.leads:
        before = [{"type": "regex", "pattern": text}] if text else []
        before += [_const(mark)] if mark else []
        after = [{"type": "or", "elements": [_const(""), _const(end)]} for end in ends]
        ways.append({"type": "sequence", "elements": [*before, calls, *after]})
    return {"type": "or", "elements": ways}


def _triggered(syntax: CallSyntax, trigger: str, tools: Sequence[ToolSpec]) -> Format:
    """Free text, and one call after each trigger."""
    tags, triggers = [], [trigger]
    for tool in tools:
        tag = _tag(syntax, tool)
        whole = {"begin": syntax.before + tag["begin"], "end": tag["end"] + syntax.after}
        tags.append(tag | whole)
    for begin, end in syntax.others:
        other = replace(syntax, begin=begin, end=end)
        tags += [_tag(other, tool) for tool in tools]
        triggers.append(begin.partition("NAME")[0])
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _messages(syntax: CallSyntax, answer: str, tools: Sequence[ToolSpec]) -> Format:
    """Messages with headers: any that come before, then an answer or a call. The prompt may have
    the header of an answer, so that its text comes alone."""
    text: Format = {"type": "any_text"}
    asides: Format = {
        "type": "tags_with_separator",
        "tags": [{"begin": begin, "content": text, "end": end} for begin, end in syntax.asides],
        "separator": "",
    }
    told: Format = {"type": "sequence", "elements": [_const(answer), text]}
    ways = [syntax, *(replace(syntax, begin=begin, end=end) for begin, end in syntax.others)]
    calls = [{"type": "tag", **_tag(way, tool)} for way in ways for tool in tools]
    last: Format = {"type": "or", "elements": [text, told, *calls]}
    return {"type": "sequence", "elements": [asides, last]}
