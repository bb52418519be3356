"""Granite 3.2 and 3.3: reasoning between two sentences, or between tags.

`Here is my thought process: ... Here is my response: ...`, or since version 3.3
`<think>...</think><response>...</response>`. The template tells the model which.
"""

from __future__ import annotations

from typing import Final

from quire.serving.parsers.scan import Marks
from quire.serving.parsers.thoughts import Thoughts
from quire.serving.parsing import ParserSetup, TurnWriter
from quire.tokenizer.thinking import SENTENCES

_SENTENCES: Final = (SENTENCES.opening, SENTENCES.closing)
_STARTS: Final = Marks("Here is my thought process:", "Here's my thought process:", "<think>")
_RESPONSE: Final = Marks("<response>")
_RESPONSE_END: Final = Marks("</response>")


class GraniteThoughts(Thoughts):
    """See the module. White space at either end of the reasoning is left out."""

    ends = Marks("Here is my response:", "Here's my response:", "</think>")
    special_tokens = ("<think>", "</think>", "<response>", "</response>")
    thoughts = ("<think>", "</think>")

    @classmethod
    def thoughts_after(cls, prompt: str) -> tuple[str, str]:
        """See `OutputParser`."""
        return _SENTENCES if _SENTENCES[0] in prompt else cls.thoughts

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._reasons = setup.prompt.rstrip().endswith((self.thoughts[0], _SENTENCES[0]))

    def read_text(self) -> bool:
        """The beginning: reasoning, or an answer without any."""
        if not self.skip_space():
            return False
        mark = _STARTS.begins(self.text, self.at, self.final)
        if mark is None:
            return False
        self.at += len(mark)
        if mark or self._reasons:
            self.state = type(self).read_thoughts
        else:
            self.pass_skipped()
            self.state = type(self).read_rest
        return True

    def read_gap(self) -> bool:
        """Between reasoning and answer."""
        if not self.skip_space():
            return False
        mark = _RESPONSE.begins(self.text, self.at, self.final)
        if mark is None:
            return False
        self.at += len(mark)
        self.state = type(self).read_response if mark else type(self).read_rest
        return True

    def read_response(self) -> bool:
        """An answer in tags."""
        end, mark = _RESPONSE_END.find(self.text, self.at, self.final)
        if end > self.at:
            self.out.text(self.text[self.at : end])
        self.at = end + len(mark)
        if mark:
            self.state = type(self).read_rest
        return bool(mark)

    def end_of_text(self) -> None:
        """White space that was all."""
        if self.state is type(self).read_text and not self._reasons:
            self.pass_skipped()
