"""The tree of a loaded model as text: modules, shapes, numbers, kernels.

Printed at load with `QUIRE_LOG_MODEL_INSPECTION=1`. Works from the parameters that a model waits
for, so it knows no family; layers that look alike are shown once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from quire.layers.embedding import TiedEmbedding
from quire.layers.linear import Linear
from quire.layers.module import Module, ModuleList
from quire.models.decoder import DecoderForCausalLM
from quire.quantization.checkpoint import CheckpointMethod
from quire.quantization.online import OnlineMethod

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


Shapes = Mapping[str, _Shaped]


def describe(model: DecoderForCausalLM, parameters: Shapes) -> str:
    """One line per parameter of each kind of layer, under the modules that hold them.

    Args:
        model: Before or after its weights are loaded.
        parameters: What it waits for.
    """
    total = sum(math.prod(p.shape) for p in parameters.values())
    dtype = str(model.dtype).removeprefix("torch.")
    attention = model.attention.name
    lines = [f"{type(model).__name__}: {total:,} parameters in {dtype}, kernels {model.ops.name}, "
             f"attention {attention}"]  # fmt: skip
    kinds, shown = _kinds(model), set[str]()
    for (pattern, shape), names in _alike(parameters).items():
        lines += _modules(pattern, kinds, shown)
        depth, leaf = pattern.count("."), pattern.rpartition(".")[2]
        times = f" x {len(names)}" if len(names) > 1 else ""
        lines.append(f"{'  ' * (depth + 1)}{leaf} {list(shape)}{times}")
    return "\n".join(lines)


class FormTotal(NamedTuple):
    """Of all linear layers that are kept alike."""

    layers: int
    weights: int
    nbytes: int


def weight_forms(model: Module) -> dict[str, FormTotal]:
    """How the linear layers of a loaded model are kept, and what they take."""
    found: dict[str, FormTotal] = {}
    for linear in linears(model):
        method = linear.method
        if not method.nbytes:
            continue  # a head that a model for pooling never loads
        old = found.get(method.form, FormTotal(0, 0, 0))
        count = method.spec.out_features * method.spec.in_features
        found[method.form] = FormTotal(
            old.layers + 1, old.weights + count, old.nbytes + method.nbytes
        )
    return found


class SchemeTotal(NamedTuple):
    """Of all layers that a checkpoint keeps alike."""

    layers: int
    weights: int
    nbytes: int
    """In the file; of what is quantised while it is loaded, in memory."""
    activations: str


def planned_schemes(model: Module) -> dict[str, SchemeTotal]:
    """How a quantised checkpoint keeps the linear layers of a model whose headers were compared
    with it, by scheme; or what `--quantization` will make of another."""
    found: dict[str, SchemeTotal] = {}
    for linear in linears(model):
        if not isinstance(linear.method, (CheckpointMethod, OnlineMethod)):
            continue
        for label, activations, weights, nbytes in linear.method.planned():
            old = found.get(label, SchemeTotal(0, 0, 0, activations))
            found[label] = SchemeTotal(
                old.layers + 1, old.weights + weights, old.nbytes + nbytes, activations
            )
    return found


def linears(model: Module) -> list[Linear]:
    """Each once: an embedding may have a layer, its own or the head's."""
    found: dict[int, Linear] = {}
    for _, module in model.modules():
        linear = module.head if isinstance(module, TiedEmbedding) else module
        if isinstance(linear, Linear):
            found[id(linear)] = linear
    return list(found.values())


def _alike(parameters: Shapes) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Parameters that differ only in the number of their layer, together."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((_NUMBER.sub("*", name), parameter.shape), []).append(name)
    return groups


def _modules(pattern: str, kinds: Mapping[str, str], shown: set[str]) -> list[str]:
    """Lines of the modules on the way to a parameter that were not shown yet."""
    lines, path = [], ""
    for depth, part in enumerate(pattern.split(".")[:-1]):
        path = f"{path}.{part}" if path else part
        if path not in shown:
            shown.add(path)
            kind = f" ({kinds[path]})" if path in kinds else ""
            lines.append(f"{'  ' * (depth + 1)}{part}{kind}")
    return lines


def _kinds(model: Module) -> dict[str, str]:
    """Class of each module by its name, numbers of layers as in `_alike`; lists have none."""
    kinds: dict[str, str] = {}
    for name, module in model.modules():
        if not isinstance(module, ModuleList):
            kinds.setdefault(_LAYER.sub("*", name), type(module).__name__)
    return kinds
