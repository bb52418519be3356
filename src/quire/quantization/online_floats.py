"""Weights rounded to formats of small floats: fp8 (e4m3), MXFP8, MXFP4, NVFP4.

Some rows at a time; what a weight becomes depends on its own block, group, row or layer alone.
Scales of MX formats are powers of two with the exponent floor(log2(max |w|)) less the format's
largest one, and what is then too large becomes the largest number (OCP Microscaling Formats 1.0,
section 6.3). NVFP4 has e4m3 scales for groups of 16, times one float for the layer. Knows no
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight

E4M3_MAX: Final = 448.0
_E4M3_EXPONENT: Final = 8
_E2M1_MAX: Final = 6.0
_E2M1_EXPONENT: Final = 2
MX_GROUP: Final = 32
NVFP4_GROUP: Final = 16
BLOCK: Final = 128
_ELEMENTS: Final = 1 << 19
"""That are float32 at a time."""
_LEAST: Final = 1e-30
"""A scale below it stands for zeros."""


def fp8_per_tensor(weight: Tensor) -> CodedWeight:
    """One scale: max |w| / 448."""
    most = max((float(wide.abs().max()) for _, wide in _some(weight)), default=0.0)
    scale = torch.tensor(most, dtype=torch.float32) / E4M3_MAX
    return _fp8(weight, scale.expand(len(weight), 1).to(weight.device), weight.shape[1])


def fp8_per_channel(weight: Tensor) -> CodedWeight:
    """A scale for each row: max |w| / 448."""
    scales = torch.cat([wide.abs().amax(1, keepdim=True) for _, wide in _some(weight)])
    return _fp8(weight, scales.div_(E4M3_MAX), weight.shape[1])


def fp8_per_block(weight: Tensor) -> CodedWeight:
    """A scale for each block of 128 x 128: max |w| / 448. The last blocks may be smaller."""
    n, k = weight.shape
    rows = []
    for _, wide in _some(weight, BLOCK):
        most = _by_groups(wide.abs(), BLOCK).amax(2)
        for block in most.split(BLOCK):
            rows.append(block.amax(0, keepdim=True).expand(len(block), -1))
    return _fp8(weight, torch.cat(rows).div_(E4M3_MAX), min(BLOCK, k))


def mxfp8(weight: Tensor) -> CodedWeight:
    """Groups of 32."""
    return _fp8(weight, _powers(weight, MX_GROUP, _E4M3_EXPONENT), min(MX_GROUP, weight.shape[1]))


def mxfp4(weight: Tensor) -> CodedWeight:
    """Groups of 32."""
    return _fp4(weight, _powers(weight, MX_GROUP, _E2M1_EXPONENT), min(MX_GROUP, weight.shape[1]))


def nvfp4(weight: Tensor) -> CodedWeight:
    """Groups of 16; the scale of the layer is max |w| / (448 * 6)."""
    group = min(NVFP4_GROUP, weight.shape[1])
    most = torch.cat([_by_groups(wide.abs(), group).amax(2) for _, wide in _some(weight)])
    whole = most.max() / (E4M3_MAX * _E2M1_MAX)
    if float(whole) < _LEAST:
        return _fp4(weight, torch.zeros_like(most), group)
    small = (most / (_E2M1_MAX * whole)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return _fp4(weight, small.to(torch.float32).mul_(whole), group)


def _some(weight: Tensor, multiple: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Some rows as float32, a multiple of some number but for the last."""
    n, k = weight.shape
    step = max(1, _ELEMENTS // max(1, k) // multiple) * multiple
    for first in range(0, n, step):
        rows = slice(first, min(n, first + step))
        yield rows, weight[rows].to(torch.float32)


def _by_groups(wide: Tensor, group: int) -> Tensor:
    """`[N, K]` as `[N, G, group]`, filled up with zeros."""
    return torch.nn.functional.pad(wide, (0, -wide.shape[1] % group)).unflatten(1, (-1, group))


def _powers(weight: Tensor, group: int, largest: int) -> Tensor:
    group = min(group, weight.shape[1])
    found = []
    for _, wide in _some(weight):
        most = _by_groups(wide.abs(), group).amax(2)
        if not bool(most.isfinite().all()):  # these have a power and a code of their own
            row, of = most.isfinite().logical_not().nonzero()[0].tolist()
            raise ModelLoadError(f"weights must be finite, got {most[row, of]} in group {of}")
        # frexp is exact: most = mantissa * 2**exponent, the mantissa from a half to less than 1
        exponents = torch.frexp(most).exponent - 1 - largest
        powers = torch.ldexp(torch.ones_like(most), exponents.clamp_(-126, 127))
        found.append(powers.masked_fill_(most == 0, 0.0))
    return torch.cat(found)


def _divided(wide: Tensor, scales: Tensor, group: int) -> Tensor:
    """`w / scale`; 0 where the scale stands for zeros."""
    safe = scales.masked_fill(scales < _LEAST, torch.inf)
    return wide / safe.repeat_interleave(group, 1)[:, : wide.shape[1]]


def _fp8(weight: Tensor, scales: Tensor, group: int) -> CodedWeight:
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = scales.masked_fill(scales < _LEAST, 0.0).contiguous()
    for rows, wide in _some(weight):
        given = _divided(wide, scales[rows], group).clamp_(-E4M3_MAX, E4M3_MAX)
        codes[rows] = given.to(torch.float8_e4m3fn)
    return CodedWeight("e4m3", codes, scales, None, group, "float")


def _fp4(weight: Tensor, scales: Tensor, group: int) -> CodedWeight:
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows, wide in _some(weight):
        codes[rows] = nearest_e2m1(_divided(wide, scales[rows], group))
    return CodedWeight("e2m1", codes, scales, None, group, "float")


def nearest_e2m1(values: Tensor) -> Tensor:
    """Codes (uint8) of the nearest numbers of e2m1; halfway to the code that is even; what is too
    large becomes 6.

    Codes count steps of a half up to 2, of 1 up to 4 and of 2 up to 6, and the steps of each part
    are those to its nearest whole one, which is the even one from halfway.
    """
    size = values.abs()
    code = (size * 2).round_().clamp_(max=4)
    code += size.round().clamp_(2, 4)
    code += size.div_(2).round_().clamp_(2, 3)
    code -= 4
    return code.to(torch.uint8).add_(values < 0, alpha=8)
