"""Mistral: `[TOOL_CALLS]` and a JSON list, or since tokenizer version 11 a name and arguments.

`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}` once per call, in
some versions with `[CALL_ID]` and an id after the name.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from quire.serving.parsers.call_list import CallList
from quire.serving.parsers.json_text import JsonValue
from quire.serving.parsers.scan import Marks, is_name
from quire.serving.parsing import CallSyntax

_AFTER_NAME: Final = Marks("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]", "{")
_AFTER_ID: Final = Marks("[ARGS]", "[TOOL_CALLS]", "{")


class Mistral(CallList):
    """See the module. Its templates insist on ids of nine letters or digits."""

    opening = ("[TOOL_CALLS]",)
    closing = ("[ARGS]", "[CALL_ID]")
    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    id_letters = 9

    _arguments: JsonValue | None = None

    @classmethod
    def call_syntax(cls, vocabulary: Container[str]) -> CallSyntax:
        """See `OutputParser`. Without a token for it, the model knows no `[ARGS]`."""
        if "[ARGS]" in vocabulary:
            return CallSyntax("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]")
        begin = '{"name": "NAME", "arguments": '
        return CallSyntax(begin, "}", ", ", "[TOOL_CALLS][", "]", "[TOOL_CALLS]")

    def read_first(self) -> bool:
        """Either a list of objects, or a name."""
        if self._in_list:
            return super().read_first()
        if not self.skip_space():
            return False
        if self.text[self.at] in "[{":
            return super().read_first()
        self._before += self.skipped
        self.skipped, self._name = [], ""
        self.state = type(self).read_name
        return True

    def read_name(self) -> bool:
        """The name of a call, to the mark after it."""
        self._name, mark = self.take_short(_AFTER_NAME, self._name)
        if mark is None:
            return False
        self._before.append(self._name)
        if not mark or mark == "[TOOL_CALLS]" or not is_name(self._name.strip()):
            self._give_up()
            return True
        self._before = []
        self.begin(self._name.strip())
        self._arguments = JsonValue()
        if mark != "{":
            self.at += len(mark)
        self.state = type(self).read_id if mark == "[CALL_ID]" else type(self).read_arguments
        return True

    def read_id(self) -> bool:
        """The model's id of a call, which is not used."""
        end, mark = _AFTER_ID.find(self.text, self.at, self.final)
        self.at = end + (len(mark) if mark == "[ARGS]" else 0)
        if mark:
            self.state = type(self).read_arguments
        return bool(mark)

    def read_arguments(self) -> bool:
        """The arguments: an object."""
        assert self._arguments is not None
        if not self._arguments.first and (not self.skip_space() or self.text[self.at] != "{"):
            if self.at == len(self.text):
                return False
            self._end_arguments()
            return True
        end = self._arguments.take(self.text, self.at)
        self.out.arguments(self.text[self.at : end])
        self.at = end
        if self._arguments.done:
            self._end_arguments()
        return self._arguments is None

    def _end_arguments(self) -> None:
        if self._arguments is not None and not self._arguments.first:
            self.out.arguments("{}")
        self._arguments = None
        self.out.end_call()
        self.state = type(self).read_text

    def end_of_text(self) -> None:
        """The text may end within a name."""
        if self.state is type(self).read_name:
            self._before.append(self._name)
            self._give_up()
        else:
            super().end_of_text()
