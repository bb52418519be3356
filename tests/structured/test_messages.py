"""What a request is told of a form that cannot be compiled."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.params import StructuredOutputsParams
from quire.serving.forced_calls import call_grammar, call_names
from quire.serving.parsing import PARSERS
from quire.serving.tools import ToolChoice, ToolUse, tool_spec
from quire.structured.gate import judge, verdict
from vocabularies import demo


def told(form: StructuredOutputsParams) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        verdict(judge(demo(), form))
    return caught.value


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "pythonic", "json"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_tool_whose_schema_is_wrong_is_named(parser: str, mode: Any) -> None:
    good = {"type": "object", "properties": {"a": {"type": "string"}}}
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}}
    tools = tuple(
        tool_spec(f"tools[{i}].function", f"t{i}", None, schema, True)
        for i, schema in enumerate((good, bad, good))
    )
    use = ToolUse(tools, ToolChoice(mode))
    form = call_grammar(use, PARSERS.get(parser), {})
    assert form is not None
    with pytest.raises(InvalidRequest) as caught, call_names(use).told():
        raise told(form)
    assert caught.value.param == "tools[1].function.parameters"
    assert caught.value.message.startswith("tools[1].function.parameters: regex parse error: (a")
    assert "unclosed group" in caught.value.message and "%json" not in caught.value.message


@pytest.mark.parametrize(
    ("form", "says", "never"),
    [
        ({"json": {"$ref": "#"}}, "it leads to itself", "NoExtensionBias"),
        ({"regex": "(a"}, "unclosed group", "start:"),
        ({"structural_tag": {"format": {"type": "json_schema", "json_schema": {}, "style": [1]}}},
         "style must be one of json, ", "memory"),
        ({"grammar": "start: foo"}, 'unknown name: "foo" 1 | start: foo', "NoExt"),
    ],
)  # fmt: skip
def test_messages_are_of_what_the_caller_wrote(form: Any, says: str, never: str) -> None:
    message = told(StructuredOutputsParams(**form)).message
    assert says in message and never not in message
