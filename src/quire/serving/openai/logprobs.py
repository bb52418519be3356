"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.outputs import PositionLogprobs
from quire.serving.token_texts import FLOOR, TokenTexts, finite, token_entries


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], top: int, texts: TokenTexts
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. `top` < 0 lists every candidate given."""
    return {"content": token_entries(token_ids, positions, top, texts), "refusal": None}


class TextLogprobs:
    """The `logprobs` object of a text completion, built piece by piece.

    `token_logprobs[i]` and the matching value in `top_logprobs[i]` come from the same number, so
    that comparing them for equality tells whether a token was the likeliest.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0
        self._last: dict[str, list[Any]] = {}

    def follow(self, before: TextLogprobs) -> dict[str, list[Any]]:
        """Use the last piece of another object as the first of this one."""
        self._offset = before._offset
        return before._last

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
        self._last = result
        return result

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Candidates by text. Several ids may share a text (parts of a character); the likeliest
        counts."""
        top: dict[str, float] = {}
        for token_id, logprob in position.items():
            text = self._texts.spell(token_id, logprob)
            top[text] = max(finite(logprob.logprob), top.get(text, FLOOR))
        return top


def join(pieces: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Successive pieces as one object."""
    return {key: [value for piece in pieces for value in piece[key]] for key in pieces[0]}
