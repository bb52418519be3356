"""Blocks of GGUF's quantised types as codes, scales and minima, without making floats of them.

weight = value(code) * scale - minimum, in float32: what ggml computes, bit for bit
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `ggml-quants.c`). A row of a table
for each type. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Codes = NDArray[Any]
IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What a code of IQ4_NL and IQ4_XS is worth."""
E2M1_VALUES: Final = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""What a code of MXFP4 is worth."""


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """B blocks of one type."""

    codes: Codes
    """`[B, values of a block]`: int8, or uint8 from 0 to 15."""
    scales: Floats
    """`[B, groups of a block]`."""
    minima: Floats | None = None
    """The same."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How the blocks of a type are read."""

    decode: Callable[[Bytes], CodedBlocks]
    """From `[B, bytes]`."""
    group: int
    """Values that have one scale."""
    zero: int = 0
    """Taken from each code."""
    values: tuple[float, ...] = ()
    """What codes are worth; empty: the numbers they are."""

    def floats(self, blocks: Bytes) -> Floats:
        """`[B, values of a block]`."""
        coded = self.decode(blocks)
        numbers = coded.codes.astype(np.float32) - np.float32(self.zero)
        if self.values:
            numbers = np.array(self.values, np.float32)[coded.codes]
        found: Floats = numbers * np.repeat(coded.scales, self.group, 1)
        if coded.minima is not None:
            found -= np.repeat(coded.minima, self.group, 1)
        return found


def _half(blocks: Bytes, at: int) -> Floats:
    """A float16 of each block as `[B, 1]`."""
    halves: Floats = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Of every `run` bytes all low halves, then all high ones: `[B, n]` to `[B, 2 n]`."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(packed), -1)


def _bits(packed: Bytes, width: int, run: int) -> Bytes:
    """Of every `run` bytes all lowest `width` bits, then all next ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (runs >> shifts & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def _fifth(packed: Bytes) -> Bytes:
    """4 bytes of each block as 32 bits, worth 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(b: Bytes) -> CodedBlocks:
    return CodedBlocks(_nibbles(b[:, 2:], 16), _half(b, 0))


def _q4_1(b: Bytes) -> CodedBlocks:
    return CodedBlocks(_nibbles(b[:, 4:], 16), _half(b, 0), -_half(b, 2))


def _q5_0(b: Bytes) -> CodedBlocks:
    codes = _nibbles(b[:, 6:], 16) | _fifth(b[:, 2:6])
    return CodedBlocks(codes.astype(np.int8) - np.int8(16), _half(b, 0))


def _q5_1(b: Bytes) -> CodedBlocks:
    codes = _nibbles(b[:, 8:], 16) | _fifth(b[:, 4:8])
    return CodedBlocks(codes.astype(np.int8), _half(b, 0), -_half(b, 2))


def _q8_0(b: Bytes) -> CodedBlocks:
    return CodedBlocks(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0))


def _iq4_nl(b: Bytes) -> CodedBlocks:
    return CodedBlocks(_nibbles(b[:, 2:], 16), _half(b, 0))


def _mxfp4(b: Bytes) -> CodedBlocks:
    exponents = b[:, :1].astype(np.int32) - 127
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    return CodedBlocks(_nibbles(b[:, 1:], 16), scales)


def _q2_k(b: Bytes) -> CodedBlocks:
    packed = b[:, :16]
    scales = _half(b, 80) * (packed & 15).astype(np.float32)
    minima = _half(b, 82) * (packed >> 4).astype(np.float32)
    return CodedBlocks(_bits(b[:, 16:80], 2, 32), scales, minima)


def _q3_k(b: Bytes) -> CodedBlocks:
    codes = _bits(b[:, 32:96], 2, 32) | _bits(b[:, :32], 1, 32) << 2
    low = _nibbles(b[:, 96:104], 8)
    scales = (low | _bits(b[:, 104:108], 2, 4) << 4).astype(np.int8) - np.int8(32)
    return CodedBlocks(codes, _half(b, 108) * scales.astype(np.float32))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes of each block: eight scales and eight minima of six bits, `[B, 8]` each.

    The first four of each are the low six bits of bytes 0-3 and 4-7; the others have their low
    four bits in bytes 8-11 and their high two in the top bits of bytes 0-7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (low & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (low >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(b: Bytes) -> CodedBlocks:
    scales, minima = _k_scales(b[:, 4:16])
    return CodedBlocks(_nibbles(b[:, 16:], 32), _half(b, 0) * scales, _half(b, 2) * minima)


def _q5_k(b: Bytes) -> CodedBlocks:
    scales, minima = _k_scales(b[:, 4:16])
    codes = _nibbles(b[:, 48:], 32) | _bits(b[:, 16:48], 1, 32) << 4
    coded = codes.astype(np.int8)
    return CodedBlocks(coded, _half(b, 0) * scales, _half(b, 2) * minima)


def _q6_k(b: Bytes) -> CodedBlocks:
    codes = _nibbles(b[:, :128], 64) | _bits(b[:, 128:192], 2, 32) << 4
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return CodedBlocks(codes.astype(np.int8) - np.int8(32), scales * _half(b, 208))


def _iq4_xs(b: Bytes) -> CodedBlocks:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(len(b), 8)
    scales = (low | (high & 3).astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return CodedBlocks(_nibbles(b[:, 8:], 16), _half(b, 0) * scales.astype(np.float32))


BLOCK_TYPES: Final[dict[str, BlockType]] = {
    "Q4_0": BlockType(_q4_0, 32, zero=8),
    "Q4_1": BlockType(_q4_1, 32),
    "Q5_0": BlockType(_q5_0, 32),
    "Q5_1": BlockType(_q5_1, 32),
    "Q8_0": BlockType(_q8_0, 32),
    "Q2_K": BlockType(_q2_k, 16),
    "Q3_K": BlockType(_q3_k, 16, zero=4),
    "Q4_K": BlockType(_q4_k, 32),
    "Q5_K": BlockType(_q5_k, 32),
    "Q6_K": BlockType(_q6_k, 16),
    "IQ4_NL": BlockType(_iq4_nl, 32, values=IQ4_VALUES),
    "IQ4_XS": BlockType(_iq4_xs, 32, values=IQ4_VALUES),
    "MXFP4": BlockType(_mxfp4, 32, values=E2M1_VALUES),
}
"""Quantised types that are read, each with its layout."""
