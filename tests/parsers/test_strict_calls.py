"""Strict calls in syntaxes that are not JSON: what the grammar lets through, the parser reads back
as arguments that fit the schema. Random schemas, random walks of their grammars.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from parser_kit import cut, read, told
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import InvalidRequest
from quire.params import StructuredOutputsParams
from quire.serving.forced_calls import call_grammar, can_force
from quire.serving.parsing import PARSERS, ParserSetup
from quire.serving.tools import ToolChoice, ToolSpec, ToolUse
from quire.structured.compiler import Vocabulary
from quire.structured.settle import settle
from quire.structured.value_types import types_of
from vocabularies import large_tokenizer

Schema = dict[str, Any]
STYLES = ("pythonic", "llama4_pythonic", "qwen3_xml", "glm45")
TEXTS = [
    "a", "Zoë", "\U0001f98a fox", 'say "hi"', "it's", "back\\slash", "two\nlines", "\n", " ", "12",
    "null", "{", "[x](y)", "</arg_key>", "<parameter=a>", "</function>", "), f(", "]", "'''", "",
]  # fmt: skip
"""Strings that look like something else."""
EOS = 2


def value(rng: random.Random, depth: int = 2) -> Schema:
    """The schema of one value."""
    makers = [number, string, string, choice, maybe]
    return rng.choice([*makers, record, array, array, union] if depth else makers)(rng, depth)


def number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-99, 99)
    return rng.choice([
        {"type": "integer"}, {"type": "number"}, {"type": "boolean"},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        {"type": "number", "minimum": low, "exclusiveMaximum": low + 2.5},
    ])  # fmt: skip


def string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return rng.choice([
        {"type": "string"}, {"type": "string", "maxLength": least},
        {"type": "string", "minLength": least, "maxLength": least + 6},
        {"type": "string", "pattern": rng.choice(["^[a-c/]{2,5}$", "b", "^x|y$", r"^\d+\$?$"])},
        {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time", "date-time"])},
    ])  # fmt: skip


def choice(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"type": "string", "enum": rng.sample(TEXTS, 4)}
    values = ["one", 'a "b"', "c'd", 7, -2.5, None, True, [1, "x"], {"k": [None]}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def maybe(rng: random.Random, depth: int) -> Schema:
    return rng.choice([
        {"type": ["string", "null"]}, {"type": ["string", "integer"], "maxLength": 4},
        {"anyOf": [{"type": "string", "pattern": "^[0-9a-f]{1,4}$"}, {"type": "integer"}]},
        {"anyOf": [{"type": "integer", "maximum": 7, "minimum": -7}, {"type": "string"}]},
        {"type": ["boolean", "null"]}, {},
    ])  # fmt: skip


def record(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b c", "été", "n/m", 'q"', "x_1"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
        "additionalProperties": rng.choice([False, False, {"type": "integer"}]),
    }


def array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    if rng.random() < 0.4:
        firsts = [value(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": firsts, "items": {"type": "boolean"},
                "minItems": least, "maxItems": 3}  # fmt: skip
    return {"type": "array", "items": value(rng, depth - 1), "minItems": least,
            "maxItems": least + rng.randint(0, 2)}  # fmt: skip


def union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        return {"anyOf": [{"$ref": "#/$defs/node"}, {"type": rng.choice(["null", "string"])}]}
    return {"anyOf": [{"type": "string", "minLength": 1}, record(rng, depth - 1)]}


NODE: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "required": ["id"],
    "additionalProperties": False,
}


def parameters(rng: random.Random) -> Schema:
    """The schema of a tool's arguments."""
    names = rng.sample(["city", "day_2", "ünit", "on", "where"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: value(rng) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rng.choice([False, False, {"type": "string"}, True]),
        "$defs": {"node": NODE},
    }


class Letters:
    """The embedded model's tokens or others, and marks of a syntax as tokens of their own."""

    def __init__(self, marks: Sequence[str], tokenizer: str | None = None) -> None:
        path = Path(EMBEDDED_FOLDER) / "quire-demo" / "tokenizer.json"
        self.backend = Backend.from_str(tokenizer or path.read_text("utf-8"))
        self.backend.add_special_tokens(list(marks))
        size = self.backend.get_vocab_size()
        self.vocabulary = Vocabulary(self.backend.to_str(), size, [EOS])
        texts = [self.decode([token]).strip()[:1] for token in range(size)]
        self.closing = np.array([text in tuple("\"'<)]}") for text in texts])
        """Which tokens look like the end of something."""
        self.likes = [self.encode(text) for text in (*TEXTS, "</parameter>", "</arg_value>")]

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def writes(self, grammar: Any, text: str) -> bool:
        """Whether a text is all of a grammar."""
        matcher = self.vocabulary.compile(self.vocabulary.settle(grammar))
        return all(map(matcher.consume_token, self.encode(text))) and matcher.is_accepting()

    def walk(self, grammar: Any, rng: random.Random) -> str | None:
        """A random text of a grammar, with pieces that look like something else; `None`: it did not
        end soon."""
        matcher = self.vocabulary.compile(self.vocabulary.settle(grammar))
        ids: list[int] = []
        for step in range(200):
            if step and matcher.is_accepting() and rng.random() < 0.5:
                return self.decode(ids)
            if rng.random() < 0.15:
                piece = rng.choice(self.likes)
                ids += piece[: matcher.try_consume_tokens(piece)]
                continue
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            allowed = allowed[allowed != EOS]
            if not len(allowed):
                return self.decode(ids) if matcher.is_accepting() else None
            closing = allowed[self.closing[allowed]] if rng.random() < 0.5 else ()
            ids.append(int(rng.choice(closing if len(closing) else allowed)))
            assert matcher.consume_token(ids[-1])
        return None


CASES = pytest.mark.parametrize(
    ("name", "known"), [(name, known) for name in STYLES for known in (True, False)]
)


def letters_of(name: str, known: bool) -> Letters:
    return Letters(sorted(PARSERS.get(name).special_tokens) if known else [])


def strict(schema: Schema, mode: Any = "required") -> ToolUse:
    return ToolUse((ToolSpec("f", None, schema, strict=True),), ToolChoice(mode))


def calls_in(text: str, name: str, schema: Schema, rng: random.Random) -> list[Any]:
    """The arguments of the calls that a text is made of, given to the parser in pieces."""
    setup = ParserSetup("", strict(schema).tools, frozenset(), frozenset("f"))
    pieces = cut(text, [rng.randint(0, 999) for _ in range(5)])
    found = told(read(pieces, [PARSERS.get(name)], setup))
    assert [part[:2] for part in found] == [["call", "f"]] * len(found), (text, found)
    return [json.loads(part[2]) for part in found]


@CASES
def test_what_the_grammar_permits_is_read_back(name: str, known: bool) -> None:
    letters, ended = letters_of(name, known), 0
    for seed in range(14):
        rng = random.Random(seed)
        schema = parameters(rng)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammar = call_grammar(strict(schema), PARSERS.get(name), letters.vocabulary.special)
        for _ in range(3):
            if (text := letters.walk(grammar, rng)) is not None:
                ended += 1
                calls = calls_in(text, name, schema, rng)
                assert calls
                for call in calls:
                    jsonschema.validate(call, schema, cls=jsonschema.Draft202012Validator)
    assert ended >= 14


@pytest.fixture(scope="module")
def large() -> Letters:
    """A vocabulary of the size people use, and the marks of all syntaxes."""
    kinds = [PARSERS.get(name) for name in (*STYLES, "hermes")]
    marks = sorted({mark for kind in kinds for mark in kind.special_tokens})
    return Letters(marks, large_tokenizer(151_936 - len(marks)))


@pytest.mark.parametrize("name", [*STYLES, "hermes"])
def test_what_the_grammar_permits_of_a_large_vocabulary_is_read_back(
    large: Letters, name: str
) -> None:
    ended = 0
    for seed in range(4):
        rng = random.Random(seed)
        schema = parameters(rng)
        grammar = call_grammar(strict(schema), PARSERS.get(name), large.vocabulary.special)
        for _ in range(2):
            if (text := large.walk(grammar, rng)) is not None:
                ended += 1
                for call in calls_in(text, name, schema, rng):
                    jsonschema.validate(call, schema, cls=jsonschema.Draft202012Validator)
    assert ended >= 3


@CASES
def test_calls_that_fit_the_schema_are_permitted(name: str, known: bool) -> None:
    """Random values of the schema, from its grammar in JSON, written in the syntax."""
    letters, tried = letters_of(name, known), 0
    for seed in range(24):
        rng = random.Random(seed)
        schema = parameters(rng)
        if '"format"' in json.dumps(schema):
            continue  # some dates and times are never written without quotes
        if schema["additionalProperties"]:
            schema = schema | {"additionalProperties": False}
        grammar = call_grammar(strict(schema), PARSERS.get(name), letters.vocabulary.special)
        for _ in range(3):
            text = letters.walk(StructuredOutputsParams(json=schema), rng)
            if text is None or (call := written(json.loads(text), name)) is None:
                continue
            if any(mark in text for mark in PARSERS.get(name).special_tokens):
                continue  # letters of a mark would be given as the token
            if (tried := tried + 1) and calls_in(call, name, schema, rng) == [json.loads(text)]:
                assert letters.writes(grammar, call), (schema, call)
    assert tried >= 10


def written(value: dict[str, Any], name: str) -> str | None:
    """A call in a syntax; `None`: its tags cannot hold it."""
    if "pythonic" in name:
        return f"[f({', '.join(f'{key}={literal(one)}' for key, one in value.items())})]"
    form, begin, end = {
        "qwen3_xml": ("<parameter={}>\n{}\n</parameter>\n", "<tool_call>\n<function=f>\n",
                      "</function>\n</tool_call>"),
        "glm45": ("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "<tool_call>f\n",
                  "</tool_call>"),
    }[name]  # fmt: skip
    mark = "</parameter>" if name == "qwen3_xml" else "</arg_value>"
    if any(isinstance(one, str) and mark in one for one in value.values()):
        return None
    texts = {
        key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        for key, one in value.items()
    }
    return begin + "".join(form.format(key, text) for key, text in texts.items()) + end


def literal(value: Any) -> str:
    """A Python literal; strings as JSON has them."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


QUOTED = {"type": "object", "properties": {"a": {"type": ["object", "string"]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
         "</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
        ("pythonic", "[f(a={})]"),
    ],
)  # fmt: skip
def test_marks_of_the_syntax_within_json(name: str, text: str) -> None:
    value = '{"k": "</parameter></arg_value></function>)]\\"}"}'
    letters, rng = letters_of(name, False), random.Random(0)
    grammar = call_grammar(strict(QUOTED), PARSERS.get(name), {})
    assert letters.writes(grammar, text.format(value))
    assert calls_in(text.format(value), name, QUOTED, rng) == [{"a": json.loads(value)}]


def arguments(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("names", "schema", "says"),
    [
        (STYLES, {"type": "object", "patternProperties": {"a": {}}}, "'patternProperties'"),
        (STYLES, {"type": "object", "minProperties": 1}, "'minProperties'"),
        (STYLES, {"type": "object", "anyOf": [{"required": ["a"]}]}, "'anyOf'"),
        (STYLES, arguments(a={"minLength": 2}), "no type"),
        (STYLES, arguments(a={"$ref": "#/$defs/none"}), "points to nothing"),
        (STYLES, arguments(a={"allOf": [{"type": "string"}, {"minLength": 2}]}), "'allOf'"),
        (STYLES, arguments(a={"type": "string", "minLength": "2"}), "'minLength'"),
        (STYLES, arguments(a={"type": "string", "not": {}}), "keyword 'not'"),
        (STYLES[:2], arguments(**{"b c": {}}), "the name 'b c'"),
        (STYLES[:2], arguments(a={"type": "object", "maxProperties": 3}), "'maxProperties'"),
        (STYLES[2:], arguments(**{"a>": {}}), "the name 'a>'"),
        (STYLES[2:], arguments(a={"enum": ["1", 1]}), "the value '1'"),
        (STYLES[2:3], arguments(a={"enum": ["x</parameter>"]}), "the value 'x</parameter>'"),
        (STYLES[3:], arguments(a={"const": "x</arg_value>"}), "the value 'x</arg_value>'"),
        (STYLES[2:], arguments(a={"type": "string", "format": "uri"}), "the format 'uri'"),
    ],
)
def test_what_a_syntax_cannot_say_is_refused_by_name(
    names: Sequence[str], schema: Schema, says: str
) -> None:
    """A forced call is then a list of JSON objects, where that can say it."""
    for name in names:
        parser = PARSERS.get(name)
        grammar = call_grammar(
            strict(schema, "auto"), parser, dict.fromkeys(parser.special_tokens, 1)
        )
        with pytest.raises(InvalidRequest) as caught:
            settle(grammar, {})
        assert says in caught.value.message, (name, caught.value.message)
        assert not can_force(strict(schema), parser, {})
    assert can_force(strict(schema), PARSERS.get("hermes"), {})


def test_names_that_python_does_not_have() -> None:
    tool = ToolSpec("get-weather", None, arguments(), strict=True)
    with pytest.raises(InvalidRequest, match="no names such as"):
        call_grammar(ToolUse((tool,), ToolChoice("auto")), PARSERS.get("pythonic"), {})
    assert not can_force(ToolUse((tool,), ToolChoice("required")), PARSERS.get("pythonic"), {})


def test_few_steps_for_schemas_of_many_ways() -> None:
    """Each definition refers to the next 20 times: 20 ** 20 ways."""
    many = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(20)}
    schema = arguments(a={"$ref": "#/$defs/d0"}) | {"$defs": {**many, "d20": {"type": "string"}}}
    assert types_of(schema["properties"]["a"], schema) == frozenset()
    assert can_force(strict(schema), PARSERS.get("pythonic"), {})
    assert not can_force(strict(schema), PARSERS.get("glm45"), {})


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_xml", "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n"
         "</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_no_string_holds_the_mark_that_ends_it(name: str, form: str) -> None:
    letters = letters_of(name, False)
    schema = arguments(a={"type": "string", "minLength": 40}) | {"additionalProperties": False}
    grammar = call_grammar(strict(schema), PARSERS.get(name), {})
    for text, fits in (("x" * 40, True), ("</parameter></arg_value>" + "x" * 40, False)):
        assert letters.writes(grammar, form.format(text)) is fits
        fitting = [schema] if fits else []
        assert [schema for call in calls_in(form.format(text), name, schema, random.Random(0))
                if len(call.get("a", "")) >= 40] == fitting  # fmt: skip
