"""Feeds parsers with text in pieces and says what they found; the form of golden transcripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.serving.parsing import (
    PARSERS,
    REASONING_PARSERS,
    OutputParser,
    ParserSetup,
    Parsing,
    ReplyRules,
)
from quire.serving.tools import ToolSpec
from quire.serving.turns import (
    ModelTurn,
    Reasoning,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    TurnEvent,
)

TRANSCRIPTS = Path(__file__).parent / "transcripts"

ALL_OF_IT = ReplyRules()
_TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "metric": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object"},
    "note": {"type": ["string", "null"]},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = (
    ToolSpec("get_weather", "The weather.", {"type": "object", "properties": _TYPES}),
    ToolSpec("now"),
    ToolSpec("math.add", parameters={"type": "object", "properties": {"a": {"type": "number"}}}),
)


def kinds_of(tools: str | None = None, reasoning: str | None = None) -> list[type[OutputParser]]:
    """The classes of parsers by name."""
    found = [] if reasoning is None else [REASONING_PARSERS.get(reasoning)]
    found += [] if tools is None else [PARSERS.get(tools)]
    return list(dict.fromkeys(found))


def read(
    pieces: Sequence[str],
    kinds: Sequence[type[OutputParser]],
    setup: ParserSetup | None = None,
    rules: ReplyRules = ALL_OF_IT,
) -> list[TurnEvent]:
    """The events of a text that comes in pieces."""
    parser = Parsing(kinds, setup or ParserSetup("", TOOLS), rules).begin(0, "r")
    assert parser is not None
    batches = [parser.feed(piece) for piece in pieces]
    return [event for batch in [*batches, parser.finish()] for event in batch]


def told(events: Sequence[TurnEvent]) -> list[list[str]]:
    """What was said, in order: kind and text; calls with name and arguments."""
    found = []
    for part in ModelTurn(0).add(events).parts:
        if isinstance(part, ToolCall):
            found.append(["call", part.name, part.arguments])
        else:
            found.append(["text" if isinstance(part, Text) else "reasoning", part.text])
    return found


def check_form(events: Sequence[TurnEvent]) -> None:
    """Events are well formed: no text is empty, calls are numbered, closed, and do not overlap."""
    calls, is_open = 0, False
    for event in events:
        if isinstance(event, Text | Reasoning):
            assert event.text and not is_open
        elif isinstance(event, ToolCallBegin):
            assert (event.call, is_open) == (calls, False) and event.id
            calls, is_open = calls + 1, True
        elif isinstance(event, ToolCallArguments):
            assert (event.call, is_open) == (calls - 1, True) and event.text
        elif isinstance(event, ToolCallEnd):
            assert (event.call, is_open) == (calls - 1, True)
            is_open = False
    assert not is_open


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces that end at the places."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Case:
    """One text of a golden transcript."""

    name: str
    kinds: tuple[type[OutputParser], ...]
    prompt: str
    text: str
    told: list[list[str]]


def transcript(path: Path) -> list[Case]:
    """The cases of a file: an object with the parsers, and a list of texts and what they say."""
    data: Any = json.loads(path.read_text("utf-8"))
    kinds = tuple(kinds_of(data.get("tools"), data.get("reasoning")))
    return [
        Case(f"{path.stem}-{i}", kinds, case.get("prompt", ""), case["text"], case["told"])
        for i, case in enumerate(data["cases"])
    ]


def all_cases() -> list[Case]:
    """The cases of all transcripts."""
    return [case for path in sorted(TRANSCRIPTS.glob("*.json")) for case in transcript(path)]
