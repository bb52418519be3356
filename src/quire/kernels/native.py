"""The compiled operations for CPUs, as one table; those that have none are the plain ones.

Tensors are passed as addresses. Choosing this implementation sets the instruction set. Knows
no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from quire.kernels import (
    native_attention,
    native_decoder,
    native_linear,
    native_sampling,
    reference,
)
from quire.kernels.compiled import REMEDY, choose_isa, lib

OPS: Final[dict[str, Callable[..., Any]]] = {
    **reference.OPS,
    **native_linear.OPS,
    **native_attention.OPS,
    **native_sampling.OPS,
    **native_decoder.OPS,
}


def unavailable() -> str | None:
    """Why these cannot run here, or `None`; chooses the instruction set on the way."""
    if lib is None:
        return REMEDY
    choose_isa()
    return None
