"""The compiled operations for CPUs, as one implementation.

Tensors are passed as addresses. Choosing this implementation sets the instruction set. Knows
no model.
"""

from __future__ import annotations

from typing import Final

from quire.kernels import (
    native_attention,
    native_decoder,
    native_experts,
    native_linear,
    native_sampling,
)
from quire.kernels.compiled import REMEDY, build, choose_isa, lib
from quire.kernels.dispatch import Implementation


def unavailable() -> str | None:
    """Why these cannot run here, or `None`; chooses the instruction set on the way."""
    if lib is None:
        return REMEDY
    choose_isa()
    return None


IMPLEMENTATION: Final = Implementation(
    {
        **native_linear.OPS,
        **native_attention.OPS,
        **native_sampling.OPS,
        **native_decoder.OPS,
    },
    device="cpu",
    unavailable=unavailable,
    build=lambda: f"{lib.isa()} {build()}",
    combined={"grouped_experts": native_experts.grouped_experts},
)
"""The row of `dispatch.IMPLEMENTATIONS`."""
