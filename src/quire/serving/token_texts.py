"""How tokens and their log-probabilities are written in replies. Knows no format of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quire.outputs import Logprob, PositionLogprobs
from quire.serving.engine_protocol import TokenizerLike

FLOOR: Final = -9999.0
"""Stands for an impossible token, as in vLLM: JSON has no infinity."""


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    return value if value > FLOOR else FLOOR


class TokenTexts:
    """How tokens are spelled in a reply: their text, or `token_id:N`."""

    def __init__(self, tokenizer: TokenizerLike, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def spell(self, token_id: int, logprob: Logprob | None = None) -> str:
        """One token."""
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.id_to_text(token_id)


def token_entries(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], top: int, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Tokens as chat and responses write them: each with its likeliest candidates. `top` < 0 lists
    every candidate given."""
    entries = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        ranked = ranked if top < 0 else ranked[:top]
        entry = _entry(token_id, position[token_id], texts)
        entry["top_logprobs"] = [_entry(i, logprob, texts) for i, logprob in ranked]
        entries.append(entry)
    return entries


def likeliest(position: PositionLogprobs, most: int) -> PositionLogprobs:
    """The position's own token and the `most` likeliest, where more were scored. -1: all."""
    if most < 0 or len(position) <= most:
        return position
    own = next(iter(position))
    return {
        token_id: logprob
        for token_id, logprob in position.items()
        if token_id == own or (logprob.rank is not None and logprob.rank <= most)
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], most: int = -1) -> list[Any]:
    """vLLM's `prompt_logprobs`: per position null, or an object by token id, with the `most`
    likeliest. -1: all that were scored."""
    return [
        position
        and {
            str(token_id): {
                "logprob": finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in likeliest(position, most).items()
        }
        for position in positions
    ]


def _entry(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, Any]:
    text = texts.spell(token_id, logprob)
    return {
        "token": text,
        "logprob": finite(logprob.logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }
