"""JSON of megabytes, made in slices: to encode it in one go would stop every other stream.

The encoder holds the interpreter from beginning to end, on whichever thread it runs. So large
values are encoded a slice at a time and stay pieces of bytes until they are sent. Knows no reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from quire.outputs import PositionLogprobs
from quire.serving.prompts import off_loop
from quire.serving.token_texts import TokenTexts, prompt_logprobs, token_entries
from quire.serving.turns import num_candidates

encode = msgspec.json.encode

SLICE: Final = 2048
"""Log-probabilities that are encoded in one go: some milliseconds."""
CHARACTERS: Final = 8
"""Making the JSON of a log-probability takes as long as tokenising so many characters."""
ONE_GO: Final = 256 * 1024
"""Bytes that may be copied or sent in one go."""


def slices(positions: Sequence[PositionLogprobs | None]) -> Iterator[slice]:
    """The parts of a list that are encoded in one go."""
    width = len(positions[-1] or ()) if positions else 0
    step = max(1, SLICE // max(1, width))
    for start in range(0, len(positions), step):
        yield slice(start, start + step)


def items(made: Iterable[list[Any]]) -> list[bytes]:
    """JSON of the items of an array, which comes in parts; with commas, without brackets."""
    pieces: list[bytes] = []
    for part in made:
        if part:
            pieces += [b",", encode(part)[1:-1]] if pieces else [encode(part)[1:-1]]
    return pieces


def joined(*lists: list[bytes]) -> list[bytes]:
    """An array of the items in all lists, as pieces."""
    pieces = [b"["]
    for some in lists:
        if some and len(pieces) > 1:
            pieces.append(b",")
        pieces += some
    return [*pieces, b"]"]


class Splices:
    """Large values that stand for themselves in the JSON of what is around them.

    `raw` gives what is put into an object in place of the value. `fill` takes the object's JSON and
    puts the values in: no byte of them is copied.
    """

    def __init__(self) -> None:
        self._values: list[list[bytes]] = []

    def raw(self, pieces: list[bytes]) -> msgspec.Raw:
        """The mark of a value. Encoded JSON has no NUL."""
        self._values.append(pieces)
        return msgspec.Raw(b"\0%d\0" % (len(self._values) - 1))

    def fill(self, text: bytes) -> list[bytes]:
        """JSON with all values in it, as pieces. It is the end of their marks."""
        if not self._values:
            return [text]
        pieces: list[bytes] = []
        for number, part in enumerate(text.split(b"\0")):
            pieces += self._values[int(part)] if number % 2 else [part]
        self._values = []
        return pieces


async def glued(pieces: list[bytes]) -> bytes:
    """All pieces as one, on a thread if they are large: `join` lets others run meanwhile."""
    size = sum(map(len, pieces))
    return await off_loop(0 if size <= ONE_GO else size, lambda: b"".join(pieces))


async def made(size: int, work: Callable[[], Any]) -> Any:
    """What work with so many log-probabilities gives, on a thread if they are many."""
    return await off_loop(CHARACTERS * size, work)


def sendable(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of at most `ONE_GO`, small neighbours together."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > ONE_GO and waiting:
            yield b"".join(waiting)
            waiting, size = [], 0
        for start in range(0, len(piece) - ONE_GO, ONE_GO):
            yield piece[start : start + ONE_GO]
        rest = len(piece) % ONE_GO or min(len(piece), ONE_GO)
        waiting.append(piece[len(piece) - rest :] if rest < len(piece) else piece)
        size += rest
    if waiting:
        yield b"".join(waiting)


def spliced_entries(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    top: int,
    texts: TokenTexts,
    splices: Splices,
) -> Any:
    """`token_entries`, or, if they are many, what stands for their JSON."""
    if num_candidates(positions) <= SLICE:
        return token_entries(token_ids, positions, top, texts)
    parts = (token_entries(token_ids[at], positions[at], top, texts) for at in slices(positions))
    return splices.raw(joined(items(parts)))


def spliced_scores(positions: Sequence[PositionLogprobs | None], most: int = -1) -> list[bytes]:
    """JSON of vLLM's `prompt_logprobs`, in pieces, with the `most` likeliest of each position. -1:
    all that were scored."""
    return joined(items(prompt_logprobs(positions[at], most) for at in slices(positions)))
