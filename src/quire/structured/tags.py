"""Structural tags: free text in which some sections have a given form, as calls of tools have.

A tag is a beginning, a content and an end. With triggers the text is free until one of them
appears; from there on it must go on as one of the tags that begin with it. Both of XGrammar's
spellings are read: `structures` with `triggers`, and `format`. Where a beginning or an end is a
special token of the model, it is that token and not its letters. Knows no llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from quire.errors import InvalidRequest
from quire.structured import lark
from quire.structured.lark import SchemaForm
from quire.structured.params import FreeReasoning
from quire.structured.python_arguments import python_arguments
from quire.structured.schema import PARAM as SCHEMA
from quire.structured.tagged_arguments import GLM, QWEN, tagged_arguments

PARAM: Final = "structured_outputs.structural_tag"
TEXT: Final = "TEXT: /(?s:.*)/"


def tags_to_lark(tag: dict[str, Any], form: SchemaForm, special: Mapping[str, int]) -> str:
    """A structural tag in Lark.

    Args:
        tag: As the request gave it.
        form: Makes of a schema what is compiled.
        special: The model's special tokens, text to id.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong; the message says where.
    """
    writer = _Writer(form, special)
    if tag.get("type", "structural_tag") != "structural_tag":
        _fail("", 'type must be "structural_tag"')
    if "format" in tag:
        _only(tag, "", ("type", "format"))
        start = writer.write(tag["format"], "format")
    else:
        _only(tag, "", ("type", "structures", "triggers"))
        start = writer.write_triggered(_modern(tag), "structures")
    return "\n".join((f"start: {start}", *writer.rules, TEXT))


def schemas_of(tag: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in a structural tag that `tags_to_lark` takes, with their places."""
    todo: list[tuple[str, Any]] = [("", tag)]
    while todo:
        where, part = todo.pop()
        if isinstance(part, list):
            todo += [(f"{where}[{i}]", one) for i, one in enumerate(part)][::-1]
        elif isinstance(part, dict):
            schema = part.get("json_schema" if part.get("type") == "json_schema" else "schema")
            if isinstance(schema, dict):
                yield f"{PARAM}{where}", schema
                continue
            todo += [(f"{where}.{name}", part[name]) for name in part][::-1]


def after_reasoning(reasoning: FreeReasoning, special: Mapping[str, int], body: str) -> str:
    """Reasoning and then a form, in Lark.

    Args:
        reasoning: What may come before the form.
        special: The model's special tokens, text to id.
        body: The name of the grammar of the form.
    """
    writer = _Writer(lambda schema: schema, special)
    # A model begins its answer on a line of its own, and parsers leave such white space out.
    gap = "" if reasoning.answer else r"/\s{0,4}/"
    begin = f"({writer.literal(reasoning.opening)})"
    if reasoning.is_open:
        begin = f"{begin}?"  # some models write it although the prompt has it
    thoughts = f"({begin} {writer.free_until(reasoning.closing)} {gap})"
    if not reasoning.is_open:
        thoughts = f"{thoughts}?" if reasoning.may_open else ""
    start = f"start: {thoughts} {writer.literal(reasoning.answer)} @{body}"
    return "\n".join((start, *writer.rules, TEXT))


def _modern(tag: dict[str, Any]) -> dict[str, Any]:
    """`structures` and `triggers` as the format that says the same."""
    structures = _list(tag, "structures", "")
    tags = []
    for i, one in enumerate(structures):
        where = f"structures[{i}]"
        if not isinstance(one, dict):
            _fail(where, "must be an object")
        _only(one, where, ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, form: SchemaForm, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self._split = (
            re.compile("|".join(re.escape(t) for t in sorted(special, key=len, reverse=True)))
            if special
            else None
        )
        self.rules: list[str] = []

    def write(self, part: Any, where: str) -> str:
        """A format as an expression of Lark."""
        if not isinstance(part, dict):
            _fail(where, "must be an object")
        kind = part.get("type")
        write = self._FORMATS.get(kind) if isinstance(kind, str) else None
        if write is None:
            known = ", ".join(self._FORMATS)
            _fail(where, f"type must be one of {known}, got {lark.string(str(kind)[:40])}")
        return write(self, part, where)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"tag_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def rule(self, body: str | None, *, lazy: bool = False) -> str:
        """See `members.GrammarParts`."""
        return self._rule(body or "", lazy=lazy)

    def define(self, name: str, body: str) -> None:
        """See `members.GrammarParts`."""
        self.rules[int(name.removeprefix("tag_"))] = f"{name}: {body}"

    def terminal(self, body: str) -> str:
        """See `members.GrammarParts`."""
        name = f"TAG_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A text, with special tokens as tokens; empty for an empty text."""
        parts: list[str] = []
        at = 0
        for found in self._split.finditer(text) if self._split else ():
            if found.start() > at:
                parts.append(lark.string(text[at : found.start()]))
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(lark.string(text[at:]))
        return " ".join(parts)

    def parted(self, text: str) -> tuple[str, str]:
        """A text before its first special token, and the rest as an expression."""
        first = self._split.search(text) if self._split else None
        plain = text if first is None else text[: first.start()]
        return plain, self.literal(text[len(plain) :])

    def free_until(self, text: str) -> str:
        """Any text up to the first place where `text` begins, and that."""
        plain, rest = self.parted(text)
        if not plain:
            return f"TEXT {rest}"
        return f"{self._rule(f'TEXT {lark.string(plain)}', lazy=True)} {rest}".rstrip()

    def const_string(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type", "value"))
        return self.literal(_text(part, "value", where, empty=True)) or '""'

    def json_schema(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type", "json_schema", "style"))
        style = part.get("style", "json")
        if not isinstance(style, str) or style not in STYLES:
            _fail(where, f"style must be one of {', '.join(STYLES)}, got {str(style)[:40]!r}")
        schema = part.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            _fail(where, "json_schema must be an object")
        try:
            return STYLES[style](self._form(schema), self)
        except InvalidRequest as error:
            at = f"{PARAM}.{where}"
            raise InvalidRequest(error.message.replace(SCHEMA, at, 1), param=at) from None

    def regex(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type", "pattern"))
        return lark.regex(_text(part, "pattern", where))

    def any_text(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type",))
        return "TEXT"

    def sequence(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type", "elements"))
        return f"({' '.join(self._elements(part, where))})"

    def one_of(self, part: dict[str, Any], where: str) -> str:
        _only(part, where, ("type", "elements"))
        return f"({' | '.join(self._elements(part, where))})"

    def _elements(self, part: dict[str, Any], where: str) -> list[str]:
        elements = _list(part, "elements", where)
        return [self.write(one, f"{where}.elements[{i}]") for i, one in enumerate(elements)]

    def tag(self, part: dict[str, Any], where: str) -> str:
        begin = self.literal(_text(part, "begin", where, empty=True))
        return f"({begin} {self._rest(part, where)})"

    def _rest(self, part: dict[str, Any], where: str) -> str:
        """A tag's content and end."""
        _only(part, where, ("type", "begin", "content", "end"))
        end = _text(part, "end", where, empty=True)
        content = part.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                _fail(where, "any_text needs an end that is not empty")
            return self.free_until(end)
        return f"{self.write(content, where + '.content')} {self.literal(end)}"

    def write_triggered(self, part: dict[str, Any], where: str) -> str:
        """Free text, and tags where a trigger appears."""
        names = ("type", "triggers", "tags", "at_least_one", "stop_after_first")
        _only(part, where, names)
        triggers = _list(part, "triggers", where)
        by_trigger: dict[str, list[str]] = {}
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                _fail(where, "triggers must be non-empty strings")
            by_trigger[trigger] = []
        for i, one in enumerate(_list(part, "tags", where)):
            at = f"{where}.tags[{i}]" if where != "structures" else f"structures[{i}]"
            if not isinstance(one, dict):
                _fail(at, "must be an object")
            begin = _text(one, "begin", at)
            matching = [t for t in by_trigger if begin.startswith(t)]
            if len(matching) != 1:
                _fail(at, "begin must start with exactly one of the triggers")
            rest = self.literal(begin[len(matching[0]) :])
            by_trigger[matching[0]].append(f"({rest} {self._rest(one, at)})")
        for trigger, tags in by_trigger.items():
            if not tags:
                _fail(where, f"no tag begins with the trigger {lark.string(trigger[:40])}")
        called = self._rule(
            " | ".join(
                f"{self.free_until(t)} ({' | '.join(tags)})" for t, tags in by_trigger.items()
            )
        )
        least, once = _flag(part, "at_least_one", where), _flag(part, "stop_after_first", where)
        if once:
            return called if least else f"({called} | TEXT)"
        return f"{called}{'+' if least else '*'} TEXT"

    def tags_with_separator(self, part: dict[str, Any], where: str) -> str:
        names = ("type", "tags", "separator", "at_least_one", "stop_after_first")
        _only(part, where, names)
        tags = []
        for i, one in enumerate(_list(part, "tags", where)):
            if not isinstance(one, dict):
                _fail(f"{where}.tags[{i}]", "must be an object")
            tags.append(self.tag(one, f"{where}.tags[{i}]"))
        one_of = f"({' | '.join(tags)})"
        between = self.literal(_text(part, "separator", where, empty=True))
        least, once = _flag(part, "at_least_one", where), _flag(part, "stop_after_first", where)
        found = one_of if once else f"({one_of} ({between} {one_of})*)"
        return found if least else f"({found})?"

    _FORMATS: Final[dict[str, Callable[[_Writer, dict[str, Any], str], str]]] = {
        "const_string": const_string,
        "json_schema": json_schema,
        "regex": regex,
        "any_text": any_text,
        "sequence": sequence,
        "or": one_of,
        "tag": tag,
        "triggered_tags": write_triggered,
        "tags_with_separator": tags_with_separator,
    }


STYLES: Final[dict[str, Callable[[dict[str, Any], _Writer], str]]] = {
    "json": lambda schema, writer: f"%json {json.dumps(schema)}",
    "qwen_xml": lambda schema, writer: tagged_arguments(schema, writer, QWEN),
    "glm_xml": lambda schema, writer: tagged_arguments(schema, writer, GLM),
    "python": lambda schema, writer: python_arguments(schema, writer),
}
"""How the value of a schema is written: as JSON, or an object as the arguments of a call."""


def _only(part: dict[str, Any], where: str, known: Sequence[str]) -> None:
    for name in part:
        if name not in known:
            _fail(
                where, f"{lark.string(str(name)[:40])} is not supported; known: {', '.join(known)}"
            )


def _list(part: dict[str, Any], name: str, where: str) -> list[Any]:
    given = part.get(name)
    if not isinstance(given, list) or not given:
        _fail(where, f"{name} must be a list that is not empty")
    return given


def _text(part: dict[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    given = part.get(name)
    if not isinstance(given, str) or not (given or empty):
        _fail(where, f"{name} must be a {'' if empty else 'non-empty '}string")
    return given


def _flag(part: dict[str, Any], name: str, where: str) -> bool:
    given = part.get(name, False)
    if not isinstance(given, bool):
        _fail(where, f"{name} must be true or false")
    return given


def _fail(where: str, what: str) -> NoReturn:
    place = f"{PARAM}.{where}" if where else PARAM
    raise InvalidRequest(f"{place}: {what}.", param=PARAM)
