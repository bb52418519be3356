"""Streams a checkpoint into a model's parameters and reports what does not fit.

At most one parameter's parts are held beside the model. The report lists every missing, every
unexpected and every mis-shaped tensor at once, so that one run shows the whole problem. Knows no
family: it reads names, shapes and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.weights.files import iterate_tensors, total_bytes, weight_files
from quire.weights.names import NameRules

_SHOWN: Final = 5
"""Names per kind of fault in the error message."""


class Target(Protocol):
    """A parameter that waits for its tensor (`quire.layers.parameter.Parameter`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each part, or nothing."""
        ...

    @property
    def load(self) -> Callable[[Tensor], None]:
        """Takes the whole tensor."""
        ...


@dataclass(slots=True)
class _Pending:
    """A parameter and the parts of it read so far."""

    name: str
    target: Target
    shapes: dict[str, tuple[int, ...]]
    """Expected shape of each checkpoint tensor, in stacking order."""
    read: dict[str, Tensor] = field(default_factory=dict)

    def take(self, source: str, tensor: Tensor) -> None:
        """Keep a part; pass the parameter on once it is complete."""
        self.read[source] = tensor
        if len(self.read) == len(self.shapes):
            parts = [self.read[name] for name in self.shapes]
            self.target.load(parts[0] if len(parts) == 1 else torch.cat(parts))
            self.read.clear()


def load_weights(
    folder: Path,
    targets: Mapping[str, Target],
    rules: NameRules,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fill all targets from the safetensors of a folder, rounded to `dtype`, on `device`.

    `progress(done, total)` is called with bytes of the files.

    Returns:
        The number of weights loaded.

    Raises:
        ModelLoadError: a file is missing or broken; or tensors are missing, unexpected, or of
            another shape than the configuration says: each kind with names and shapes.
    """
    files = weight_files(folder)
    total, done, loaded = total_bytes(files), 0, 0
    waiting = _expected(targets, rules)
    missing = dict.fromkeys(waiting)
    unexpected, misshaped = [], []

    def unwanted(name: str) -> bool:
        ours = rules.renamed(name)
        return ours not in waiting and rules.ignored(ours)

    for name, tensor, path in iterate_tensors(files, unwanted):
        done += tensor.numel() * tensor.element_size()
        ours = rules.renamed(name)
        pending = waiting.get(ours)
        if pending is None:
            unexpected.append(name)
        elif tuple(tensor.shape) != pending.shapes[ours]:
            missing.pop(ours, None)
            misshaped.append(_misshape(name, pending.shapes[ours], tensor, path))
        else:
            missing.pop(ours, None)
            loaded += tensor.numel()
            pending.take(ours, tensor.to(device, dtype))
        if progress is not None:
            progress(min(done, total), total)
    _report(folder, list(missing), unexpected, misshaped)
    if progress is not None:
        progress(total, total)
    return loaded


def _expected(targets: Mapping[str, Target], rules: NameRules) -> dict[str, _Pending]:
    """Checkpoint names in our spelling, each with the parameter it belongs to."""
    waiting = {}
    for name, target in targets.items():
        # A family whose checkpoints are merged already has no rule: then the parts do not matter.
        sources = rules.sources(name)
        rows = target.parts if len(sources) > 1 else target.shape[:1]
        assert len(rows) == len(sources), f"{name}: {len(rows)} parts, {len(sources)} names"
        shapes = {s: (n, *target.shape[1:]) for s, n in zip(sources, rows, strict=True)}
        pending = _Pending(name, target, shapes)
        waiting.update(dict.fromkeys(sources, pending))
    return waiting


def _misshape(name: str, expected: tuple[int, ...], tensor: Tensor, path: Path) -> str:
    return f"{name} (expected {list(expected)}, found {list(tensor.shape)} in {path.name})"


def _report(folder: Path, missing: list[str], unexpected: list[str], misshaped: list[str]) -> None:
    kinds = (("wrong shape", misshaped), ("missing", missing), ("unexpected", unexpected))
    faults = [f"{kind}: {_some(sorted(names))}" for kind, names in kinds if names]
    if faults:
        raise ModelLoadError(
            f"the weights in {str(folder)!r} do not match its config.json. {'. '.join(faults)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
