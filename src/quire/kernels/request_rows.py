"""Where a worker keeps its requests in memory, for kernels that compute one token of each.

Such a step needs a few numbers of each request. To look them up where they are takes less time than
to put them into arrays first. Knows no scheduler and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Memory with a row for each request that there is room for, where all layers read the same
    blocks. What stands in it changes; where it is does not while this object is used."""

    tokens: np.ndarray
    """int32 `[rows, positions]`."""
    blocks: np.ndarray
    """int32 `[rows, width]`: block ids, 0 for none."""
    block_size: int
    """Tokens per block."""
    window: int | None
    """How many positions a token sees, itself included; `None`: all before it."""


@dataclass(frozen=True, slots=True, eq=False)
class LastTokens:
    """One token of each of some requests, all others before it computed."""

    requests: RequestRows
    rows: list[int]
    positions: list[int]
    """Of the token in each row."""
