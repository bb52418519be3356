"""Grammars that make a model call tools, in the syntax that its parser reads.

A structural tag (`structured/tags.py`): for `tool_choice` required or named, calls and nothing else
after the reasoning; for strict tools that may be called, free text in which what begins a call must
go on as one. Knows no llguidance.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from quire.errors import InvalidRequest
from quire.serving.parsing import CallSyntax, OutputParser
from quire.serving.tools import ToolSpec, ToolUse
from quire.structured.params import StructuredOutputsParams

Format = dict[str, Any]


def call_grammar(
    use: ToolUse,
    parser: type[OutputParser],
    reasoning: type[OutputParser] | None,
    prompt: str,
    vocabulary: Container[str],
) -> StructuredOutputsParams | None:
    """What the output must be, given the request's tools and choice; `None`: anything.

    Args:
        use: The tools and the choice.
        parser: The parser of calls; it has a `call_syntax`.
        reasoning: The parser of reasoning, if there is one.
        prompt: As the template rendered it; it may end inside the reasoning.
        vocabulary: Texts of the model's special tokens.

    Raises:
        InvalidRequest: a tool is strict, and nothing marks a call in this model's syntax.
    """
    syntax = parser.call_syntax(vocabulary)
    assert syntax is not None, f"{parser.__name__} writes no JSON"
    mode, tools = use.choice.mode, use.offered
    if mode == "auto":
        if not any(tool.strict for tool in tools):
            return None
        if syntax.trigger is None:
            raise InvalidRequest(
                'strict tools need tool_choice "required" or a named tool here: in this model\'s '
                "syntax nothing tells a call from an answer before it ends.",
                param="tools",
            )
        body = _triggered(syntax, syntax.trigger, tools)
    else:
        chosen = [tool for tool in tools if mode == "required" or tool.name == use.choice.name]
        once = mode == "named" or not use.choice.parallel or syntax.one_call
        body = _calls(syntax, chosen, once)
    parts = [*_thoughts(reasoning, prompt), body]
    form = parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


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
    if syntax.middle:
        number = {"type": "regex", "pattern": syntax.number}
        parts = [number, _const(syntax.middle), content]
        content = {"type": "sequence", "elements": parts}
    return {"begin": begin, "content": content, "end": syntax.end}


def _triggered(syntax: CallSyntax, trigger: str, tools: Sequence[ToolSpec]) -> Format:
    """Free text, and one call after each trigger. Tools that are not strict take any object."""
    tags = []
    for tool in tools:
        tag = _tag(syntax, tool if tool.strict else ToolSpec(tool.name))
        whole = {"begin": syntax.before + tag["begin"], "end": tag["end"] + syntax.after}
        tags.append(tag | whole)
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _thoughts(reasoning: type[OutputParser] | None, prompt: str) -> list[Format]:
    """Free reasoning before the calls: what is left of it, or all of it, which may be left out."""
    if reasoning is None or reasoning.thoughts is None:
        return []
    opening, closing = reasoning.thoughts
    ended = prompt.rstrip()
    if ended.endswith(closing):
        return []
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": closing}
    gap = {"type": "regex", "pattern": r"\s{0,4}"}
    if ended.endswith(opening) or getattr(reasoning, "always", False):
        return [free, gap]
    nothing = {"type": "regex", "pattern": r"\n?"}  # a structural tag has no empty string
    whole = {"type": "sequence", "elements": [free | {"begin": opening}, gap]}
    return [{"type": "or", "elements": [whole, nothing]}]
