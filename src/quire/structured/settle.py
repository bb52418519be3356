"""From what a request asks for to one `Grammar` in llguidance's form.

The form is JSON text: a list of grammars, each Lark or a JSON schema. Nothing is compiled here, and
nothing is checked that compiling checks. The text of a request may be hostile, so all of this runs
where compiling runs. Knows no tokenizer and no llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from quire.structured import lark
from quire.structured.ebnf import is_ebnf, to_lark
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.structured.schema import OPTIONS_KEY, schema_text
from quire.structured.tags import after_reasoning, tags_to_lark
from quire.structured.whitespace import DEFAULT, read_pattern


def settle(params: StructuredOutputsParams, special: Mapping[str, int]) -> Grammar:
    """The grammar that a request asks for.

    Args:
        params: What it asks for.
        special: The model's special tokens, text to id.

    Raises:
        InvalidRequest: it uses what cannot be enforced, or is malformed; the message names the
            keyword or the position.
    """
    if params.kind == "structural_tag":
        form = {
            "lark_grammar": tags_to_lark(
                params.structural_tag, lambda s: schema_form(s, params), special
            )
        }
    else:
        form = _FORMS[params.kind](params)
    return Grammar(params.kind, json.dumps({"grammars": _after_reasoning(params, form, special)}))


def _after_reasoning(
    params: StructuredOutputsParams, form: dict[str, Any], special: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A form as grammars, the first of which is the whole output."""
    reasoning = params.reasoning
    if reasoning is None or not (reasoning.is_open or reasoning.may_open or reasoning.answer):
        return [form]
    whole = {"lark_grammar": after_reasoning(reasoning, special, _BODY)}
    return [whole, {"name": _BODY, **form}]


def unforced(grammar: Grammar) -> Grammar:
    """The same grammar without forced tokens: where it leaves one text, any tokens may spell it."""
    forms = json.loads(grammar.text)["grammars"]
    for form in forms:
        schema = form.pop("json_schema", None)
        rules = form.get("lark_grammar") or f"start: %json {json.dumps(schema)}"
        form["lark_grammar"] = f"{_NO_FORCING}\n{rules}"
    return Grammar(grammar.kind, json.dumps({"grammars": forms}))


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for JSON, all of them, so that none is left to a default or a schema."""
    flexible = not params.disable_any_whitespace
    pattern = DEFAULT
    if params.whitespace_pattern is not None:
        pattern = read_pattern(params.whitespace_pattern)
    return {
        "whitespace_flexible": flexible,
        **({"whitespace_pattern": pattern} if flexible else {}),
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": False,
    }


def schema_form(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema that can be compiled, with all options.

    Raises:
        InvalidRequest: a keyword cannot be enforced.
    """
    text = schema_text(schema, close_objects=params.disable_additional_properties)
    return {**json.loads(text), OPTIONS_KEY: json_options(params)}


def _json(params: StructuredOutputsParams) -> dict[str, Any]:
    return {"json_schema": schema_form(params.json, params)}


def _json_object(params: StructuredOutputsParams) -> dict[str, Any]:
    return {"json_schema": {"type": "object", OPTIONS_KEY: json_options(params)}}


def _regex(params: StructuredOutputsParams) -> dict[str, Any]:
    assert params.regex is not None
    return {"lark_grammar": f"start: {lark.regex(params.regex)}"}


def _choice(params: StructuredOutputsParams) -> dict[str, Any]:
    assert params.choice is not None
    return {"lark_grammar": "start: " + " | ".join(map(lark.string, dict.fromkeys(params.choice)))}


def _grammar(params: StructuredOutputsParams) -> dict[str, Any]:
    assert params.grammar is not None
    if is_ebnf(params.grammar):
        return {"lark_grammar": to_lark(params.grammar)}
    return {
        "lark_grammar": lark.with_json_options(params.grammar, lambda s: schema_form(s, params))
    }


_BODY: Final = "body"
_NO_FORCING: Final = '%llguidance {"no_forcing": true}'
_FORMS: Final[dict[str, Callable[[StructuredOutputsParams], dict[str, Any]]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
