"""What a body asks of the form of its output: OpenAI's `response_format`, vLLM's
`structured_outputs`, and the `guided_*` fields that vLLM had before. One of them may be given.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from quire.errors import InvalidRequest
from quire.params import StructuredOutputsParams
from quire.serving.decode import show
from quire.serving.field_names import AS_THE_ENGINE, ENGINE, FieldNames
from quire.serving.openai.schema import GenerateRequest

_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_GUIDED_NAMES: Final = {
    **{f"{ENGINE}.{kind}": name for name, kind in _GUIDED.items()},
    f"{ENGINE}.whitespace_pattern": "guided_whitespace_pattern",
}
_FORMAT_NAMES: Final = FieldNames(
    {ENGINE: "response_format", f"{ENGINE}.json": "response_format.json_schema.schema"}
)
_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_FIELDS: Final = ("name", "description", "schema", "strict")
_BACKENDS: Final = ("auto", "guidance")


def read_structured_outputs(request: GenerateRequest) -> StructuredOutputsParams | None:
    """The constraint of a body; None if there is none.

    Raises:
        InvalidRequest: a field is wrong, or several ask for something.
    """
    with constraint_names(request).told():
        found = {
            name: constraint
            for name, constraint in (
                ("response_format", _response_format(request.response_format)),
                ("structured_outputs", StructuredOutputsParams.read(request.structured_outputs)),
                ("guided_json", _guided(request)),
            )
            if constraint is not None
        }
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)} both say what form the output has; give one of them.",
            param=list(found)[1],
        )
    return next(iter(found.values()), None)


def constraint_names(request: GenerateRequest) -> FieldNames:
    """Under which fields errors about the constraint are told."""
    if request.structured_outputs is not None:
        return AS_THE_ENGINE
    if request.response_format is not None:
        return _FORMAT_NAMES
    given = [name for name in _GUIDED if getattr(request, name) is not None]
    if not given:
        return AS_THE_ENGINE
    return FieldNames({ENGINE: given[0], **_GUIDED_NAMES})


def _response_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _FORMATS:
        rule = f"type must be one of {', '.join(_FORMATS)}, got {show(kind)}"
        _wrong("response_format", rule)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    for name in given:
        if name not in known:
            _wrong("response_format", f"{show(name)} does not belong to type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_schema(given.get("json_schema")))


def _schema(given: object) -> dict[str, Any]:
    """The schema of a `json_schema` format. `strict` changes nothing: a schema always holds."""
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        _wrong(where, "must be an object with name and schema")
    for name in given:
        if name not in _SCHEMA_FIELDS:
            _wrong(where, f"{show(name)} is unknown; known: {', '.join(_SCHEMA_FIELDS)}")
    if given.get("strict") not in (None, True, False):
        _wrong(where, f"strict must be true or false, got {show(given['strict'])}")
    if not isinstance(given.get("name"), str):
        _wrong(where, f"name must be a string, got {show(given.get('name'))}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        _wrong(where, f"schema must be an object, got {show(schema)}")
    return schema


def _guided(request: GenerateRequest) -> StructuredOutputsParams | None:
    given = {name: getattr(request, name) for name in _GUIDED}
    given = {_GUIDED[name]: value for name, value in given.items() if value is not None}
    backend = request.guided_decoding_backend
    if backend is not None and backend not in _BACKENDS:
        _wrong("guided_decoding_backend", f"must be auto or guidance, got {show(backend)}")
    pattern = request.guided_whitespace_pattern
    if not given:
        if pattern is not None:
            _wrong("guided_whitespace_pattern", "belongs to guided_json")
        return None
    return StructuredOutputsParams(**given, whitespace_pattern=pattern)


def _wrong(param: str, text: str) -> NoReturn:
    raise InvalidRequest(f"{param}: {text}.", param=param)
