"""The marks around a model's reasoning: as texts, and as the tokens of one model.

Texts come from the reasoning parser in force, or from the chat template (`tokenizer/thinking.py`).
The input gate turns them into tokens, and everything behind the gate knows only these. Knows no
parser and no tokenizer.
"""

from __future__ import annotations

from typing import Final

import msgspec

PROMPT_END: Final = 64
"""Tokens at the end of a prompt that tell whether it ends within the reasoning."""


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """What a model writes around its reasoning."""

    opening: str
    closing: str
    always: bool = False
    """The model reasons even if nothing opens, unless the prompt ends with `closing`."""

    def is_open_after(self, prompt: str) -> bool:
        """Whether the model goes on with reasoning after a prompt, of which the end is enough. The
        same rule as that of the parsers."""
        ended = prompt.rstrip()
        return ended.endswith(self.opening) or (self.always and not ended.endswith(self.closing))


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The marks as one request has them."""

    opening: list[int]
    """Token ids, at least one."""
    closing: list[int]
    """Token ids, at least one."""
    is_open: bool = False
    """The output begins within the reasoning."""
