"""Where seeds come from: one base for a request, from it one for each prompt and each choice.

A request that is repeated with the reported base gets the same tokens for every prompt and choice.
Drawn seeds have 53 bits, because JSON numbers are doubles in many programs and would round more.
"""

from __future__ import annotations

import hashlib
from typing import Final

from quire.params import MAX_SEED

MAX_DRAWN: Final = 2**53 - 1
"""Largest seed that is drawn here; callers may give larger ones."""


def draw_seed(configured: int, number: int, entropy: bytes) -> int:
    """A seed for a request without one: from the configured seed, this process's entropy and the
    order of admission."""
    return _digest(b"%d:%d:" % (configured, number) + entropy, b"quire-seed")


def prompt_seed(base: int, index: int) -> int:
    """The seed of prompt `index` of one call: the base itself for the first.

    Hashed rather than counted up, so that calls with seeds 7 and 8 have no prompt in common.
    """
    return base if index == 0 else _digest(b"%d:%d" % (base, index), b"quire-prompt")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of one prompt: counted up, which callers of `n` rely on. It has 63
    bits: after the largest comes 0, and a negative base counts as that plus 2**63."""
    return (seed + index) & MAX_SEED


def _digest(material: bytes, person: bytes) -> int:
    digest = hashlib.blake2b(material, digest_size=8, person=person).digest()
    return int.from_bytes(digest, "big") & MAX_DRAWN
