"""Calls written as JSON objects: `{"name": "f", "arguments": {...}}`, the commonest syntax.

The arguments are passed on as they are written, while they come. Other entries are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from quire.serving.parsers.json_text import ObjectReader, decoded

NAME_KEYS: Final = ("name",)
ARGUMENT_KEYS: Final = ("arguments", "parameters")
MAX_NAME: Final = 1024


class CallObject:
    """Reads one object, and begins a call when it has a name and the arguments begin.

    Args:
        begin: Told the name of the call.
        arguments: Told the pieces of its arguments.
        names: The tools whose names count; `None`: any name.
        bare: There is no mark around the object: one without arguments is no call, because it may
            be an answer in JSON.
        name_keys, argument_keys: What the entries are called.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        arguments: Callable[[str], None],
        names: Collection[str] | None = None,
        *,
        bare: bool = False,
        name_keys: Collection[str] = NAME_KEYS,
        argument_keys: Collection[str] = ARGUMENT_KEYS,
    ) -> None:
        self.begun = False
        """It is a call."""
        self._begin, self._pass_on = begin, arguments
        self._names = names
        self._bare = bare
        self._name_keys, self._argument_keys = name_keys, argument_keys
        self._reader = ObjectReader(self)
        self._name: str | None = None
        self._kind = ""
        """Of the entry that is being read: `n`ame, `a`rguments, or other."""
        self._parts: list[str] = []
        """Of the name, or of arguments that cannot be passed on yet."""
        self._held: str | None = None
        """Arguments that are complete and wait for the name."""
        self._any_arguments = False
        self._raw: list[str] = []
        """The text so far, until it is a call."""

    @property
    def done(self) -> bool:
        """The object is complete."""
        return self._reader.done

    @property
    def failed(self) -> bool:
        """The text is no object, or certainly no call."""
        return self._reader.failed

    @property
    def raw(self) -> str:
        """What was read, if it is not a call."""
        return "".join(self._raw)

    def take(self, text: str, at: int) -> int:
        """Read on from `at`; returns where reading stopped."""
        end = self._reader.take(text, at)
        if not self.begun:
            self._raw.append(text[at:end])
        if self._reader.done and not self.begun:
            self._complete()
        return end

    def cut(self) -> None:
        """The text ended within the object: say what can be said of the call."""
        if self._kind == "a" and self._parts:
            self._flush("".join(self._parts))
        elif not self.begun and not self._bare and self._name is not None and self._kind != "n":
            self._start()

    def key(self, key: str) -> None:
        """See `EntryTaker`."""
        self._parts = []
        if key in self._name_keys and self._name is None:
            self._kind = "n"
        elif key in self._argument_keys and not self._any_arguments:
            self._kind, self._any_arguments = "a", True
        else:
            self._kind = ""

    def value(self, text: str) -> None:
        """See `EntryTaker`."""
        if self._kind == "a" and self._streams(text):
            self._pass_on(text)
        elif self._kind:
            self._parts.append(text)

    def _streams(self, text: str) -> bool:
        """Whether the arguments can be passed on at once: they are an object, and the name is
        known."""
        if not self._parts and (self.begun or (text[0] == "{" and self._startable())):
            if not self.begun:
                self._start()
            return True
        return False

    def value_end(self) -> None:
        """See `EntryTaker`."""
        whole, self._parts = "".join(self._parts), []
        kind, self._kind = self._kind, ""
        if kind == "n":
            self._named(whole)
        elif kind == "a" and whole:
            if self._name is None:
                self._held = whole
            else:
                self._flush(whole)

    def _named(self, literal: str) -> None:
        # A name of any other type makes it no call, and so does an absurd one.
        if not literal.startswith('"') or len(literal) > MAX_NAME:
            return
        self._name = decoded(literal)
        if self._held is not None:
            self._flush(self._held)

    def _startable(self) -> bool:
        return bool(self._name) and (self._names is None or self._name in self._names)

    def _start(self) -> None:
        assert self._name is not None
        self.begun, self._raw = True, []
        self._begin(self._name)

    def _flush(self, literal: str) -> None:
        """Arguments that were held back: written after the name, or in a form of their own."""
        self._parts = []
        if not self.begun:
            if not self._startable():
                return
            self._start()
        if literal.startswith('"'):
            literal = decoded(literal)  # JSON in a string, as OpenAI's API has it
        self._pass_on("{}" if literal.strip() in ("null", "") else literal)

    def _complete(self) -> None:
        if not self._bare and not self._any_arguments and self._startable():
            self._start()
            self._pass_on("{}")
