"""GPT-OSS: the harmony format, in which every message says its channel and its recipient.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|channel|>final<|message|>...` the
answer, and `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` a
call. What follows a message begins with `<|start|>assistant`; a prompt ends with that.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from quire.serving.parsers.scan import Marks, Scanner, is_name
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter

_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_FUNCTIONS: Final = "functions."


class Harmony(Scanner):
    """See the module. It reads reasoning and calls in one."""

    special_tokens = (
        "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
        "<|return|>",
    )  # fmt: skip

    thoughts = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    answer = "<|channel|>final<|message|>"

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. A reply has one call: `<|call|>` after it ends the output.

        The recipient may be in the channel or, as templates show earlier calls, with the role; the
        type of the content may be marked or not.
        """
        end = "<|end|><|start|>assistant"
        told = "<|channel|>" in vocabulary  # otherwise a header is text like any other
        channel, role = "<|channel|>commentary to=functions.NAME", " to=functions.NAME"
        kinds = ("<|constrain|>json<|message|>", "json<|message|>")
        others = [(f"{channel} {kinds[1]}", "")]
        others += [(f"{role}<|channel|>commentary {kind}", "") for kind in kinds]
        return CallSyntax(
            f"{channel} {kinds[0]}",
            "",
            others=tuple(others) if told else (),
            trigger=None if told else "<|channel|>commentary to=functions.",
            one_call=True,
            asides=(
                (("<|channel|>commentary<|message|>", end), (cls.thoughts[0], end)) if told else ()
            ),
        )

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._header = ""
        self._kind = "final"
        self._written = ""
        """The kind of the message that was written last."""
        self._any = False
        """Something of the present message was written."""
        self.state = type(self).read_start

    def read_start(self) -> bool:
        """The first word: the prompt may end within a header."""
        if not self.skip_space():
            return False
        mark = _TO.begins(self.text, self.at, self.final)
        if mark is None:
            return False
        if mark:
            self.skipped = []
            self._header = ""
            self.state = type(self).read_header
        else:
            self._say_skipped()
            self.state = type(self).read_text
        return True

    def _say_skipped(self) -> None:
        skipped, self.skipped = self.skipped, []
        for space in skipped:
            self.say(space)

    def read_text(self) -> bool:
        """Text outside of messages, to the beginning of one."""
        mark = self.take_text(_ANY)
        if mark in ("<|start|>", "<|channel|>"):
            self._header = mark
            self.state = type(self).read_header
        elif mark == "<|message|>":
            self._begin_message("")
        return bool(mark)

    def read_header(self) -> bool:
        """Role, channel and recipient, to the beginning of the content."""
        self._header, mark = self.take_short(_IN_HEADER, self._header)
        if mark is None:
            return False
        self.at += len(mark)
        if mark == "<|message|>" or not mark:
            self._begin_message(self._header)
        elif mark in ("<|channel|>", "<|constrain|>"):
            self._header += mark
        else:
            self.state = type(self).read_text
        return True

    def _begin_message(self, header: str) -> None:
        found = _RECIPIENT.search(header)
        recipient = found.group(1) if found else ""
        channel = header.partition("<|channel|>")[2].lstrip()
        name = recipient.removeprefix(_FUNCTIONS)
        if recipient.startswith(_FUNCTIONS) and is_name(name) and self.setup.tools:
            self._kind = "call"
            self.begin(name)
        elif channel.startswith("analysis"):
            self._kind = "analysis"
        else:
            self._kind = "final"
        self._any = False
        self.state = type(self).read_message

    def read_message(self) -> bool:
        """The content of a message, to its end."""
        end, mark = _MESSAGE_END.find(self.text, self.at, self.final)
        if end > self.at:
            self._write(self.text[self.at : end])
        self.at = end + len(mark)
        if not mark:
            return False
        if self._kind == "call":
            if not self._any:
                self.out.arguments("{}")
            self.out.end_call()
        if mark in ("<|start|>", "<|channel|>"):  # the end was left out
            self._header = mark
            self.state = type(self).read_header
        else:
            self.state = type(self).read_text
        return True

    def _write(self, text: str) -> None:
        if self._kind == "call":
            text = text if self._any else text.lstrip()
            self._any = self._any or bool(text)
            self.out.arguments(text)
            return
        # Two messages of one kind are two paragraphs of one text.
        apart = "\n\n" if not self._any and self._written == self._kind else ""
        self._any, self._written = True, self._kind
        if self._kind == "analysis":
            self.out.reasoning(apart + text)
        else:
            self.say(apart + text)

    def end_of_text(self) -> None:
        """White space that was all."""
        if self.state is type(self).read_start:
            self._say_skipped()


_TO: Final = Marks("to=")
_ANY: Final = Marks(*Harmony.special_tokens)
_IN_HEADER: Final = Marks(
    "<|message|>", "<|channel|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"
)
_MESSAGE_END: Final = Marks("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
