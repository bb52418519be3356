"""A place where a checkpoint tensor goes. Knows neither files nor names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor a layer waits for."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    load: Callable[[Tensor], None]
    """Takes the whole tensor, in the model's type and on its device, and keeps a copy."""
    parts: tuple[int, ...] = ()
    """Rows of each part, if checkpoints keep it in parts that are stacked."""
    dtype: torch.dtype | None = None
    """Type to load it in, if not the model's."""
    stored: frozenset[str] | None = None
    """Types that it takes, as the checkpoint's format names them (`I8`); `None`: floats."""
    load_parts: Callable[[Sequence[Tensor], torch.dtype], None] | None = None
    """If there: instead of `load`, takes the checkpoint's tensors as they are, of any float type,
    and rounds them to the type given. Spares a copy of large weights."""


Parameters = dict[str, Parameter]
"""Parameters by name."""


def prefixed(prefix: str, parameters: Parameters) -> Parameters:
    """The same parameters under `prefix.name`."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}
