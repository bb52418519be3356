"""Which marks a model writes around its reasoning, by its chat template.

A template that shows earlier reasoning to the model writes it as the model does, so what is in it
tells the reasoning parser, and with it the marks. Knows no parser but by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.thinking import ThinkingMarks

NOTHING: Final = "none"
"""Stands for no parser."""

REASONING_MARKS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("granite", ("<|start_of_role|>", "<response>")),
    ("seed_oss", ("<seed:think>",)),
    ("glm45", ("<arg_key>", "<think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "thinking")),
    ("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("<think>",)),
    ("deepseek_r1", ("</think>",)),
)  # fmt: skip
"""Reasoning parsers, and what a template has that writes their syntax: all of the strings. The
first row that fits counts."""

_TAGS: Final = ThinkingMarks("<think>", "</think>")
SENTENCES: Final = ThinkingMarks("Here is my thought process:", "Here is my response:")
"""Of Granite 3.2. They are plain text, so no budget can be held: text has many spellings in tokens,
and the end of the reasoning could be missed and be forced into the answer."""
MARKS: Final[dict[str, ThinkingMarks]] = {
    "openai_gptoss": ThinkingMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
    "granite": _TAGS,
    "seed_oss": ThinkingMarks("<seed:think>", "</seed:think>"),
    "glm45": _TAGS,
    "kimi_k2": _TAGS,
    "deepseek_v3": _TAGS,
    "deepseek_r1": ThinkingMarks("<think>", "</think>", always=True),
    "qwen3": _TAGS,
}
"""Of the parsers above, as the parsers themselves have them. Granite 3.2 writes `SENTENCES`."""


def first_that_fits(rows: Sequence[tuple[str, tuple[str, ...]]], text: str) -> str:
    """The name in the first row all of whose strings are in a text, or `none`."""
    fits = (name for name, marks in rows if all(mark in text for mark in marks))
    return next(fits, NOTHING)


def marks_of(templates: Sequence[str]) -> ThinkingMarks | None:
    """The marks of a model with these chat templates; `None`: not known."""
    text = "\n".join(templates)
    name = first_that_fits(REASONING_MARKS, text)
    if name == "granite" and SENTENCES.opening in text:
        return SENTENCES
    return MARKS.get(name)
