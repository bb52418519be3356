"""Streams whose right answer is known: tokens that are a function of prompt, seed and position, and
callers that check what they got against it.

What a caller must get is computed here from the request alone; nothing here knows of cores, deaths
or replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from quire.config import ModelConfig
from quire.engine.frontend.stream import RequestStream
from quire.errors import QuireError
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

TEXT = " one two three four five six seven eight nine ten"
TOKENIZER = Tokenizer.from_folder(ModelConfig().tokenizer_folder, None)
VOCABULARY = TOKENIZER.encode(TEXT, add_special_tokens=False)


def token(prompt: Sequence[int], seed: int | None, position: int) -> int:
    """What a model of these tests generates."""
    return VOCABULARY[crc32(repr((list(prompt), seed, position)).encode()) % len(VOCABULARY)]


def reference(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of one completion."""
    tokens: list[int] = []
    for position in range(params.max_tokens or 0):
        tokens.append(token(prompt, seed, position))
        text = TOKENIZER.decode(tokens)
        for stop in params.stop or []:
            if stop in text:
                return tokens, text[: text.index(stop)], "stop"
    return tokens, TOKENIZER.decode(tokens), "length"


@dataclass
class Caller:
    """One request, and what its caller got."""

    name: str
    prompt: list[int]
    params: SamplingParams
    stream: RequestStream
    got: list[RequestOutput] = field(default_factory=list)
    error: QuireError | None = None
    aborted: bool = False

    @property
    def is_done(self) -> bool:
        return self.error is not None or bool(self.got and self.got[-1].finished)

    async def read(self) -> None:
        """Take the next output, if there is one."""
        if self.stream.unread():
            try:
                self.got.append(await anext(self.stream))
            except QuireError as error:
                self.error = error

    def sent(self) -> dict[int, list[int]]:
        """Tokens that are on their way or have arrived, by completion."""
        parts: dict[int, list[int]] = {i: [] for i in range(self.params.n)}
        waiting = [o for o in self.stream.unread() if isinstance(o, RequestOutput)]
        for output in [*self.got, *waiting]:
            for piece in output.outputs:
                parts[piece.index] += piece.token_ids
        return parts

    def pieces(self, index: int) -> list[CompletionOutput]:
        """What arrived of one completion."""
        return [p for o in self.got for p in o.outputs if p.index == index]

    def blamed(self) -> list[int]:
        """Completions that ended with an error."""
        pieces = {i: self.pieces(i) for i in range(self.params.n)}
        return [i for i, told in pieces.items() if told and told[-1].finish_reason == "error"]

    def check(self, may_be_blamed: bool = False) -> None:
        """Exactly what the reference says; if it was aborted, or blamed, the beginning of that.

        Args:
            may_be_blamed: Completions may have ended with an error of their own.

        Raises:
            AssertionError: anything else.
        """
        assert self.error is None, f"{self.name} is lost: {self.error}"
        assert self.got and self.got[-1].finished, f"{self.name} has no end"
        for index, tokens in self.sent().items():
            expected = reference(self.prompt, self.params, self.stream.seed + index)
            pieces, where = self.pieces(index), f"{self.name}[{index}]"
            reason, text = pieces[-1].finish_reason, "".join(p.text for p in pieces)
            if reason == "error" and may_be_blamed:
                assert tokens == expected[0][: len(tokens)], where
            elif reason == "abort":
                assert self.aborted, f"{where} was aborted by nobody"
                assert tokens == expected[0][: len(tokens)], where
            else:
                assert (tokens, text, reason) == expected, f"{where}: expected {expected}"
