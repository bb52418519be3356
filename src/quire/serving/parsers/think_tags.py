"""Reasoning in tags, as most reasoning models write it: `<think>...</think>` before the answer.

Some models write the opening tag; for others the template writes it, and the prompt ends with it.
"""

from __future__ import annotations

from typing import ClassVar

from quire.serving.parsers.scan import Marks, Scanner
from quire.serving.parsing import ParserSetup, TurnWriter


class ThinkTags(Scanner):
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
        self._end = Marks(self.closing)
        self._thought = False
        """Some reasoning was told."""
        self._held: list[str] = []
        """White space that counts only if more reasoning follows."""
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
            self._pass_skipped()
            self.state = type(self).read_rest
        return True

    def read_thoughts(self) -> bool:
        """Reasoning, up to the closing tag."""
        end, mark = self._end.find(self.text, self.at, self.final)
        text = self.text[self.at : end]
        if not self._thought:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._thought = True
            for space in self._held:
                self.out.reasoning(space)
            self._held = []
            self.out.reasoning(kept)
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
        self.at = end + len(mark)
        if mark:
            self._held = []
            self.state = type(self).read_gap
        return bool(mark)

    def read_gap(self) -> bool:
        """White space before the answer."""
        if not self.skip_space():
            return False
        self.state = type(self).read_rest
        return True

    def read_rest(self) -> bool:
        """The answer."""
        if self.at < len(self.text):
            self.out.text(self.text[self.at :])
            self.at = len(self.text)
        return False

    def end_of_text(self) -> None:
        """White space that was all, or that the answer began with."""
        if self.state is type(self).read_text and not self._reasons:
            self._pass_skipped()

    def _pass_skipped(self) -> None:
        for space in self.skipped:
            self.out.text(space)
        self.skipped = []


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
