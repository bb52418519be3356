"""Activations by the names that configurations use. Knows no family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.dispatch import Ops
from quire.spelling import did_you_mean

PLAIN: Final = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Name in a configuration to operation."""
GATED: Final = {name: op for name, op in PLAIN.items() if op not in ("relu", "tanh")}
"""Likewise, for MLPs with a gate: an activation of `ops.gated_linear`."""


def activation(ops: Ops, name: str, gated: bool) -> Callable[[Tensor], Tensor]:
    """The operation; a gated one takes gate and up side by side.

    Raises:
        ModelLoadError: there is no activation of that name.
    """
    op = f"{gate(name)}_and_mul" if gated else _named(name, PLAIN)
    return lambda x: getattr(ops, op)(x)


def gate(name: str) -> str:
    """What `ops.gated_linear` calls the activation of a gate.

    Raises:
        ModelLoadError: gates have no activation of that name.
    """
    return _named(name, GATED)


def _named(name: str, table: dict[str, str]) -> str:
    if str(name) not in table:  # a configuration may have anything in its place
        hint = did_you_mean(str(name), table)
        raise ModelLoadError(
            f"hidden_act must be one of {', '.join(table)}, got {name!r:.60}{hint}"
        )
    return table[name]
