"""What may come before the part of a reply that has a form: the model's reasoning, as its parser
will read it. Knows no grammar.
"""

from __future__ import annotations

from quire.serving.parsing import OutputParser
from quire.structured.params import FreeReasoning
from quire.thinking import ThinkingMarks


def marks_of_parser(kind: type[OutputParser] | None, prompt: str = "") -> ThinkingMarks | None:
    """What is written around the reasoning after a prompt; `None`: not known."""
    thoughts = None if kind is None else kind.thoughts_after(prompt)
    if thoughts is None:
        return None
    return ThinkingMarks(*thoughts, always=getattr(kind, "always", False))


def reasoning_before(
    kind: type[OutputParser] | None, prompt: str, *, may_open: bool
) -> FreeReasoning | None:
    """The reasoning before a form; `None`: the form holds from the first token on.

    Args:
        kind: The parser of reasoning, if there is one.
        prompt: As the template rendered it; it may end within the reasoning, or after it.
        may_open: Whether the model may begin to reason: not if the template was told otherwise.
    """
    marks = marks_of_parser(kind, prompt)
    if kind is None or marks is None or prompt.rstrip().endswith(kind.answer or marks.closing):
        return None
    is_open = marks.is_open_after(prompt)
    if not (is_open or may_open or kind.answer):
        return None
    return FreeReasoning(
        opening=marks.opening,
        closing=marks.closing,
        answer=kind.answer,
        is_open=is_open,
        may_open=may_open,
    )
