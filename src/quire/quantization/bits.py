"""Numbers of a few bits out of machine words, field by field.

Fields lie one after another from the lowest bit up; where the width does not divide 32, a field may
lie across two words. Nothing is added to packed words: a carry would reach the next field. Knows no
checkpoint format.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

WORD: Final = 32
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ (`utils/packing_utils.py`): nibble i of a word belongs to column AWQ_ORDER[i]."""


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` fields without gaps."""
    return -(-count * bits // WORD)


def fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` fields of each row: int32 `[R, words_for(count, bits)]` to uint8
    `[R, count]`."""
    assert 1 <= bits <= 8 and words.dtype == torch.int32, "fields of 1 to 8 bits in int32"
    period = math.lcm(WORD, bits) // bits
    per_period = period * bits // WORD
    whole = -(-words.shape[1] // per_period)
    out = torch.empty(words.shape[0], whole * period, dtype=torch.uint8)
    for i in range(period):
        at, shift = divmod(i * bits, WORD)
        part = words[:, at::per_period]
        found = (part >> shift) & _mask(min(bits, WORD - shift))
        if shift + bits > WORD:
            rest = shift + bits - WORD
            upper = words[:, at + 1 :: per_period] & _mask(rest)
            found = found[:, : upper.shape[1]] | upper << (bits - rest)
        out[:, i::period][:, : found.shape[1]] = found.to(torch.uint8)
    return out[:, :count]


def awq_fields(words: Tensor) -> Tensor:
    """Four-bit fields in AutoAWQ's order: int32 `[R, W]` to uint8 `[R, 8 W]`."""
    out = torch.empty(words.shape[0], 8 * words.shape[1], dtype=torch.uint8)
    for i, column in enumerate(AWQ_ORDER):
        out[:, column::8] = ((words >> 4 * i) & 15).to(torch.uint8)
    return out


def nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Two four-bit codes of each byte: uint8 `[..., B]` to uint8 `[..., 2 B]`."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) for biased exponents (E8M0) in uint8, exact float32; NaN for 255.

    OCP Microscaling Formats 1.0, section 5.4.1.
    """
    wide = exponents.to(torch.int32)
    values = torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)
    return torch.where(wide == 255, torch.nan, values)


def _mask(bits: int) -> int:
    return (1 << bits) - 1
