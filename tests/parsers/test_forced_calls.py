"""Calls that a grammar forces are those that the parser of the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer as Backend

from parser_kit import TOOLS, kinds_of, read, told
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import InvalidRequest
from quire.params import SamplingParams, StructuredOutputsParams
from quire.serving.forced_calls import call_grammar
from quire.serving.model_parsers import ModelParsers
from quire.serving.parsing import PARSERS, REASONING_PARSERS, OutputParser, ParserSetup
from quire.serving.tools import NO_TOOLS, ToolChoice, ToolSpec, ToolUse, tool_use
from quire.structured.compiler import Vocabulary
from quire.structured.settle import unforced

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


ARGUMENTS = {
    "json": ('{"city": "Rome"}', "{}"),
    "python": ('city="Rome"', ""),
    "qwen_xml": ("<parameter=city>\nRome\n</parameter>\n", ""),
    "glm_xml": ("\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n", "\n"),
}
"""How the styles write the arguments of the two calls."""


def written(parser: type[OutputParser], vocabulary: Mapping[str, int], calls: int = 2) -> str:
    """Calls as the grammar has them."""
    syntax = parser.call_syntax(vocabulary)
    assert syntax is not None
    one = [
        syntax.begin.replace("NAME", name) + ("7" + syntax.middle if syntax.middle else "") + args
        for name, args in zip(("get_weather", "now"), ARGUMENTS[syntax.style], strict=True)
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
    grammar = call_grammar(USE, parser, known)
    assert accepts(embedded, grammar, text)
    assert not accepts(embedded, grammar, text.replace("Rome", "Bonn"))
    assert not accepts(embedded, grammar, "Well. " + text)
    assert not accepts(embedded, grammar, "")


def test_a_named_tool_is_called_once(embedded: Vocabulary) -> None:
    parser = PARSERS.get("hermes")
    use = ToolUse(USE.tools, ToolChoice("named", "get_weather"))
    grammar = call_grammar(use, parser, NONE)
    one = written(parser, NONE, 1)
    assert accepts(embedded, grammar, one)
    assert not accepts(embedded, grammar, written(parser, NONE))
    assert not accepts(embedded, grammar, one.replace("get_weather", "now"))
    alone = ToolUse(USE.tools, ToolChoice("required", parallel=False))
    grammar = call_grammar(alone, parser, NONE)
    assert accepts(embedded, grammar, one) and not accepts(embedded, grammar, written(parser, NONE))


@pytest.mark.parametrize(
    "name",
    [n for n, v in SYNTAXES if not v and PARSERS.get(n).call_syntax(v).trigger],  # type: ignore[union-attr]
)
def test_strict_tools_may_be_called_in_free_text(embedded: Vocabulary, name: str) -> None:
    parser = PARSERS.get(name)
    use = ToolUse(USE.tools, ToolChoice("auto"))
    grammar = call_grammar(use, parser, NONE)
    text = written(parser, NONE, 1)
    assert accepts(embedded, grammar, "Plain text.")
    assert accepts(embedded, grammar, "Let me see. " + text + " Done.")
    assert not accepts(embedded, grammar, "Let me see. " + text.replace("Rome", "Bonn"))
    assert told(read([text], [parser], ParserSetup("", TOOLS)))[0][1] == "get_weather"


@pytest.mark.parametrize(
    "name",
    [n for n, v in SYNTAXES if not v and PARSERS.get(n).call_syntax(v).trigger],  # type: ignore[union-attr]
)
def test_tools_that_are_not_allowed_cannot_be_called(embedded: Vocabulary, name: str) -> None:
    parser = PARSERS.get(name)
    places = {"get_weather": "tool_choice.tools[0].name"}
    tools = [ToolSpec("get_weather"), ToolSpec("now")]
    grammar = call_grammar(tool_use(tools, ToolChoice("auto", allowed=places)), parser, NONE)
    text = written(parser, NONE, 1)
    assert accepts(embedded, grammar, "Plain text.")
    assert accepts(embedded, grammar, "Let me see. " + text)
    assert not accepts(embedded, grammar, text.replace("get_weather", "now"))
    assert call_grammar(tool_use(tools, ToolChoice("auto")), parser, NONE) is None


AUTO = ToolUse(USE.tools, ToolChoice("auto"))


def test_strict_calls_without_their_outer_marks(marked: tuple[Vocabulary, Backend]) -> None:
    """The parser reads them, so the grammar holds them, too."""
    grammar = call_grammar(AUTO, PARSERS.get("qwen3_xml"), marked[0].special)
    call = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
    for before in ("", "I look. ", f"<tool_call>\n{call}\n</tool_call> and "):
        assert writes(marked, grammar, f"{before}{call}")
        assert not writes(marked, grammar, f"{before}{call.replace('Rome', 'Bonn')}")


@pytest.fixture(scope="module")
def marked() -> tuple[Vocabulary, Backend]:
    """The embedded tokenizer with the special tokens of all syntaxes."""
    path = Path(EMBEDDED_FOLDER) / "quire-demo" / "tokenizer.json"
    backend = Backend.from_file(str(path))
    kinds = [PARSERS.get(name) for name in PARSERS]
    backend.add_special_tokens(sorted({mark for kind in kinds for mark in kind.special_tokens}))
    size = backend.get_vocab_size()
    return Vocabulary(backend.to_str(), size, [2]), backend


def writes(marked: tuple[Vocabulary, Backend], grammar: Any, text: str) -> bool:
    """Whether a model with these special tokens may write this text, and end there."""
    vocabulary, backend = marked
    matcher = vocabulary.compile(vocabulary.settle(grammar))
    tokens = backend.encode(text, add_special_tokens=False).ids
    return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", [name for name, known in SYNTAXES if known])
def test_strict_tools_where_marks_are_tokens_of_their_own(
    marked: tuple[Vocabulary, Backend], name: str
) -> None:
    """Every syntax that writes JSON: an answer is free, and a call fits its schema."""
    parser, vocabulary = PARSERS.get(name), marked[0]
    grammar = call_grammar(AUTO, parser, vocabulary.special)
    text = written(parser, vocabulary.special, 1)
    start = parser.answer
    assert writes(marked, grammar, start + "Plain text (1).\nIt has: {a}, [b] and `c`.")
    assert writes(marked, grammar, text)
    assert not writes(marked, grammar, text.replace("Rome", "Bonn"))
    assert not writes(marked, grammar, text.replace("get_weather", "get_whether"))
    found = told(read([text], [parser], ParserSetup("", TOOLS)))
    assert found == [["call", "get_weather", '{"city": "Rome"}']]


def test_gpt_oss_may_answer_although_a_tool_is_strict(marked: tuple[Vocabulary, Backend]) -> None:
    """It writes the header of its final channel, after reasoning, and after a preamble."""
    harmony = PARSERS.get("openai")
    grammar = call_grammar(AUTO, harmony, marked[0].special)
    thought = "<|channel|>analysis<|message|>Rome? Oslo?<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    answer, call = "<|channel|>final<|message|>Hi.", written(harmony, marked[0].special, 1)
    wrong = call.replace("Rome", "Bonn")
    thinking = ModelParsers((harmony,))
    params = thinking.parsing("", AUTO, SamplingParams(), Tokens(marked))[1]
    whole = params.structured_outputs
    for form in (grammar, whole):
        for before in ("", thought, preamble, thought + preamble):
            assert writes(marked, form, before + answer), before
            assert writes(marked, form, before + call), before
            assert not writes(marked, form, before + wrong), before
            for begin, _ in harmony.call_syntax(marked[0].special).others:
                for city, fits in (("Rome", True), ("Bonn", False)):
                    other = begin.replace("NAME", "get_weather") + f'{{"city": "{city}"}}'
                    assert writes(marked, form, before + other) is fits, other
                    said = told(read([other], [harmony], ParserSetup("", TOOLS)))
                    assert said == [["call", "get_weather", f'{{"city": "{city}"}}']]
    prefilled = f"x{harmony.answer}"
    params = thinking.parsing(prefilled, AUTO, SamplingParams(), Tokens(marked))[1]
    assert writes(marked, params.structured_outputs, "Hi.")
    found = told(read([thought + preamble + call], [harmony], ParserSetup("", TOOLS)))
    assert [part[0] for part in found] == ["reasoning", "text", "call"]


class Tokens:
    """What `ModelParsers` asks of a tokenizer."""

    def __init__(self, marked: tuple[Vocabulary, Backend]) -> None:
        self.special_tokens = marked[0].special
        self._backend = marked[1]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids


ANSWERS = [
    "{", "[", '{"a": 1}', "[1]", '\n {"name": "get_weather"', '{"name": "get_weather"}',
    '{"name": "get_weather", "parameters": {"city": "Bonn"}}', '{ "name": "now"}',
    'Well. {"name": "get_weather"}', "It is\n- a [list](x)\n- of {two}", "", " \n", "a\n[1]\nb",
    '```json\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n```', "`x` is\n`y`",
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama3_json", "json", "pythonic", "llama4_pythonic"])
def test_where_calls_begin_by_their_place(marked: tuple[Vocabulary, Backend], name: str) -> None:
    """Whatever the grammar lets through as an answer, the parser reads as one."""
    parser = PARSERS.get(name)
    grammar = call_grammar(AUTO, parser, marked[0].special)
    free = 0
    for answer in ANSWERS:
        if writes(marked, grammar, answer):
            free += 1
            found = told(read(list(answer), [parser], ParserSetup("", TOOLS)))
            assert [part[0] for part in found] in ([], ["text"]), answer
    assert free >= 4
    two = written(parser, marked[0].special)
    assert writes(marked, grammar, two)
    if name == "json":
        assert writes(marked, grammar, "I look.\n\n" + two)
    elif parser.opening:
        mark, end = parser.opening[0], "".join(parser.closing[:1]) if "llama4" in name else ""
        assert writes(marked, grammar, mark + two + end)
        assert writes(marked, grammar, f"I look. {mark}{two}")
        assert not writes(marked, grammar, f"I look. {mark}{two.replace('Rome', 'Bonn')}")


def test_free_choice_without_strict_tools_is_free() -> None:
    use = ToolUse((ToolSpec("now"),), ToolChoice("auto"))
    assert call_grammar(use, PARSERS.get("hermes"), NONE) is None
    strict = ToolUse((WEATHER,), ToolChoice("auto"))
    with pytest.raises(InvalidRequest, match="cannot be told from an answer"):
        call_grammar(strict, PARSERS.get("llama3_json"), NONE)  # its mark is text like any other
    with pytest.raises(InvalidRequest, match="or is not known"):
        form_of(ModelParsers(()), "", SamplingParams(), strict)


THINKERS = [n for n in REASONING_PARSERS if n != "mistral"]


def of_call(reasoning: type[OutputParser], parser: type[OutputParser], prompt: str) -> Any:
    """The grammar of a forced call, as a request with such a prompt gets it."""
    kinds = tuple(dict.fromkeys([reasoning, parser]))
    return form_of(ModelParsers(kinds), prompt, SamplingParams(), USE)


def form_of(
    parsers: ModelParsers, prompt: str, params: SamplingParams, use: ToolUse = NO_TOOLS, **told: Any
) -> Any:
    class Tokenizer:
        special_tokens: ClassVar[dict[str, int]] = {}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    tokenizer: Any = Tokenizer()
    return parsers.parsing(prompt, use, params, tokenizer, **told)[1].structured_outputs


@pytest.mark.parametrize("name", THINKERS)
def test_reasoning_stays_free(embedded: Vocabulary, name: str) -> None:
    reasoning = REASONING_PARSERS.get(name)
    assert reasoning.thoughts is not None
    opening, closing = reasoning.thoughts
    parser = PARSERS.get("openai" if name == "openai_gptoss" else "hermes")
    text = written(parser, NONE, 1)
    grammar = of_call(reasoning, parser, "")
    whole = f"{opening}Rome? Oslo?\n{closing}{text}"
    always = getattr(reasoning, "always", False)
    assert accepts(embedded, grammar, whole)
    assert accepts(embedded, grammar, text) is not always
    setup = ParserSetup("", TOOLS)
    kinds = list(dict.fromkeys([reasoning, parser]))
    assert [part[0] for part in told(read([whole], kinds, setup))] == ["reasoning", "call"]
    inside = of_call(reasoning, parser, f"x{opening}\n")
    assert accepts(embedded, inside, f"Rome?{closing}{text}")
    assert not accepts(embedded, inside, text)
    after = of_call(reasoning, parser, f"x{opening}{closing}{reasoning.answer}")
    assert accepts(embedded, after, text) and not accepts(embedded, after, whole)


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json": SCHEMA}, '{"city": "Rome"}', '{"city": "Bonn"}'),
    ({"json": SCHEMA, "disable_any_whitespace": True}, '{"city":"Rome"}', '{"city": "Rome"}'),
    ({"json_object": True}, '{"a": [1]}', "[1]"),
    ({"regex": "[a-c]{2,3}/d"}, "abc/d", "abc"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, "((x))", "((x)"),
    ({"grammar": 'start: body "!"\nbody: /[xy]/'}, "x!", "z!"),
    ({"structural_tag": {"type": "structural_tag", "format": {
        "type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"},
        "end": "</a>"}}}, "<a>12</a>", "<a>x</a>"),
]  # fmt: skip


@pytest.mark.parametrize("name", THINKERS)
def test_a_form_holds_after_the_reasoning(embedded: Vocabulary, name: str) -> None:
    reasoning = REASONING_PARSERS.get(name)
    assert reasoning.thoughts is not None
    opening, closing = reasoning.thoughts
    parsers, always = ModelParsers((reasoning,)), getattr(reasoning, "always", False)
    start = reasoning.answer
    for form, right, wrong in FORMS:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
        thoughts = f"{opening}Rome? {wrong} {right}\n{closing}"
        gap = "" if start else "\n\n"
        whole = f"{thoughts}{gap}{start}{right}"
        new = form_of(parsers, "x", params)
        assert accepts(embedded, new, whole), form
        assert not accepts(embedded, new, f"{thoughts}{start}{wrong}")
        assert not accepts(embedded, new, thoughts)
        assert accepts(embedded, new, start + right) is not always
        assert not accepts(embedded, new, f"{start}{wrong}")
        setup = ParserSetup("x", ())
        assert told(read([whole], [reasoning], setup))[-1] == ["text", right]
        inside = form_of(parsers, f"x{opening}\n", params)
        assert accepts(embedded, inside, f"{wrong}?{closing}{start}{right}")
        assert not accepts(embedded, inside, start + right)
        after = form_of(parsers, f"x{opening}{closing}{start}\n", params)
        assert after is params.structured_outputs
        if not always:
            never = form_of(parsers, "x", params, may_reason=False)
            assert accepts(embedded, never, start + right)
            assert not accepts(embedded, never, whole)
        at_once = form_of(ModelParsers((reasoning,), in_reasoning=True), "x", params)
        assert at_once is params.structured_outputs


def test_granite_is_told_by_its_template_how_to_reason(embedded: Vocabulary) -> None:
    granite = REASONING_PARSERS.get("granite")
    told_so = "Write your thoughts after 'Here is my thought process:' and your response after ..."
    thought = "Here is my thought process: a or b?\n\nHere is my response:"
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    parsers = ModelParsers((granite,))
    for prompt, own, other in (
        (told_so, thought, "<think>a</think>"), ("x", "<think>a</think>", thought)
    ):  # fmt: skip
        form = form_of(parsers, prompt, params)
        for before in (own, own + " "):
            assert accepts(embedded, form, before + "yes")
        assert accepts(embedded, form, "no"), "the model need not reason"
        assert not accepts(embedded, form, own + "maybe")
        assert not accepts(embedded, form, other + "yes")
        found = told(read([own + "yes"], [granite], ParserSetup(prompt, ())))
        assert [part[0] for part in found] == ["reasoning", "text"]
    inside = form_of(parsers, told_so + " Here is my thought process:", params)
    assert accepts(embedded, inside, " a\nHere is my response: yes")
    setup = ParserSetup(told_so + " Here is my thought process:\n", ())
    assert told(read(list(" a Here is my response: b"), [granite], setup)) == [
        ["reasoning", "a"], ["text", "b"]
    ]  # fmt: skip


def test_forced_text_may_be_spelled_freely_where_tokens_are_banned(embedded: Vocabulary) -> None:
    marks = {"opening": "<think>", "closing": "</think>"}
    for form, right, wrong in FORMS:
        asked = StructuredOutputsParams(**form, reasoning=marks)
        grammar = unforced(embedded.settle(asked))
        for text, fits in ((right, True), ("<think>a</think>" + right, True), (wrong, False)):
            matcher = embedded.compile(grammar)
            letters = [embedded.tokens.tokenize_str(c)[0] for c in text]
            read_all = all(matcher.consume_token(token) for token in letters)
            assert (read_all and matcher.is_accepting()) is fits, (form, text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("<think>", "got '<think>'"),
        ({"opening": "<think>"}, "opening, closing"),
        ({"opening": "", "closing": "b"}, "reasoning.opening must be a non-empty"),
        ({"opening": "a", "closing": "b" * 257}, "at most 256 characters, got 257"),
        ({"opening": "a", "closing": "b", "is_open": 1}, "reasoning.is_open must be true or false"),
        ({"opening": "a", "closing": "b", "begin": "c"}, "opening, closing"),
    ],
)
def test_marks_that_are_refused(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputsParams(json_object=True, reasoning=given)
    assert says in caught.value.message


def test_the_schema_of_the_caller_stays_as_it_is() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": False}}}
    tool = ToolSpec("now", None, parameters)
    call_grammar(ToolUse((tool,), ToolChoice("required")), *kinds_of("hermes"), NONE)
    assert parameters["properties"]["a"] == {"type": "array", "uniqueItems": False}  # type: ignore[index]
