"""How tokens and their log-probabilities are written in replies. Knows no format of a reply."""

from __future__ import annotations

from typing import Final

from quire.outputs import Logprob
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
