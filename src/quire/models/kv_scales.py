"""Scales and zero points that a checkpoint has for the keys and values of a layer, as parameters.

They count where keys and values are kept as 8-bit floats. A layer has one for keys and one for
values here: where a checkpoint has one for each head, the largest, with which no head is cut.
Zero points must be 0, as those of symmetric scales are. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.parameter import Parameter, Parameters
from quire.weights.kv_scales import BOTH, ZEROS

_OF_ZEROS: Final = frozenset({"I8", "I32", "I64", "F8_E4M3", "F32", "F16", "BF16"})
"""Types of zero points: that of the codes, or a wider one."""


def kv_scale_parameters(kv_heads: int, take: Callable[[int, float], None]) -> Parameters:
    """`k_scale`, `v_scale`, `k_zero_point` and `v_zero_point`, which a checkpoint may lack.

    `take(i, scale)` gets that of keys (i = 0) and of values (1). A scale below 0 stands for none.

    Raises:
        ModelLoadError: in `load`, for a scale that is 0 or no finite number, or a zero point that
            is not 0.
    """
    shapes = ((), (1,), (1, 1), (kv_heads,), (kv_heads, 1), (kv_heads, 1, 1),
              (1, kv_heads))  # fmt: skip
    found = {
        name: Parameter((0,), partial(_load, i, take), dtype=torch.float32, optional=shapes)
        for i, name in enumerate(BOTH)
    }
    for name in ZEROS:
        found[name] = Parameter(
            (0,), _check_zeros, dtype=torch.float32, stored=_OF_ZEROS, optional=shapes
        )
    return found


def _load(i: int, take: Callable[[int, float], None], scales: Tensor) -> None:
    if not scales.numel():  # --load-format dummy
        return
    largest = float(scales.max())
    if not bool(scales.isfinite().all()) or largest == 0:
        raise ModelLoadError(
            f"scales of the KV cache must be finite numbers above 0 (or -1: none), got "
            f"{scales.flatten().tolist()!r:.80}"
        )
    take(i, largest if largest > 0 else 1.0)


def _check_zeros(zeros: Tensor) -> None:
    if bool((zeros != 0).any()):  # NaN is not 0 either
        raise ModelLoadError(
            "zero points of the KV cache must be 0: quire keeps keys and values with symmetric "
            f"scales, got {zeros.flatten().tolist()!r:.80}"
        )
