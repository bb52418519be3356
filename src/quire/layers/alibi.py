"""Slopes of attention with linear biases (Press et al. 2022). Knows no family."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.utils.math import align_up


def alibi_slopes(num_heads: int, factor: float = 1.0, bias_max: float = 8.0) -> Tensor:
    """Float32 `[num_heads]`, times `factor`.

    For a power of two the geometric sequence from 2**(-bias_max / n), its own ratio, down to
    2**-bias_max; other numbers take those of the power below and then every second one of the
    power above.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-bias_max * i / below) for i in range(1, below + 1)]
    odd = range(1, 2 * (num_heads - below), 2)
    slopes += [2.0 ** (-bias_max * i / (2 * below)) for i in odd]
    return torch.tensor(slopes, dtype=torch.float64).mul_(factor).to(torch.float32)


class RoundedBiases:
    """Biases by a key's position as further dimensions of keys, each a bfloat16 number.

    Falcon multiplies slope and position in bfloat16, which rounds both and the result. Every
    query head of a group has a dimension of the shared key; its query is 1 there and 0 in those of
    the others.
    """

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        group = num_heads // num_kv_heads
        self.width = align_up(group, 2)  # kernels multiply bfloat16 numbers in pairs
        """Dimensions that keys and queries have in addition."""
        slopes = alibi_slopes(num_heads).to(torch.bfloat16)
        self._slopes = torch.zeros(num_kv_heads, self.width, dtype=torch.bfloat16)
        self._slopes[:, :group] = slopes.view(num_kv_heads, group)
        self._ones = torch.eye(self.width)[:group].repeat(num_kv_heads, 1)

    def queries(self, q: Tensor) -> Tensor:
        """`[T, H, D]` to `[T, H, D + width]`."""
        ones = self._ones.to(q.device, q.dtype)
        return torch.cat((q, ones.expand(len(q), -1, -1)), -1)

    def keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """`[T, KVH, D]` at `positions [T]` to `[T, KVH, D + width]`."""
        biases = self._slopes.to(k.device) * positions.to(torch.bfloat16).view(-1, 1, 1)
        return torch.cat((k, biases.to(k.dtype)), -1)
