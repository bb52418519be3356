"""Items of the Responses API, read into the turns of chat templates.

Messages, reasoning and calls are items of their own there; to a template, what the assistant says
between two turns of others is one turn. Knows no reply.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequest, NotFound
from quire.serving.decode import show
from quire.serving.responses.schema import (
    INPUT_PARTS,
    ITEMS,
    OUTPUT_PARTS,
    REFUSED_ITEMS,
    REFUSED_PARTS,
    THOUGHT_PARTS,
)
from quire.serving.tagged import Shape, check_tagged

ROLES: Final = ("user", "assistant", "system", "developer")
PREFIXES: Final = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip
AT_ONCE: Final = 512
"""Items that are checked in one go, in a few milliseconds."""
_OUTPUT_ID: Final = re.compile(r"(?:msg|fc|rs)_([0-9a-f]{32})_(\d{1,6})")

Item = dict[str, Any]
Lookup = Callable[[str], list[Item] | None]
"""The output items of a stored response of the caller, by the response's id."""


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """The id of an item, which says of which response it is and where in it."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{place}"


def find_item(reference: str, lookup: Lookup, where: str) -> Item:
    """The item that an `item_reference` stands for.

    Raises:
        NotFound: the caller has no stored response with such an item.
    """
    match = _OUTPUT_ID.fullmatch(reference)
    output = lookup(f"resp_{match.group(1)}") if match else None
    place = int(match.group(2)) if match else 0
    if output is None or place >= len(output) or output[place]["id"] != reference:
        raise NotFound(f"There is no item {show(reference)}.", param=where)
    return output[place]


def normalised(item: Item, response_id: str, place: int) -> Item:
    """An item of the input as `input_items` shows it: with type, id and status, and its text as a
    part."""
    kind = item.get("type") or "message"
    found = {key: value for key, value in item.items() if value is not None}
    found |= {"type": kind, "id": item.get("id") or item_id(kind, response_id, f"i{place}")}
    found.setdefault("status", "completed")
    if kind == "message" and isinstance(item["content"], str):
        part: Item = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            part |= {"type": "output_text", "annotations": []}
        found["content"] = [part]
    return found


async def resolved(items: list[Item], lookup: Lookup) -> list[Item]:
    """Checked items of an input, references replaced by what they stand for. Others have their turn
    in between.

    Raises:
        InvalidRequest: an item is wrong, or of a kind that is not supported; `param` is its place.
        NotFound: a reference leads nowhere.
    """
    found = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if i % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        # A reference is the one kind that may come without a type and has no role.
        default = "message" if "role" in item or "id" not in item else "item_reference"
        if check_tagged(item, ITEMS, REFUSED_ITEMS, where, default) == "item_reference":
            item = find_item(item["id"], lookup, f"{where}.id")
        found.append(item)
    return found


class TurnsOfItems:
    """The turns that items make.

    Args:
        turns: Those before the items.
    """

    def __init__(self, turns: list[dict[str, Any]] | None = None) -> None:
        self.turns = turns or []

    def add(self, items: list[Item], where: str = "input") -> TurnsOfItems:
        """Take the next items, which have been checked; returns the object itself.

        Raises:
            InvalidRequest: the content of an item is wrong; `param` is its place.
        """
        for i, item in enumerate(items):
            place = f"{where}[{i}]"
            match item.get("type") or "message":
                case "message":
                    self._message(item, place)
                case "function_call":
                    self._call(item, place)
                case "function_call_output":
                    output = _text(item["output"], INPUT_PARTS, f"{place}.output")
                    turn = {"role": "tool", "tool_call_id": item["call_id"], "content": output}
                    self.turns.append(turn)
                case _:
                    self._reasoning(item, place)
        return self

    def _message(self, item: Item, where: str) -> None:
        role = item["role"]
        if role not in ROLES:
            raise InvalidRequest(
                f"{where}.role must be one of {', '.join(ROLES)}, got {show(role)}.",
                param=f"{where}.role",
            )
        shapes = OUTPUT_PARTS if role == "assistant" else INPUT_PARTS
        text = _text(item["content"], shapes, f"{where}.content")
        if role != "assistant":
            # `developer` is OpenAI's newer name of `system`, which is the one that templates know.
            role = "system" if role == "developer" else role
            self.turns.append({"role": role, "content": text})
            return
        turn = self._assistant()
        if turn["content"] and "tool_calls" not in turn:  # two messages of the assistant
            turn = self._assistant(new=True)
        turn["content"] += text

    def _call(self, item: Item, where: str) -> None:
        try:
            arguments = msgspec.json.decode(item["arguments"] or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"{where}.arguments must be a JSON object in a string, got "
                f"{show(item['arguments'])}.",
                param=f"{where}.arguments",
            )
        function = {"name": item["name"], "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _reasoning(self, item: Item, where: str) -> None:
        # The whole text if it is there; other servers may have told a summary alone.
        name = "content" if item.get("content") else "summary"
        text = _text(item.get(name) or [], THOUGHT_PARTS, f"{where}.{name}")
        turn = self._assistant()
        if turn["content"] or "tool_calls" in turn:  # the model thought anew
            turn = self._assistant(new=True)
        turn["reasoning"] = turn.get("reasoning", "") + text

    def _assistant(self, new: bool = False) -> dict[str, Any]:
        if new or not self.turns or self.turns[-1]["role"] != "assistant":
            self.turns.append({"role": "assistant", "content": ""})
        return self.turns[-1]


def _text(content: Any, shapes: Mapping[str, Shape], where: str) -> str:
    """A text, or the texts of parts."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = check_tagged(part, shapes, REFUSED_PARTS, f"{where}[{i}]")
        texts.append(part["refusal" if kind == "refusal" else "text"])
    return "\n".join(texts)


def with_instructions(
    turns: list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Turns with the instructions before them. System turns at the beginning become one, because
    many templates take no second."""
    leading = [instructions] if instructions else []
    leading += [turn["content"] for turn in takewhile(lambda turn: turn["role"] == "system", turns)]
    rest = turns[len(leading) - bool(instructions) :]
    system = {"role": "system", "content": "\n\n".join(leading)}
    return [system, *rest] if leading else rest
