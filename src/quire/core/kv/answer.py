"""What the KV cache answers to the question why a prompt finds its prefix, or does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixAnswer:
    """How far the prefix cache follows a prompt, and where and why it stops."""

    num_tokens: int
    num_cached_tokens: int
    """Tokens that need not be computed; at most `num_tokens - 1`."""
    block_index: int
    """Index of the first block that is not found whole."""
    first_difference: int | None
    """Position of the first token of that block that differs from the nearest cached content. None
    if no cached block begins like it, or if nothing differs as far as the cached one goes."""
    cached_token_id: int | None
    given_token_id: int | None
