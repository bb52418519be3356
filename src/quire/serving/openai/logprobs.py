"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.outputs import PositionLogprobs
from quire.serving.large_json import (
    Splices,
    encode,
    slices,
    spliced_entries,
)
from quire.serving.token_texts import FLOOR, TokenTexts, finite, likeliest


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    top: int,
    texts: TokenTexts,
    splices: Splices,
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. `top` < 0 lists every candidate given."""
    return {
        "content": spliced_entries(token_ids, positions, top, texts, splices),
        "refusal": None,
    }


class TextLogprobs:
    """The `logprobs` object of a text completion, built piece by piece.

    `token_logprobs[i]` and the matching value in `top_logprobs[i]` come from the same number, so
    that comparing them for equality tells whether a token was the likeliest.

    Args:
        texts: How tokens are spelled.
        most: How many of the likeliest tokens are shown, where more were scored. -1: all.
        offset: Characters of the choice's text before the first token.
    """

    def __init__(self, texts: TokenTexts, most: int = -1, offset: int = 0) -> None:
        self._texts = texts
        self._most = most
        self._offset = offset

    def follow(self, before: TextLogprobs) -> None:
        """Go on where another object ended."""
        self._offset = before._offset

    def items(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, list[bytes]]:
        """The same as `piece`, as JSON of the items of each array."""
        parts = [
            {key: encode(values)[1:-1] for key, values in self.piece(ids, some).items()}
            for at in slices(positions)
            for ids, some in ((token_ids[at], positions[at]),)
        ]
        return {
            key: [piece for part in parts for piece in (b",", part[key]) if part[key]][1:]
            for key in (parts[0] if parts else self.piece([], []))
        }

    def piece(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Add the next tokens. `text_offset` continues where the last piece ended."""
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, position in zip(token_ids, positions, strict=True):
            own = position[token_id] if position else None
            text = self._texts.spell(token_id, own)
            result["tokens"].append(text)
            result["text_offset"].append(self._offset)
            result["token_logprobs"].append(finite(own.logprob) if own else None)
            result["top_logprobs"].append(self._top(position) if position else None)
            self._offset += len(text)
        return result

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Candidates by text. Several ids may share a text (parts of a character); the likeliest
        counts."""
        top: dict[str, float] = {}
        for token_id, logprob in likeliest(position, self._most).items():
            text = self._texts.spell(token_id, logprob)
            top[text] = max(finite(logprob.logprob), top.get(text, FLOOR))
        return top
