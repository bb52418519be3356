"""What the KV cache answers when it is asked why a prompt finds its prefix, or does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixAnswer:
    """How far the prefix cache follows a prompt, and where and why it stops."""

    num_tokens: int
    num_cached_tokens: int
    """Tokens that need not be computed; at most `num_tokens - 1`."""
    block_index: int
    """The first block that is not found whole."""
    first_difference: int | None
    """Position of the first token that differs from the nearest cached content in that block;
    None if nothing cached begins alike there, or nothing differs as far as it goes."""
    cached_token_id: int | None
    given_token_id: int | None
