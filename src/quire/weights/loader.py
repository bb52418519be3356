"""Streams a checkpoint into a model's parameters and reports what does not fit.

At most one parameter's parts are held beside the model. Before any data is read, the report lists
every missing, every unexpected and every mis-shaped tensor at once, so that one run shows the
whole problem. Knows no family: it reads names, shapes and rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.weights.formats import Checkpoint, Stored, open_checkpoint
from quire.weights.names import NameRules
from quire.weights.noise import fill_with_noise
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
    def stored(self) -> frozenset[str] | None:
        """Types that it takes, as the checkpoint's format names them; `None`: floats."""
        ...

    @property
    def load(self) -> Callable[[Tensor], None]:
        """Takes the whole tensor."""
        ...

    @property
    def load_parts(self) -> Callable[[Sequence[Tensor], torch.dtype], None] | None:
        """Takes the checkpoint's tensors as they are, if the parameter can."""
        ...


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of the checkpoint, or a piece of one, under our name."""

    stored: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """One parameter and where its parts are, in stacking order."""

    target: Target
    sources: tuple[str, ...]
    """Our names of the pieces."""


def load_weights(
    folder: Path,
    targets: Mapping[str, Target],
    rules: NameRules,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[int, int], None] | None = None,
    load_format: str = "auto",
) -> int:
    """Fill all targets from the checkpoint of a folder, rounded to `dtype`, on `device`.

    Memory beside the model: the parts of one parameter and their concatenation. Names, types and
    shapes are all checked before the first byte of data is read. `progress(done, total)` is
    called with bytes of the files.

    Returns:
        The number of weights loaded.

    Raises:
        ModelLoadError: a file is missing or broken; or tensors are missing, unexpected, or of
            another shape than the configuration says: each kind with names and shapes.
    """
    tell = progress or _silent
    if load_format == "dummy":
        return fill_with_noise(targets, dtype, device)
    with open_checkpoint(folder, load_format) as checkpoint:
        found = _pieces_of(checkpoint, rules)
        steps = _matched(folder, checkpoint, found, targets, rules)
        pieces = _Pieces(checkpoint, rules, found)
        done, loaded = 0.0, 0
        for step in steps:
            _fill(step, pieces, step.target.dtype or dtype, device)
            for name in step.sources:
                here = found[name]
                stored, count = checkpoint.tensors[here.stored], math.prod(here.shape)
                done += stored.nbytes * count / max(1, stored.numel)
                loaded += count
            tell(min(int(done), checkpoint.total_bytes), checkpoint.total_bytes)
        tell(checkpoint.total_bytes, checkpoint.total_bytes)
    return loaded


def _silent(done: int, total: int) -> None:
    """Progress that nobody wants to hear."""


def _fill(step: _Step, pieces: _Pieces, dtype: torch.dtype, device: str) -> None:
    """Give a parameter its parts. Nothing of them outlives this, unless it waits for more."""
    stored = [pieces.read(name) for name in step.sources]
    if step.target.load_parts is not None:
        step.target.load_parts([part.to(device) for part in stored], dtype)
    else:
        parts = [part.to(device, dtype) for part in stored]
        step.target.load(parts[0] if len(parts) == 1 else torch.cat(parts))
    for part in stored:
        pieces.pages.drop(part)


class _Pieces:
    """Reads pieces by our names. Neighbouring pieces of one stored tensor are read once."""

    def __init__(
        self, checkpoint: Checkpoint, rules: NameRules, found: Mapping[str, _Found]
    ) -> None:
        self._checkpoint, self._rules, self._found = checkpoint, rules, found
        self.pages = MappedPages({stored.path for stored in checkpoint.tensors.values()})
        self._stored = ""
        self._left: Iterator[tuple[str, Tensor]] = iter(())

    def read(self, name: str) -> Tensor:
        """The tensor, or the piece of one, that belongs to `name`."""
        stored = self._found[name].stored
        if stored == self._stored:
            # Pieces come lazily and in the order of the parameters: mostly the next is ours.
            for other, piece in self._left:
                if other == name:
                    return piece
        self._stored, self._left = stored, iter(())  # let go of the last one first
        tensor = self._checkpoint.read(stored)
        self._left = self._rules.pieces(self._rules.renamed(stored), tensor)
        return next(piece for other, piece in self._left if other == name)


def _pieces_of(checkpoint: Checkpoint, rules: NameRules) -> dict[str, _Found]:
    """Everything in a checkpoint under our names, with the shape it has for us.

    The rules are tried on tensors without data.
    """
    found: dict[str, _Found] = {}
    for name, stored in checkpoint.tensors.items():
        blank = torch.empty(stored.shape, device="meta")
        for ours, piece in rules.pieces(rules.renamed(name), blank):
            # The first keeps the name; a second one is reported, as nothing will ask for it.
            key = ours if ours not in found else f"{ours} again, from {name}"
            found[key] = _Found(name, tuple(piece.shape))
    return found


def _matched(
    folder: Path,
    checkpoint: Checkpoint,
    found: Mapping[str, _Found],
    targets: Mapping[str, Target],
    rules: NameRules,
) -> list[_Step]:
    """What to read for each parameter, files from front to back.

    Raises:
        ModelLoadError: checkpoint and model differ.
    """
    misshaped, missing, steps = [], [], []
    used: set[str] = set()
    for parameter, target in targets.items():
        expected = _parts_of(parameter, target, rules, found)
        used.update(expected)
        for ours, shape in expected.items():
            here = found.get(ours)
            if here is None:
                missing.append(ours)
                continue
            stored = checkpoint.tensors[here.stored]
            if here.shape != shape:
                misshaped.append(_misshape(here, shape, stored))
            elif stored.dtype not in (types := target.stored or checkpoint.types):
                raise ModelLoadError(_unreadable(here.stored, stored, types))
        steps.append(_Step(target, tuple(expected)))
    unexpected = {f.stored for n, f in found.items() if n not in used and not rules.ignored(n)}
    _report(folder, missing, list(unexpected), misshaped)

    def place(step: _Step) -> tuple[str, int]:
        stored = checkpoint.tensors[found[step.sources[0]].stored]
        return str(stored.path), stored.begin

    return sorted(steps, key=place)


def _parts_of(
    parameter: str, target: Target, rules: NameRules, found: Mapping[str, _Found]
) -> dict[str, tuple[int, ...]]:
    """Our names of what a checkpoint keeps of a parameter, in parts or whole, with shapes."""
    sources = rules.sources(parameter)
    merged = parameter in found and not any(source in found for source in sources)
    if len(sources) == 1 or merged:
        return {sources[0] if len(sources) == 1 else parameter: target.shape}
    assert len(target.parts) == len(sources), f"{parameter}: {target.parts} for {sources}"
    return {s: (n, *target.shape[1:]) for s, n in zip(sources, target.parts, strict=True)}


def _misshape(found: _Found, expected: tuple[int, ...], stored: Stored) -> str:
    name = found.stored
    return f"{name} (expected {list(expected)}, found {list(found.shape)} in {stored.path.name})"


def _unreadable(name: str, stored: Stored, types: frozenset[str]) -> str:
    return (
        f"{str(stored.path)!r}: tensor {name!r} has type {stored.dtype}; of this format quire "
        f"reads {', '.join(sorted(types))}"
    )


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
