"""The tree of a loaded model as text: modules, shapes, numbers, kernels.

Printed at load with `QUIRE_LOG_MODEL_INSPECTION=1`. Works from the parameters that a model waits
for, so it knows no family; layers that look alike are shown once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from quire.kernels.dispatch import ops

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Shapes = Mapping[str, _Shaped]


def describe(model: Any, parameters: Shapes) -> str:
    """One line per parameter of each kind of layer, under the modules that hold them."""
    ops.linear  # noqa: B018 - kernels are chosen with the first use
    total = sum(math.prod(p.shape) for p in parameters.values())
    dtype = str(model.dtype).removeprefix("torch.")
    attention = getattr(getattr(model, "_attention", None), "name", "none")
    lines = [f"{type(model).__name__}: {total:,} parameters in {dtype}, kernels {ops.name}, "
             f"attention {attention}"]  # fmt: skip
    shown: set[str] = set()
    for (pattern, shape), names in _alike(parameters).items():
        lines += _modules(pattern, model, shown)
        depth, leaf = pattern.count("."), pattern.rpartition(".")[2]
        times = f" x {len(names)}" if len(names) > 1 else ""
        lines.append(f"{'  ' * (depth + 1)}{leaf} {list(shape)}{times}")
    return "\n".join(lines)


def _alike(parameters: Shapes) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Parameters that differ only in the number of their layer, together."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((_NUMBER.sub("*", name), parameter.shape), []).append(name)
    return groups


def _modules(pattern: str, model: Any, shown: set[str]) -> list[str]:
    """Lines of the modules on the way to a parameter that were not shown yet."""
    lines, found, path = [], model, ""
    for depth, part in enumerate(pattern.split(".")[:-1]):
        found = _child(found, part)
        path += "." + part
        if path not in shown:
            shown.add(path)
            kind = "" if found is None or isinstance(found, list) else f" ({type(found).__name__})"
            lines.append(f"{'  ' * (depth + 1)}{part}{kind}")
    return lines


def _child(module: Any, part: str) -> Any:
    """The object behind a part of a name, if the model's attributes follow the names."""
    if part == "*":
        return module[0] if isinstance(module, list) and module else None
    return getattr(module, f"_{part}", getattr(module, part, None))
