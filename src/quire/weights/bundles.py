"""Layers that a checkpoint keeps as several tensors: which of them belong to which layer.

The layer says what it takes (`quire.layers.parameter.Bundle`); headers are compared before data is
read. Knows names and headers, no format of quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from quire.weights.names import NameRules

_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header of one tensor of a layer."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    """Of the layer's piece, if the tensor holds several layers."""
    dtype: str
    """As the checkpoint's format names it: `I32`, `F8_E4M3`, `Q4_K`."""
    nbytes: int = 0
    """In the file."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a checkpoint has of one layer, or of one of those that the model stacks."""

    name: str
    """The layer's name in the checkpoint."""
    rows: int
    """Rows of its weight: N."""
    tensors: Mapping[str, StoredTensor]
    """By what follows the layer's name: `qweight`, `weight.absmax`."""
    change: Callable[[Tensor], Tensor] | None = None
    """The family lays out rows (and the rows of a plain weight's columns) otherwise than the
    checkpoint: from its order to the family's."""


class BundleTarget(Protocol):
    """The fields of `quire.layers.parameter.Parameter` that count here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[N, K]`."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each part, or nothing."""
        ...


class LayerTensors:
    """All tensors of the layers whose weights are bundles.

    Args:
        tensors: Of the checkpoint, under our names: those that are no other parameter.
        parameters: The names of those weights.
        rules: Of the family.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], parameters: Collection[str], rules: NameRules
    ) -> None:
        self._rules = rules
        stems = {layer_of(p) for p in parameters}
        stems |= {layer_of(source) for p in parameters for source in rules.sources(p)}
        self._of: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in tensors.items():
            for stem, rest in _cuts(name):
                if stem in stems:
                    self._of.setdefault(stem, {})[rest] = tensor
                    break

    def parts(self, parameter: str, target: BundleTarget) -> list[tuple[str, StoredPart]]:
        """Our names of the layers that a weight is stacked of, or of the stack if the checkpoint
        has it as a whole, and what there is of each."""
        sources = [layer_of(source) for source in self._rules.sources(parameter)]
        whole, rows = layer_of(parameter), target.parts
        if len(sources) == 1 or (whole in self._of and not any(s in self._of for s in sources)):
            sources, rows = [whole] if len(sources) > 1 else sources, target.shape[:1]
        return [(s, self._part(s, n)) for s, n in zip(sources, rows, strict=True)]

    def _part(self, stem: str, rows: int) -> StoredPart:
        tensors = self._of.get(stem, {})
        name = stem
        for rest, tensor in tensors.items():
            if tensor.name.endswith(f".{rest}"):
                name = tensor.name.removesuffix(f".{rest}")
                break
        return StoredPart(name, rows, tensors, self._rules.layout(stem + _WEIGHT))


def layer_of(parameter: str) -> str:
    """`layer.weight` without its end."""
    assert parameter.endswith(_WEIGHT), f"{parameter} is no weight"
    return parameter.removesuffix(_WEIGHT)


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Every `(head, tail)` of a name at a dot, the longest head first."""
    at = name.rfind(".")
    while at > 0:
        yield name[:at], name[at + 1 :]
        at = name.rfind(".", 0, at)


def chosen_names(
    layers: Sequence[tuple[str, StoredPart]], chosen: Sequence[Collection[str]]
) -> list[tuple[str, ...]]:
    """Our names of the tensors of each part, in the order of the checkpoint."""
    return [
        tuple(f"{stem}.{rest}" for rest in part.tensors if rest in taken)
        for (stem, part), taken in zip(layers, chosen, strict=True)
    ]
