"""How many requests a KV cache holds: the usual formula, with its buffer.

`maximum = KV tokens / mean tokens per request`, and of that 70 % are recommended: the rest is for
requests that are longer than the mean, and for prefixes that stay cached. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BUFFER: Final = 0.30
"""Share of the KV cache that the recommended concurrency leaves free."""


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What fits into a KV cache."""

    kv_tokens: int
    tokens_per_request: int

    @property
    def maximum(self) -> int:
        """Requests of this length at once, with no room left."""
        return self.kv_tokens // self.tokens_per_request

    @property
    def recommended(self) -> int:
        """Those with which the buffer stays free."""
        return int(self.kv_tokens * (1 - BUFFER) // self.tokens_per_request)

    def formula(self) -> str:
        """How the two follow from the sizes, for people."""
        return (
            f"maximum = {self.kv_tokens:,} KV tokens / {self.tokens_per_request:,} tokens per "
            f"request = {self.maximum}; recommended = maximum x (1 - {BUFFER:.0%} buffer) = "
            f"{self.recommended}"
        )

    def tokens_needed(self, requests: int) -> int:
        """KV tokens with which so many requests are recommended."""
        return -int(-requests * self.tokens_per_request // (1 - BUFFER))
