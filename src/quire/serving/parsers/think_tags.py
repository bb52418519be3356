"""Reasoning in tags, as most reasoning models write it: `<think>...</think>` before the answer.

Some models write the opening tag; for others the template writes it, and the prompt ends with it.
"""

from __future__ import annotations

from typing import ClassVar

from quire.serving.parsers.scan import Marks
from quire.serving.parsers.thoughts import Thoughts
from quire.serving.parsing import ParserSetup, TurnWriter


class ThinkTags(Thoughts):
    """Reasoning begins if the prompt ends with the opening tag, or the text begins with it.

    White space at either end of the reasoning is left out, and so is what is before the answer
    then.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    special_tokens = thoughts = (opening, closing)
    always: ClassVar[bool] = False
    """The model reasons even if no tag opens, unless the prompt ends with the closing tag."""

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._start = Marks(self.opening)
        self.ends = Marks(self.closing)
        prompt = setup.prompt.rstrip()
        self._reasons = prompt.endswith(self.opening) or (
            self.always and not prompt.endswith(self.closing)
        )

    def read_text(self) -> bool:
        """Before the first word: the opening tag, which some models write although the prompt has
        it, or what is not."""
        more = self.skip_space()
        mark = self._start.begins(self.text, self.at, self.final) if more else None
        if mark is None:
            return False
        self.at += len(mark)
        if mark or self._reasons:
            self.state = type(self).read_thoughts
        else:
            self.pass_skipped()
            self.state = type(self).read_rest
        return True

    def end_of_text(self) -> None:
        """White space that was all, or that the answer began with."""
        if self.state is type(self).read_text and not self._reasons:
            self.pass_skipped()


class DeepSeekR1(ThinkTags):
    """DeepSeek R1 and models made from it: they always reason, whoever writes the opening tag."""

    always = True


class MistralThink(ThinkTags):
    """Magistral: special tokens as tags."""

    opening, closing = "[THINK]", "[/THINK]"
    special_tokens = thoughts = (opening, closing)


class SeedThink(ThinkTags):
    """Seed-OSS."""

    opening, closing = "<seed:think>", "</seed:think>"
    special_tokens = thoughts = (opening, closing)
