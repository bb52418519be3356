"""Calls written as tags, without types: Qwen 3 Coder and GLM 4.5."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from quire.serving.parsers.json_text import JsonValue
from quire.serving.parsers.scan import MAX_SHORT, Marks, Scanner, is_name
from quire.serving.parsers.typed_values import Arguments
from quire.serving.parsing import CallSyntax, ParserSetup, TurnWriter


class XmlCalls(Scanner):
    """What the syntaxes share: reading a name or a key up to a mark."""

    needs_tools = True

    def __init__(self, setup: ParserSetup, out: TurnWriter) -> None:
        super().__init__(setup, out)
        self._name = ""
        self._arguments: Arguments | None = None
        self._value_begins = False
        self._json: JsonValue | None = None

    def take_name(self, marks: Marks) -> str | None:
        """Add to `_name` up to a mark, which is not consumed. The mark; empty: the name is too
        long; `None`: more text is needed."""
        self._name, mark = self.take_short(marks, self._name)
        return mark

    def begin_call(self) -> None:
        """Begin the call of the tool `_name`."""
        name = self._name.strip()
        self.begin(name)
        held = name in self.setup.held
        self._arguments = Arguments(name, self.setup.tools, self.out.arguments, held=held)

    @property
    def arguments(self) -> Arguments:
        """Of the call that is being read."""
        assert self._arguments is not None, "no call"
        return self._arguments

    def begin_value(self, name: str) -> None:
        """A value begins; what it is shows with its first character."""
        self.arguments.key(name)
        self._value_begins, self._json = True, None

    def passed_json(self) -> bool:
        """Read on in a value that is known to be JSON, in which a mark may be part of a string.
        Whether a mark may come now; if not, more text is needed."""
        if self.at == len(self.text):
            return True
        if self._value_begins:
            self._value_begins = False
            if self.arguments.is_json(self.text[self.at]):
                self._json = JsonValue()
        if self._json is None:
            return True
        end = self._json.take(self.text, self.at)
        self.arguments.value(self.text[self.at : end])
        self.at = end
        return self._json.done

    def end_call(self) -> None:
        """The call is complete."""
        self.arguments.end()
        self._arguments = None
        self.out.end_call()


class Qwen3Xml(XmlCalls):
    """Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function>
    </tool_call>`. The outer tags may be missing."""

    special_tokens = ("<tool_call>", "</tool_call>")

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`."""
        begin, end = "<function=NAME>\n", "</function>"
        return CallSyntax(
            f"<tool_call>\n{begin}", f"{end}\n</tool_call>", "\n",
            trigger="<tool_call>", others=((begin, end),), style="qwen_xml",
        )  # fmt: skip

    def read_text(self) -> bool:
        """Text, until a call opens."""
        mark = self.take_text(_QWEN)
        if mark == "<tool_call>":
            self.skipped = []
            self.state = type(self).read_opened
        elif mark == "<function=":
            self._open(mark)
        return bool(mark)

    def _open(self, before: str) -> None:
        self._before, self._name = before, ""
        self.state = type(self).read_name

    def read_opened(self) -> bool:
        """After the outer tag."""
        if not self.skip_space():
            return False
        mark = _FUNCTION.begins(self.text, self.at, self.final)
        if mark is None:
            return False
        self.at += len(mark)
        if mark:
            self._open(mark)
        else:
            self.say_opening("<tool_call>")
            self.state = type(self).read_text
        return True

    def read_name(self) -> bool:
        """The name, to the end of its tag."""
        mark = self.take_name(_TAG_END)
        if mark is None:
            return False
        if mark and is_name(self._name.strip()):
            self.at += len(mark)
            self.begin_call()
            self.state = type(self).read_function
        else:
            self.say(self._before + self._name)
            self.state = type(self).read_text
        return True

    def read_function(self) -> bool:
        """Between parameters."""
        mark = self.skip_to(_IN_FUNCTION)
        if mark == "<parameter=":
            self._name = ""
            self.state = type(self).read_key
        elif mark:
            self.end_call()
            self.state = type(self).read_text
        return bool(mark)

    def read_key(self) -> bool:
        """The name of a parameter, to the end of its tag."""
        mark = self.take_name(_TAG_END)
        if mark is None:
            return False
        self.at += len(mark)
        if mark:
            self.begin_value(self._name.strip())
            self._first, self._newline = True, False
            self.state = type(self).read_value
        else:
            self.state = type(self).read_function
        return True

    def read_value(self) -> bool:
        """A value, without the line breaks next to its tags."""
        if self._first and self.at < len(self.text):
            self._first = False
            self.at += self.text[self.at] == "\n"
        if not self.passed_json():
            return False
        end, mark = _PARAMETER_END.find(self.text, self.at, self.final)
        piece = self.text[self.at : end]
        if piece:
            if self._newline:
                self.arguments.value("\n")
            self._newline = piece.endswith("\n")
            self.arguments.value(piece[: len(piece) - self._newline])
        self.at = end + len(mark)
        if mark:
            self.arguments.end_value()
            self.state = type(self).read_function
        return bool(mark)

    def end_of_text(self) -> None:
        """The text may end within a call."""
        if self.state is type(self).read_opened:
            self.say_opening("<tool_call>")
        elif self.state is type(self).read_name:
            self.say(self._before + self._name)


_QWEN: Final = Marks("<tool_call>", "</tool_call>", "<function=")
_FUNCTION: Final = Marks("<function=")
_TAG_END: Final = Marks(">")
_IN_FUNCTION: Final = Marks("<parameter=", "</function>", "</tool_call>")
_PARAMETER_END: Final = Marks("</parameter>")


class Glm45(XmlCalls):
    """GLM 4.5 to 4.7: `<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n
    </tool_call>`."""

    special_tokens = (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    )  # fmt: skip

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. Line breaks are as the model likes: version 4.7 writes none."""
        return CallSyntax(
            "<tool_call>NAME", "</tool_call>", "\n", trigger="<tool_call>", style="glm_xml"
        )

    def read_text(self) -> bool:
        """Text, until a call opens."""
        mark = self.take_text(_GLM)
        if mark == "<tool_call>":
            self._name = ""
            self.state = type(self).read_name
        return bool(mark)

    def read_name(self) -> bool:
        """The name, to the first key, the end of the line, or the end of the call."""
        mark = self.take_name(_GLM_NAME_END)
        if mark is None:
            return False
        if mark == "\n" and not self._name.strip() and len(self._name) < MAX_SHORT:
            self._name += mark
            self.at += len(mark)
        elif mark and is_name(self._name.strip()):
            self.begin_call()
            self.state = type(self).read_call
        else:
            self.say_mark("<tool_call>")
            self.say(self._name)
            self.state = type(self).read_text
        return True

    def read_call(self) -> bool:
        """Between arguments."""
        mark = self.skip_to(_IN_GLM)
        if mark == "<arg_key>":
            self._name = ""
            self.state = type(self).read_key
        elif mark:
            self.end_call()
            self.state = type(self).read_text
        return bool(mark)

    def read_key(self) -> bool:
        """The name of an argument."""
        mark = self.take_name(_KEY_END)
        if mark is None:
            return False
        self.at += len(mark)
        self.state = type(self).read_after_key if mark else type(self).read_call
        return True

    def read_after_key(self) -> bool:
        """Between a key and its value."""
        end, mark = _VALUE_BEGIN.find(self.text, self.at, self.final)
        self.at = end
        if mark == "<arg_value>":
            self.at += len(mark)
            self.begin_value(self._name.strip())
            self.state = type(self).read_value
        elif mark:
            self.state = type(self).read_call
        return bool(mark)

    def read_value(self) -> bool:
        """A value."""
        if not self.passed_json():
            return False
        end, mark = _VALUE_END.find(self.text, self.at, self.final)
        self.arguments.value(self.text[self.at : end])
        self.at = end + len(mark)
        if mark:
            self.arguments.end_value()
            self.state = type(self).read_call
        return bool(mark)

    def end_of_text(self) -> None:
        """The text may end within the name."""
        if self.state is type(self).read_name:
            self.say_mark("<tool_call>")
            self.say(self._name)


_GLM: Final = Marks("<tool_call>", "</tool_call>")
_GLM_NAME_END: Final = Marks("<arg_key>", "</tool_call>", "<tool_call>", "\n")
_IN_GLM: Final = Marks("<arg_key>", "</tool_call>")
_KEY_END: Final = Marks("</arg_key>")
_VALUE_BEGIN: Final = Marks("<arg_value>", "<arg_key>", "</tool_call>")
_VALUE_END: Final = Marks("</arg_value>")
