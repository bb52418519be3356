"""Tools that a request offers to the model, and whether the model may, must or must not call them.

Neutral among HTTP APIs: each converts its own form (OpenAI's nested objects, the Responses API's
flat ones, Anthropic's `input_schema`) into `ToolSpec` and `ToolChoice`, and builds a `ToolUse` from
them, which checks everything that does not depend on the form. Knows neither templates nor parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from quire.errors import InvalidRequest
from quire.serving.decode import show
from quire.serving.limits import TOOLS

MAX_NAME: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool; make it with `tool_spec`, which checks the values."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object; `None`: not given."""
    strict: bool = False
    """The arguments must fit the schema: generation is constrained by it."""
    shown: dict[str, Any] | None = None
    """The object that the chat template gets, if it is not simply made of the fields above."""
    place: str = "tools"
    """The path of `parameters` in the caller's request, for errors."""

    def for_template(self) -> dict[str, Any]:
        """OpenAI's nested object, which chat templates are written for."""
        if self.shown is not None:
            return self.shown
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model may do with the tools."""

    mode: Mode = "auto"
    """`none`: no call; `auto`: as the model likes; `required`: at least one call; `named`: a call
    of the tool `name`."""
    name: str | None = None
    parallel: bool = True
    """Whether a reply may call several tools. Otherwise calls after the first are left out."""
    allowed: Mapping[str, str] | None = None
    """Names of the tools that may be called, each with its path in the caller's request; `None`:
    all may."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools and its choice; make it with `tool_use`."""

    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    narrowed: bool = False
    """Whether the request has other tools, which the choice does not allow."""

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is told of: none of them with the choice `none`, all of them
        even where one is named, because the conversation may have calls of the others."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def constrains(self) -> bool:
        """Whether the output must be constrained: a call is forced, a tool is strict, or others
        must not be called."""
        forced = self.choice.mode in ("required", "named")
        return forced or self.narrowed or any(tool.strict for tool in self.offered)

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template; `None` if there are none to show."""
        return [tool.for_template() for tool in self.offered] or None


NO_TOOLS: Final = ToolUse()


def tool_spec(
    where: str,
    name: object,
    description: object = None,
    parameters: object = None,
    strict: object = None,
    *,
    schema: str = "parameters",
    shown: dict[str, Any] | None = None,
) -> ToolSpec:
    """A checked tool.

    Args:
        where: The path of the object that holds the name, for errors: `tools[0].function`.
        name, description, parameters, strict: As the client sent them.
        schema: What the API calls the field of the parameters.
        shown: See `ToolSpec.shown`.

    Raises:
        InvalidRequest: a value has a wrong type, or the name has characters that no syntax of tool
            calls can carry.
    """
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{where}.name must be a non-empty string, got {show(name)}.", param=f"{where}.name"
        )
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name must be 1 to {MAX_NAME} ASCII letters, digits, `_`, `-` or `.`, "
            f"got {show(name)}.",
            param=f"{where}.name",
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(
            f"{where}.description must be a string, got {show(description)}.",
            param=f"{where}.description",
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(
            f"{where}.strict must be true or false, got {show(strict)}.", param=f"{where}.strict"
        )
    place = f"{where}.{schema}"
    return ToolSpec(name, description, _schema(parameters, place), bool(strict), shown, place)


def _schema(value: object, where: str) -> dict[str, Any] | None:
    """A JSON Schema that describes an object."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{where} must be a JSON Schema, which is an object, got {show(value)}.", param=where
        )
    if value.get("type", "object") != "object":
        raise InvalidRequest(
            f'{where}.type must be "object", because arguments have names, '
            f"got {show(value['type'])}.",
            param=f"{where}.type",
        )
    properties = value.get("properties")
    if properties is not None and not isinstance(properties, dict):
        raise InvalidRequest(
            f"{where}.properties must be an object, got {show(properties)}.",
            param=f"{where}.properties",
        )
    return value


def tool_use(
    tools: Sequence[ToolSpec],
    choice: ToolChoice | None,
    *,
    place: Callable[[int], str] = "tools[{}].name".format,
    param: str = "tool_choice",
) -> ToolUse:
    """A request's tools and choice, checked together.

    Args:
        tools: Checked tools.
        choice: `None` if the client made none: `auto` if there are tools, else `none`.
        place: The path of a tool's name by its index, for errors.
        param: The field of the choice, for errors.

    Raises:
        InvalidRequest: too many tools, two of one name, or a choice that they do not allow.
    """
    TOOLS.check(len(tools), "tools")
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if (first := seen.setdefault(tool.name, i)) != i:
            raise InvalidRequest(
                f"{place(i)} is the name of another tool ({place(first)}): {show(tool.name)}.",
                param=place(i),
            )
    if choice is None:
        return ToolUse(tuple(tools), ToolChoice("auto" if tools else "none"))
    if choice.mode != "none" and not tools:
        raise InvalidRequest(f"{param} needs tools.", param=param)
    if choice.mode == "named" and choice.name not in seen:
        raise InvalidRequest(
            f"{param} names the tool {show(choice.name)}, which is not among the tools.",
            param=param,
        )
    if choice.allowed is None:
        return ToolUse(tuple(tools), choice)
    if not choice.allowed:
        raise InvalidRequest(f"{param} must allow at least one of the tools.", param=param)
    for name, where in choice.allowed.items():
        if name not in seen:
            raise InvalidRequest(f"{where} is not among the tools: {show(name)}.", param=where)
    kept = tuple(tool for tool in tools if tool.name in choice.allowed)
    return ToolUse(kept, choice, narrowed=len(kept) < len(tools))
