"""Calls that a grammar forces are those that the parser of the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parser_kit import TOOLS, kinds_of, read, told
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import InvalidRequest
from quire.serving.forced_calls import call_grammar
from quire.serving.parsers.json_calls import JsonCalls
from quire.serving.parsing import PARSERS, REASONING_PARSERS, OutputParser, ParserSetup
from quire.serving.tools import ToolChoice, ToolSpec, ToolUse
from quire.structured.compiler import Vocabulary

NONE: Mapping[str, int] = {}
ALL = {"[ARGS]": 1}
SYNTAXES = [
    (name, vocabulary)
    for name in PARSERS
    for vocabulary in (NONE, ALL)
    if PARSERS.get(name).call_syntax(vocabulary) is not None
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = ToolSpec("get_weather", None, SCHEMA, strict=True)
USE = ToolUse((WEATHER, ToolSpec("now")), ToolChoice("required"))


@pytest.fixture(scope="module")
def embedded() -> Vocabulary:
    path = Path(EMBEDDED_FOLDER) / "quire-demo" / "tokenizer.json"
    return Vocabulary(path.read_text("utf-8"), 2048, [2])


def written(parser: type[OutputParser], vocabulary: Mapping[str, int], calls: int = 2) -> str:
    """Calls as the grammar has them."""
    syntax = parser.call_syntax(vocabulary)
    assert syntax is not None
    one = [
        syntax.begin.replace("NAME", name) + ("7" + syntax.middle if syntax.middle else "") + args
        for name, args in (("get_weather", '{"city": "Rome"}'), ("now", "{}"))
    ]
    calls = 1 if syntax.one_call else calls
    body = syntax.separator.join(text + syntax.end for text in one[:calls])
    return syntax.before + body + syntax.after


def accepts(vocabulary: Vocabulary, grammar: Any, text: str) -> bool:
    """Whether a text is all of a grammar."""
    matcher = vocabulary.compile(vocabulary.settle(grammar))
    tokens = vocabulary.tokens.tokenize_str(text)
    return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("name", "known"), SYNTAXES)
def test_what_the_grammar_forces_is_what_the_parser_reads(
    embedded: Vocabulary, name: str, known: Mapping[str, int]
) -> None:
    parser = PARSERS.get(name)
    text = written(parser, known)
    calls = [["call", "get_weather", '{"city": "Rome"}'], ["call", "now", "{}"]]
    syntax = parser.call_syntax(known)
    assert syntax is not None
    found = told(read(list(text), [parser], ParserSetup("", TOOLS)))
    assert found == calls[: 1 if syntax.one_call else 2]
    grammar = call_grammar(USE, parser, None, "", known)
    assert accepts(embedded, grammar, text)
    assert not accepts(embedded, grammar, text.replace("Rome", "Bonn"))
    assert not accepts(embedded, grammar, "Well. " + text)
    assert not accepts(embedded, grammar, "")


def test_a_named_tool_is_called_once(embedded: Vocabulary) -> None:
    parser = PARSERS.get("hermes")
    use = ToolUse(USE.tools, ToolChoice("named", "get_weather"))
    grammar = call_grammar(use, parser, None, "", NONE)
    one = written(parser, NONE, 1)
    assert accepts(embedded, grammar, one)
    assert not accepts(embedded, grammar, written(parser, NONE))
    assert not accepts(embedded, grammar, one.replace("get_weather", "now"))
    alone = ToolUse(USE.tools, ToolChoice("required", parallel=False))
    grammar = call_grammar(alone, parser, None, "", NONE)
    assert accepts(embedded, grammar, one) and not accepts(embedded, grammar, written(parser, NONE))


@pytest.mark.parametrize(
    "name",
    [n for n, v in SYNTAXES if not v and PARSERS.get(n).call_syntax(v).trigger],  # type: ignore[union-attr]
)
def test_strict_tools_may_be_called_in_free_text(embedded: Vocabulary, name: str) -> None:
    parser = PARSERS.get(name)
    use = ToolUse(USE.tools, ToolChoice("auto"))
    grammar = call_grammar(use, parser, None, "", NONE)
    text = written(parser, NONE, 1)
    assert accepts(embedded, grammar, "Plain text.")
    assert accepts(embedded, grammar, "Let me see. " + text + " Done.")
    assert not accepts(embedded, grammar, "Let me see. " + text.replace("Rome", "Bonn"))
    assert told(read([text], [parser], ParserSetup("", TOOLS)))[0][1] == "get_weather"


def test_free_choice_without_strict_tools_is_free() -> None:
    use = ToolUse((ToolSpec("now"),), ToolChoice("auto"))
    assert call_grammar(use, PARSERS.get("hermes"), None, "", NONE) is None
    with pytest.raises(InvalidRequest, match="nothing tells a call"):
        call_grammar(ToolUse((WEATHER,), ToolChoice("auto")), JsonCalls, None, "", NONE)


@pytest.mark.parametrize("name", [n for n in REASONING_PARSERS if n not in ("granite", "mistral")])
def test_reasoning_stays_free(embedded: Vocabulary, name: str) -> None:
    reasoning = REASONING_PARSERS.get(name)
    assert reasoning.thoughts is not None
    opening, closing = reasoning.thoughts
    parser = PARSERS.get("openai" if name == "openai_gptoss" else "hermes")
    text = written(parser, NONE, 1)
    grammar = call_grammar(USE, parser, reasoning, "", NONE)
    whole = f"{opening}Rome? Oslo?\n{closing}{text}"
    always = getattr(reasoning, "always", False)
    assert accepts(embedded, grammar, whole)
    assert accepts(embedded, grammar, text) is not always
    setup = ParserSetup("", TOOLS)
    kinds = list(dict.fromkeys([reasoning, parser]))
    assert [part[0] for part in told(read([whole], kinds, setup))] == ["reasoning", "call"]
    inside = call_grammar(USE, parser, reasoning, f"x{opening}\n", NONE)
    assert accepts(embedded, inside, f"Rome?{closing}{text}")
    assert not accepts(embedded, inside, text)
    after = call_grammar(USE, parser, reasoning, f"x{opening}{closing}", NONE)
    assert accepts(embedded, after, text) and not accepts(embedded, after, whole)


def test_the_schema_of_the_caller_stays_as_it_is() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": False}}}
    tool = ToolSpec("now", None, parameters)
    call_grammar(ToolUse((tool,), ToolChoice("required")), *kinds_of("hermes"), None, "", NONE)
    assert parameters["properties"]["a"] == {"type": "array", "uniqueItems": False}  # type: ignore[index]
