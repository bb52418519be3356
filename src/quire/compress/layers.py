"""What of a model can be quantised: its linear layers, with the checkpoint's tensors of each.

The model is loaded once, in its own type. A weight is read again from the checkpoint when codes
are made of it. Knows no scheme.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.embedding import TiedEmbedding
from quire.layers.linear import Linear
from quire.layers.linear_method import LinearMethod, LinearSpec, PlainMethod, PreparedMethod
from quire.layers.module import Module
from quire.layers.moe import MoE
from quire.layers.parameter import Bundle, Parameters
from quire.quantization.checkpoint import fitting
from quire.weights.bundles import StoredPart
from quire.weights.formats import Checkpoint

EXPERT: Final = re.compile(r"(.*\.experts\.)\d+(\..*)")
"""The name of a layer of an expert, or of its tensor. Experts of a layer are kept alike, as their
weights are multiplied together."""
CHOOSERS: Final = ("gate", "shared_expert_gate")
HEADS: Final = ("lm_head", "embed_tokens", "output_layer")
HEAD: Final = "lm_head"
"""Its name in a checkpoint of its own, if it was one with the embedding."""


class SourceMethod(PlainMethod):
    """A plain layer that remembers which tensors it was made of."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        self.sources: Sequence[StoredPart] = ()

    def parameters(self) -> Parameters:
        """`weight`, whatever the checkpoint has of it, and perhaps `bias`."""
        found = super().parameters()
        bundle = Bundle(self._choose, self._take)
        return {**found, "weight": replace(found["weight"], bundle=bundle)}

    def _choose(self, parts: Sequence[StoredPart]) -> list[Collection[str]]:
        self.sources = parts
        for part in parts:
            if "weight" not in part.tensors:
                raise ModelLoadError(f"layer {part.name!r} has no weight")
        return [{"weight"} for _ in parts]

    def _take(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        pieces = [
            found["weight"] if part.change is None else part.change(found["weight"])
            for part, found in zip(self.sources, tensors, strict=True)
        ]
        self._load_parts(pieces, self.spec.dtype)


class SourceFormat:
    """A `quire.layers.linear_method.WeightFormat` of such methods."""

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        return SourceMethod(spec)


class TrialMethod(PreparedMethod):
    """A layer with other weights, already prepared."""

    def __init__(self, spec: LinearSpec, prepared: Any) -> None:
        super().__init__(spec)
        self._prepared = prepared


class ApartMethod(TrialMethod):
    """A head with other weights beside an embedding that stays as it was."""

    def __init__(self, original: LinearMethod, prepared: Any) -> None:
        super().__init__(original.spec, prepared)
        self._original = original

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `LinearMethod.rows`."""
        return self._original.rows(ids, dtype)


@dataclass(frozen=True, slots=True)
class LayerUnit:
    """Linear layers that get the same choice: one, or the same of all experts of a layer."""

    name: str
    linears: tuple[Linear, ...]
    originals: tuple[SourceMethod, ...]
    """Their methods as loaded."""
    kept_because: str | None = None
    """Why it cannot be quantised; `None`: it can."""
    apart: bool = False
    """It is a head that is written apart from the embedding, which stays."""

    @property
    def is_head(self) -> bool:
        """Whether logits come from it."""
        return self.name.rpartition(".")[2] in HEADS

    @property
    def is_experts(self) -> bool:
        """Whether these are experts of a mixture."""
        return EXPERT.fullmatch(self.originals[0].spec.name) is not None

    @property
    def weights(self) -> int:
        """How many numbers."""
        return sum(m.spec.out_features * m.spec.in_features for m in self.originals)

    @property
    def columns(self) -> int:
        """K."""
        return self.originals[0].spec.in_features

    @property
    def leaf(self) -> int:
        """Columns that are summed on their own: no group may cross from one to the next."""
        return self.columns // self.originals[0].spec.leaves

    @property
    def parts(self) -> Iterator[tuple[int, StoredPart]]:
        """The number of the linear layer, and each layer of the checkpoint that is part of it."""
        for i, method in enumerate(self.originals):
            for part in method.sources:
                yield i, part


def find_units(model: Module, tied: bool, head: str, kept: str | None = None) -> list[LayerUnit]:
    """All linear layers of a loaded model, those that cannot be quantised included.

    Args:
        model: Loaded with `SourceFormat`.
        tied: Its head is the embedding.
        head: `int8`, `shared` or `keep`. One that is the embedding, too, is written apart from it
            with `int8`, and stays one with it with `shared`.
        kept: Why the head stays as it is, if it has to.
    """
    found: dict[str, list[Linear]] = {}
    for _, module in model.modules():
        linear = module.head if isinstance(module, TiedEmbedding) else module
        if isinstance(linear, Linear) and isinstance(linear.method, SourceMethod):
            name = EXPERT.sub(r"\1*\2", linear.method.spec.name)
            group = found.setdefault(name, [])
            if not any(linear is other for other in group):
                group.append(linear)
    if head == "keep":
        kept = "it is the head: see --head"
    return [_unit(name, linears, tied and head == "int8", kept) for name, linears in found.items()]


def _unit(name: str, linears: list[Linear], apart: bool, kept: str | None) -> LayerUnit:
    methods = [linear.method for linear in linears]
    originals = tuple(method for method in methods if isinstance(method, SourceMethod))
    unit = LayerUnit(name, tuple(linears), originals)
    unit = replace(unit, apart=apart and unit.is_head)
    return replace(unit, kept_because=_kept_because(unit, kept))


def _kept_because(unit: LayerUnit, kept: str | None) -> str | None:
    if unit.name.rpartition(".")[2] in CHOOSERS:
        return "it chooses experts"
    if unit.is_head and kept:
        return kept
    if unit.apart and unit.originals[0].spec.bias:
        return "it is the embedding and has a bias"
    if unit.columns < 32:
        return "it has fewer than 32 columns"
    for _, part in unit.parts:
        stored = part.tensors["weight"]
        if part.change is not None:
            return "the checkpoint lays it out otherwise than a linear layer"
        if stored.name != f"{part.name}.weight" or len(stored.shape) != 2:
            return "the checkpoint keeps several layers in one tensor"
    return None


def weight_of(checkpoint: Checkpoint, part: StoredPart, dtype: torch.dtype) -> Tensor:
    """A part's weight `[N, K]`, rounded to the model's type as the model has it, then float32."""
    return checkpoint.read(part.tensors["weight"].name).to(dtype).to(torch.float32)


def swap(model: Module, unit: LayerUnit, methods: Sequence[LinearMethod]) -> None:
    """Compute a unit's layers with these methods from now on."""
    for linear, method in zip(unit.linears, methods, strict=True):
        linear.use(method)
    if len(unit.linears) > 1 or unit.is_experts:
        for _, module in model.modules():
            if isinstance(module, MoE):
                module.weights_changed()


def trial(
    original: SourceMethod, coded: Sequence[Any], bias: Tensor | None, apart: bool = False
) -> TrialMethod:
    """A method with these `CodedWeight`s, part by part. `apart`: see `LayerUnit.apart`."""
    spec = original.spec
    prepared = spec.ops.prepare_coded(
        [fitting(one, spec) for one in coded],
        bias, gated=spec.gated, leaves=spec.leaves, dtype=spec.dtype,
    )  # fmt: skip
    return ApartMethod(original, prepared) if apart else TrialMethod(spec, prepared)


def bias_of(checkpoint: Checkpoint, original: SourceMethod) -> Tensor | None:
    """The layer's bias, out of the checkpoint."""
    if not original.spec.bias:
        return None
    names = [f"{part.name}.bias" for part in original.sources]
    return torch.cat([checkpoint.read(name).to(original.spec.dtype) for name in names])


def tensors_beside(folder: Path) -> list[Path]:
    """Files of a model folder that are no weights and belong into a copy of it."""
    weights = (".safetensors", ".bin", ".pt", ".gguf", ".onnx", ".h5", ".msgpack")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix not in weights
        and not path.name.endswith(".index.json")
        and path.name not in ("SHA256SUMS", "config.json")
    ]
