"""Slopes of attention with linear biases (Press et al. 2022). Knows no family."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, factor: float = 1.0) -> Tensor:
    """Float32 `[num_heads]`, times `factor`.

    For a power of two the geometric sequence that starts at its own ratio 2**(-8 / n); other
    numbers take those of the power below and then every second one of the power above.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float64).mul_(factor).to(torch.float32)
