"""Streams a checkpoint into a model's parameters and reports what does not fit.

At most one parameter's parts are held beside the model. The report lists every missing, every
unexpected and every mis-shaped tensor at once, so that one run shows the whole problem. Knows no
family: it reads names, shapes and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.weights.files import iterate_tensors, total_bytes, weight_files
from quire.weights.names import NameRules
from quire.weights.pages import MappedPages

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
    def dtype(self) -> torch.dtype | None:
        """Type to load it in, if not the model's."""
        ...

    @property
    def load(self) -> Callable[[Tensor], None]:
        """Takes the whole tensor."""
        ...

    @property
    def load_parts(self) -> Callable[[Sequence[Tensor], torch.dtype], None] | None:
        """Takes the checkpoint's tensors as they are, if the parameter can."""
        ...


@dataclass(slots=True)
class _Pending:
    """A parameter and the parts of it read so far."""

    name: str
    target: Target
    shapes: dict[str, tuple[int, ...]]
    """Expected shape of each checkpoint tensor, in stacking order."""
    read: dict[str, Tensor] = field(default_factory=dict)
    complete: bool = False

    def wants(self, source: str) -> bool:
        """Whether a tensor is still of use: not a second time, nor in parts and whole."""
        return not self.complete and (source in self.shapes or not self.read)

    def shape_of(self, source: str) -> tuple[int, ...]:
        """Expected shape of a checkpoint tensor: of a part, or of the whole parameter."""
        return self.shapes.get(source, self.target.shape)

    def take(self, source: str, tensor: Tensor, dtype: torch.dtype, device: str) -> None:
        """Keep a part; pass the parameter on once it is complete."""
        whole = source not in self.shapes
        self.read[source] = tensor
        if not whole and len(self.read) < len(self.shapes):
            return
        self.complete = True
        parts = [self.read[name].to(device) for name in ([source] if whole else self.shapes)]
        if self.target.load_parts is not None:
            self.target.load_parts(parts, dtype)
        else:
            parts = [part.to(dtype) for part in parts]
            self.target.load(parts[0] if len(parts) == 1 else torch.cat(parts))
        self.read.clear()


class _Loading:
    """What has been read so far, and what is wrong with it."""

    def __init__(
        self, rules: NameRules, dtype: torch.dtype, device: str, waiting: dict[str, _Pending]
    ) -> None:
        self.loaded = 0
        self._rules, self._dtype, self._device = rules, dtype, device
        self._waiting = waiting
        self._missing = dict.fromkeys(name for p in waiting.values() for name in p.shapes)
        self._unexpected: list[str] = []
        self._misshaped: list[str] = []

    def unwanted(self, stored: str) -> bool:
        """Whether a tensor need not be read, of whatever type it is."""
        name = self._rules.renamed(stored)
        return name not in self._waiting and self._rules.ignored(name)

    def take(self, stored: str, tensor: Tensor, path: Path) -> None:
        """A tensor of the checkpoint, under its name there."""
        for name, piece in self._rules.pieces(self._rules.renamed(stored), tensor):
            pending = self._waiting.get(name)
            if pending is None or not pending.wants(name):
                if not self._rules.ignored(name):
                    self._unexpected.append(stored)
                continue
            # A parameter that is merged already stands for all its parts.
            for part in (name,) if name in pending.shapes else pending.shapes:
                self._missing.pop(part, None)
            expected = pending.shape_of(name)
            if tuple(piece.shape) != expected:
                self._misshaped.append(_misshape(stored, expected, piece, path))
                continue
            self.loaded += piece.numel()
            dtype = pending.target.dtype or self._dtype
            pending.take(name, piece, dtype, self._device)

    def report(self, folder: Path) -> None:
        """Refuse if anything is wrong."""
        _report(folder, list(self._missing), self._unexpected, self._misshaped)


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
    total, done = total_bytes(files), 0
    state = _Loading(rules, dtype, device, _expected(targets, rules))
    pages: dict[Path, MappedPages] = {}
    for name, tensor, path in iterate_tensors(files, state.unwanted):
        pages = pages if path in pages else {path: MappedPages(path)}
        done += tensor.numel() * tensor.element_size()
        state.take(name, tensor, path)
        pages[path].drop(tensor)
        if progress is not None:
            progress(min(done, total), total)
    state.report(folder)
    if progress is not None:
        progress(total, total)
    return state.loaded


def _expected(targets: Mapping[str, Target], rules: NameRules) -> dict[str, _Pending]:
    """Checkpoint names in our spelling, parts and whole, each with the parameter it belongs to."""
    waiting = {}
    for name, target in targets.items():
        # A family whose checkpoints are merged already has no rule: then the parts do not matter.
        sources = rules.sources(name)
        rows = target.parts if len(sources) > 1 else target.shape[:1]
        assert len(rows) == len(sources), f"{name}: {len(rows)} parts, {len(sources)} names"
        shapes = {s: (n, *target.shape[1:]) for s, n in zip(sources, rows, strict=True)}
        pending = _Pending(name, target, shapes)
        waiting.update(dict.fromkeys((*sources, name), pending))
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
