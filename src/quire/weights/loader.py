"""Streams a checkpoint into a model's parameters and reports what does not fit.

At most one parameter's parts are held beside the model. Before any data is read, the report lists
every missing, every unexpected and every mis-shaped tensor at once, so that one run shows the
whole problem. Knows no family: it reads names, shapes and rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.utils.host import trim_heap
from quire.weights.bundles import LayerTensors, StoredPart, StoredTensor, chosen_names
from quire.weights.formats import Checkpoint, Stored, open_checkpoint
from quire.weights.kept import KeptModel, kept_weights, model_key
from quire.weights.names import NameRules
from quire.weights.noise import fill_with_noise
from quire.weights.pages import MappedPages

_SHOWN: Final = 5
"""Names per kind of fault in the error message."""
_STACKS: Final = 4
"""Tensors that may be cut into pieces at once: a bundle takes a piece of each in turn."""
_TRIM: Final = 4 << 20
"""Bytes of numbers after which what the heap has free is given back. Codes are made in memory that
comes and goes; the C library keeps much of it, up to a quarter of a model's bytes."""
_SMALL: Final = 1 << 20
"""Bytes of a parameter up to which it is kept as the checkpoint has it."""


class _KeptForm(Protocol):
    """See `quire.layers.parameter.KeptForm`."""

    @property
    def keep(self) -> Callable[[], Any]:
        """What the parameter has become."""
        ...

    @property
    def restore(self) -> Callable[[Any], None]:
        """Takes that."""
        ...


class _Bundle(Protocol):
    """See `quire.layers.parameter.Bundle`."""

    @property
    def choose(self) -> Callable[[Sequence[StoredPart]], Sequence[Collection[str]]]:
        """Names the tensors of each part that it takes."""
        ...

    @property
    def load(self) -> Callable[[Sequence[Mapping[str, Tensor]]], None]:
        """Takes them."""
        ...


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
    def form(self) -> str:
        """What its layer makes of it."""
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

    @property
    def bundle(self) -> _Bundle | None:
        """Takes whatever tensors the checkpoint has of the layer."""
        ...

    @property
    def kept(self) -> _KeptForm | None:
        """How another process can have it without loading it."""
        ...

    @property
    def optional(self) -> tuple[tuple[int, ...], ...]:
        """Shapes, if a checkpoint may lack it."""
        ...


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of the checkpoint, or a piece of one, under our name."""

    stored: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    as_stored: tuple[int, ...]
    """The shape before the family's layout."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One parameter and where its parts are, in stacking order."""

    name: str
    target: Target
    sources: tuple[str, ...]
    """Our names of the pieces."""
    bundles: tuple[tuple[str, ...], ...] = ()
    """Of a bundle: the names of the pieces, part by part."""
    stems: tuple[str, ...] = ()
    """Of a bundle: our names of the parts."""


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

    If this process has memory that outlives it (`quire.weights.kept`), weights are packed there;
    if they are there already, nothing is read.

    Returns:
        The number of weights loaded.

    Raises:
        ModelLoadError: a file is missing or broken; or tensors are missing, unexpected, or of
            another shape than the configuration says: each kind with names and shapes.
    """
    reader = _Reader(folder, targets, rules, dtype, device, progress or _silent, load_format)
    here = kept_weights()
    if here is None or device != "cpu" or not any(target.kept for target in targets.values()):
        return reader.read(targets)
    shapes = {name: (t.shape, t.dtype, t.form) for name, t in targets.items()}
    key = model_key(folder, load_format, dtype, shapes)
    found = here.find(key)
    if found is not None:
        return _restore(found, reader)
    small: dict[str, Any] = {}
    with here.filling():
        loaded = reader.read(targets, small)
    forms = {name: t.kept.keep() for name, t in targets.items() if t.kept is not None}
    here.keep(key, KeptModel(loaded, forms | small))
    return loaded


def _restore(found: KeptModel, reader: _Reader) -> int:
    """Give parameters what another process has made of them. What is not kept is read."""
    missing: dict[str, Target] = {}
    for name, target in reader.targets.items():
        if name not in found.entries:
            if not target.optional:
                missing[name] = target
            continue
        kept = found.entries[name]
        if target.kept is not None:
            target.kept.restore(kept)
        elif target.load_parts is not None:
            target.load_parts(kept["parts"], getattr(torch, kept["dtype"]))
        else:
            target.load(kept["whole"])
    if missing:
        reader.read(missing)
    return found.num_weights


def match_headers(
    folder: Path, targets: Mapping[str, Target], rules: NameRules, load_format: str = "auto"
) -> None:
    """Compare a checkpoint with a model without reading any data. Bundles choose their tensors.

    Raises:
        ModelLoadError: see `load_weights`.
    """
    with open_checkpoint(folder, load_format) as checkpoint:
        _matched(folder, checkpoint, _pieces_of(checkpoint, rules), targets, rules)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What `load_weights` was told, to read all of it or the rest."""

    folder: Path
    targets: Mapping[str, Target]
    rules: NameRules
    dtype: torch.dtype
    device: str
    tell: Callable[[int, int], None]
    load_format: str

    def read(self, wanted: Mapping[str, Target], small: dict[str, Any] | None = None) -> int:
        """Fill some of the targets; returns the number of weights. Into `small` goes what there is
        to keep of parameters that have no form of their own for that."""
        if self.load_format == "dummy":
            return fill_with_noise(wanted, self.dtype, self.device)
        with open_checkpoint(self.folder, self.load_format) as checkpoint:
            found = _pieces_of(checkpoint, self.rules)
            steps = _matched(self.folder, checkpoint, found, self.targets, self.rules)
            pieces = _Pieces(checkpoint, self.rules, found)
            done, loaded, untrimmed = 0.0, 0, 0
            for step in steps:
                if step.name not in wanted:
                    continue
                copy = _fill(step, pieces, step.target.dtype or self.dtype, self.device)
                if small is not None and copy is not None:
                    small[step.name] = copy
                for name in step.sources:
                    here = found[name]
                    stored, count = checkpoint.tensors[here.stored], math.prod(here.shape)
                    done += stored.nbytes * count / max(1, stored.numel)
                    loaded += count * (not step.bundles)
                loaded += math.prod(step.target.shape) * bool(step.bundles)
                untrimmed += math.prod(step.target.shape)
                if untrimmed > _TRIM:
                    trim_heap()
                    untrimmed = 0
                self.tell(min(int(done), checkpoint.total_bytes), checkpoint.total_bytes)
            self.tell(checkpoint.total_bytes, checkpoint.total_bytes)
        trim_heap()
        return loaded


def _silent(done: int, total: int) -> None:
    """Progress that nobody wants to hear."""


def _fill(step: _Step, pieces: _Pieces, dtype: torch.dtype, device: str) -> dict[str, Any] | None:
    """Give a parameter its parts. Nothing of them outlives this, unless it waits for more.

    Returns:
        A copy of what it got, if that is small and all that there is to keep of it.
    """
    if step.target.bundle is not None:
        _fill_bundle(step, step.target.bundle, pieces, device)
        return None
    stored = [pieces.read(name) for name in step.sources]
    copies = step.target.kept is None and sum(part.nbytes for part in stored) <= _SMALL
    small: dict[str, Any] = {}
    if step.target.load_parts is not None:
        parts = [part.to(device) for part in stored]
        if copies:
            name = str(dtype).removeprefix("torch.")
            small = {"parts": [part.clone() for part in parts], "dtype": name}
        step.target.load_parts(parts, dtype)
    else:
        parts = [part.to(device, dtype) for part in stored]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if copies:
            small = {"whole": whole.clone()}
        try:
            step.target.load(whole)
        except ModelLoadError as error:
            names = ", ".join(pieces.stored_name(name) for name in step.sources)
            raise ModelLoadError(f"{names}: {error.message}") from None
    for part in stored:
        pieces.pages.drop(part)
    return small or None


def _fill_bundle(step: _Step, bundle: _Bundle, pieces: _Pieces, device: str) -> None:
    parts, mapped = [], []
    for stem, names in zip(step.stems, step.bundles, strict=True):
        tensors = {name.removeprefix(f"{stem}."): pieces.read_stored(name) for name in names}
        mapped += tensors.values()
        parts.append({name: tensor.to(device) for name, tensor in tensors.items()})
    bundle.load(parts)
    for tensor in mapped:
        pieces.pages.drop(tensor)


class _Pieces:
    """Reads pieces by our names. Neighbouring pieces of one stored tensor are read once."""

    def __init__(
        self, checkpoint: Checkpoint, rules: NameRules, found: Mapping[str, _Found]
    ) -> None:
        self._checkpoint, self._rules, self._found = checkpoint, rules, found
        self.pages = MappedPages({stored.path for stored in checkpoint.tensors.values()})
        self._left: dict[tuple[str, bool], Iterator[tuple[str, Tensor]]] = {}

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls the tensor that `name` is read from."""
        return self._found[name].stored

    def read(self, name: str) -> Tensor:
        """The tensor, or the piece of one, that belongs to `name`."""
        return self._read(name, False)

    def read_stored(self, name: str) -> Tensor:
        """The same as the checkpoint has it."""
        return self._read(name, True)

    def _read(self, name: str, as_stored: bool) -> Tensor:
        stored = self._found[name].stored
        # Pieces come lazily and in the order of the parameters: mostly the next is ours.
        for other, piece in self._left.get((stored, as_stored), ()):
            if other == name:
                return piece
        if not as_stored or len(self._left) >= _STACKS:
            self._left.clear()  # let go of the last ones first
        read = self._checkpoint.read_stored if as_stored else self._checkpoint.read
        renamed = self._rules.renamed(stored)
        left = self._rules.pieces(renamed, read(stored), not as_stored)
        if name != renamed:
            self._left[stored, as_stored] = left
        return next(piece for other, piece in left if other == name)


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
            own = tuple(piece.shape) if ours != rules.renamed(name) else stored.shape
            found[key] = _Found(name, tuple(piece.shape), own)
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
    misshaped: list[str] = []
    missing: list[str] = []
    steps: list[_Step] = []
    used: set[str] = set()
    layers = _layer_tensors(checkpoint, found, targets, rules)
    for parameter, target in targets.items():
        if target.bundle is not None and layers is not None:
            step, lacking = _bundled(parameter, target, target.bundle, layers)
            missing += lacking
            used.update(step.sources)
            steps += [] if lacking else [step]
            continue
        expected = _parts_of(parameter, target, rules, found)
        if target.optional and not any(ours in found for ours in expected):
            continue
        used.update(expected)
        for ours, shape in expected.items():
            here = found.get(ours)
            if here is None:
                missing.append(ours)
                continue
            stored = checkpoint.tensors[here.stored]
            if here.shape not in (target.optional or (shape,)):
                misshaped.append(_misshape(here, target.optional or (shape,), stored))
            elif stored.dtype not in (types := target.stored or checkpoint.types):
                raise ModelLoadError(_unreadable(here.stored, stored, types))
        steps.append(_Step(parameter, target, tuple(expected)))
    unexpected = {f.stored for n, f in found.items() if n not in used and not rules.ignored(n)}
    _report(folder, missing, list(unexpected), misshaped)

    def place(step: _Step) -> tuple[str, int]:
        stored = checkpoint.tensors[found[step.sources[0]].stored]
        return str(stored.path), stored.begin

    return sorted(steps, key=place)


def _layer_tensors(
    checkpoint: Checkpoint,
    found: Mapping[str, _Found],
    targets: Mapping[str, Target],
    rules: NameRules,
) -> LayerTensors | None:
    """The tensors of layers whose weights are bundles; `None` if there are no such layers."""
    bundles = [name for name, target in targets.items() if target.bundle is not None]
    if not bundles:
        return None
    others = set(targets) - set(bundles)
    others |= {source for name in others for source in rules.sources(name)}
    headers = {
        name: _header(here, checkpoint.tensors[here.stored])
        for name, here in found.items()
        if name not in others
    }
    return LayerTensors(headers, bundles, rules)


def _header(here: _Found, stored: Stored) -> StoredTensor:
    share = math.prod(here.as_stored) / max(1, stored.numel)
    return StoredTensor(here.stored, here.as_stored, stored.dtype, int(stored.nbytes * share))


def _bundled(
    parameter: str, target: Target, bundle: _Bundle, layers: LayerTensors
) -> tuple[_Step, list[str]]:
    """What to read for a bundle, and what is missing of it."""
    parts = layers.parts(parameter, target)
    lacking = [f"{stem}.weight" for stem, part in parts if not part.tensors]
    if lacking:
        return _Step(parameter, target, ()), lacking
    names = chosen_names(parts, bundle.choose([part for _, part in parts]))
    flat = tuple(name for part in names for name in part)
    return _Step(parameter, target, flat, tuple(names), tuple(stem for stem, _ in parts)), []


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


def _misshape(found: _Found, expected: Sequence[tuple[int, ...]], stored: Stored) -> str:
    shapes = " or ".join(str(list(shape)) for shape in expected)
    return f"{found.stored} (expected {shapes}, found {list(found.shape)} in {stored.path.name})"


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
