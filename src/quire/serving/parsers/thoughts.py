"""What parsers of reasoning share: reasoning without the white space at its ends, then the answer.

Does not know what begins the reasoning, or what ends it.
"""

from __future__ import annotations

from quire.serving.parsers.scan import Marks, Scanner
from quire.serving.parsing import ParserSetup, TurnWriter


class Thoughts(Scanner):
    """Reads reasoning and what follows; subclasses read what comes before and between."""

    ends: Marks
    """What ends the reasoning."""

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._thought = False
        """Some reasoning was told."""
        self._held: list[str] = []
        """White space that counts only if more reasoning follows."""

    def read_thoughts(self) -> bool:
        """Reasoning, up to what ends it."""
        end, mark = self.ends.find(self.text, self.at, self.final)
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

    def pass_skipped(self) -> None:
        """White space that was skipped belongs to the answer after all."""
        for space in self.skipped:
            self.out.text(space)
        self.skipped = []
