"""A place where a checkpoint tensor goes. Knows neither files nor names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor


class KeptForm(NamedTuple):
    """How a loaded parameter is handed on to another process."""

    keep: Callable[[], Any]
    """What it has become: tensors, numbers, texts, and lists and dictionaries of these. Large
    tensors are to lie in `quire.kernels.pages.weight_memory`."""
    restore: Callable[[Any], None]
    """Takes that in the place of what `Parameter.load` takes. Its tensors are read-only."""


def _nothing() -> None:
    """There is nothing of its own to keep."""


def _ignore(kept: None) -> None:
    """Nor to restore."""


WITH_ANOTHER: Final = KeptForm(_nothing, _ignore)
"""Of a parameter that is kept as a part of another: a bias with its weight."""


class Bundle(NamedTuple):
    """A weight that checkpoints may keep as several tensors: codes, scales and what else there is.

    Of a stack, each part has tensors of its own, or the stack has them as a whole.
    """

    choose: Callable[[Sequence[Any]], Sequence[Collection[str]]]
    """Told from the headers what the checkpoint has of each part (`quire.weights.bundles.
    StoredPart`), names the tensors of each that it takes; whatever is left counts as unexpected.
    Raises `ModelLoadError` for what it cannot read."""
    load: Callable[[Sequence[Mapping[str, Tensor]]], None]
    """Takes those tensors, as they are stored. They may be memory-mapped."""


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
    bundle: Bundle | None = None
    """If there: instead of `load` and `load_parts`, takes whatever tensors the checkpoint has of
    the layer, the other parameters excepted. The parameter's name ends with `.weight`."""
    optional: tuple[tuple[int, ...], ...] = ()
    """If there: a checkpoint may lack it; if not, it has one of these shapes."""
    form: str = ""
    """What its layer makes of it, if there is a choice: what is kept for another process is of use
    only where it becomes the same."""
    kept: KeptForm | None = None
    """How another process can have it without loading it. A small parameter needs none: its
    tensors are kept as the checkpoint has them."""


Parameters = dict[str, Parameter]
"""Parameters by name."""


def prefixed(prefix: str, parameters: Parameters) -> Parameters:
    """The same parameters under `prefix.name`."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}
