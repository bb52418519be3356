"""Numbers of a few bits out of machine words, field by field.

Fields lie one after another from the lowest bit up; where the width does not divide 32, a field may
lie across two words. Words are little-endian, as checkpoints' and processors' are here. Nothing is
added to packed words: a carry would reach the next field. Knows no checkpoint format.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[:, :count]
    if bits == 4:
        return nibbles(raw)[:, :count]
    # Eight fields are `bits` bytes, and eight bytes of the result: one number of 64 bits.
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % bits))
    groups = padded.unflatten(1, (-1, bits)).unbind(2)
    packed = groups[0].to(torch.int64)
    for i, byte in enumerate(groups[1:], 1):
        packed |= byte.to(torch.int64) << 8 * i
    return _spread(packed, bits, range(8))[:, :count]


def awq_fields(words: Tensor) -> Tensor:
    """Four-bit fields in AutoAWQ's order: int32 `[R, W]` to uint8 `[R, 8 W]`."""
    places = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return _spread(words.to(torch.int64), 4, places)


def nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Two four-bit codes of each byte: uint8 `[..., B]` to uint8 `[..., 2 B]`."""
    wide = packed.to(torch.int16)
    both = wide >> 4 | (wide & 15) << 8 if high_first else (wide | wide << 4) & 0x0F0F
    return both.view(torch.uint8)


def _spread(packed: Tensor, bits: int, places: Iterable[int]) -> Tensor:
    """Eight fields of each number `[R, W]` as bytes `[R, 8 W]`, in the order of their places."""
    found = torch.zeros_like(packed)
    mask = (1 << bits) - 1
    for i, place in enumerate(places):
        found |= (packed >> bits * place & mask) << 8 * i
    return found.view(torch.uint8)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) for biased exponents (E8M0) in uint8, exact float32; NaN for 255.

    OCP Microscaling Formats 1.0, section 5.4.1.
    """
    wide = exponents.to(torch.int32)
    values = torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)
    return torch.where(wide == 255, torch.nan, values)
