"""Parsers for a made-up syntax, and a text that has all of it."""

from __future__ import annotations

from typing import Any

from quire.serving.parsing import OutputParser


class ToyTools(OutputParser):
    """`text [[name|{"json": "arguments"}]] text`"""

    needs_tools = True
    held, until = "", "[["

    def feed(self, text: str) -> None:
        self.held += text
        while self.until in self.held:
            before, _, self.held = self.held.partition(self.until)
            if self.until == "[[":
                self.out.text(before)
                self.until = "|"
            elif self.until == "|":
                self.out.begin_call(before)
                self.until = "]]"
            else:
                self.out.arguments(before)
                self.out.end_call()
                self.until = "[["
        if self.until != "|":  # half a mark waits for the other half
            cut = len(self.held) - self.held.endswith(self.until[0])
            (self.out.text if self.until == "[[" else self.out.arguments)(self.held[:cut])
            self.held = self.held[cut:]

    def finish(self) -> None:
        if self.until == "]]":
            self.out.arguments(self.held)
        else:
            self.out.text(self.held if self.until == "[[" else "[[" + self.held)


class ToyThoughts(OutputParser):
    """`(thought) answer`: what stands in the first round brackets, if the text begins with them."""

    thinking: bool | None = None

    def feed(self, text: str) -> None:
        if self.thinking is None:
            self.thinking = text.startswith("(")
            text = text[1:] if self.thinking else text
        if self.thinking and ")" in text:
            thought, _, text = text.partition(")")
            self.out.reasoning(thought)
            self.thinking = False
        (self.out.reasoning if self.thinking else self.out.text)(text)


class Clumsy(OutputParser):
    """Fails where the text says so, and forgets nothing else."""

    def feed(self, text: str) -> None:
        if "§" in text:
            raise RuntimeError("a secret of the parser")
        self.out.text(text)


TABLE: dict[str, str | type[OutputParser]] = {
    "toy": ToyTools,
    "thoughts": ToyThoughts,
    "clumsy": Clumsy,
}
USER = {"role": "user", "content": "hi"}
TEXT = '(Größe?) So [x] it is. [[map|{"city": "Köln [0]"}]] and [[now|]][[map|{"a": [1]}]] [[half'
PARTS: list[Any] = [
    ("reasoning", "Größe?"),
    ("text", " So [x] it is. "),
    ("map", '{"city": "Köln [0]"}'),
    ("text", " and "),
    ("now", ""),
    ("map", '{"a": [1]}'),
    ("text", " [[half"),
]
