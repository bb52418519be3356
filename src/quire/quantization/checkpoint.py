"""Linear layers of quantised checkpoints: each is quantised in its own way, or left as it was.

A checkpoint's format (`CheckpointFormat`) says by a layer's name how it is quantised (`Scheme`).
Its tensors decide too: what both say must agree. Layers that the model stacks may differ from each
other; such a stack is multiplied part by part. One layer is unpacked at a time.
Knows no format and no kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.layers.linear_method import LinearMethod, LinearSpec, PlainMethod
from quire.layers.parameter import Bundle, Parameters
from quire.quantization.scheme import (
    FLOATS,
    LayerData,
    Scheme,
    check_headers,
    contradiction,
    missing_of,
)
from quire.weights.bundles import StoredPart
from quire.weights.names import transposed

_LEFT_OUT: Final = re.compile(r"(.*\.)?(lm_head|output|embed_\w+|gate|router|shared_expert_gate)")
"""Layers that writers leave as they are without a word in the configuration."""
_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
"""Their weights are multiplied together, so each must be one."""


class CheckpointFormat(Protocol):
    """How the layers of one checkpoint are quantised, from its configuration."""

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """That of a layer, by the name that the checkpoint has for it; `None`: as it was.

        Raises:
            ModelLoadError: in a way that is not read.
        """
        ...


class QuantisedFormat:
    """A `quire.layers.linear_method.WeightFormat` out of a `CheckpointFormat`."""

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        self.checkpoint = checkpoint

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        return CheckpointMethod(spec, self.checkpoint)


class CheckpointMethod(PlainMethod):
    """A layer of such a checkpoint. What it is shows when the checkpoint is opened."""

    def __init__(self, spec: LinearSpec, checkpoint: CheckpointFormat) -> None:
        super().__init__(spec)
        self._checkpoint = checkpoint
        self._parts: Sequence[StoredPart] = ()
        self._schemes: Sequence[Scheme | None] = ()
        self._pieces: list[CodedWeight | Tensor] | None = None
        self._beside: list[Any] = []
        """Prepared weights of parts that are multiplied one by one; else none."""

    # ---- loading ------------------------------------------------------------------------------

    def parameters(self) -> Parameters:
        """`weight`, whatever tensors stand for it, and perhaps `bias`."""
        found = super().parameters()
        bundle = Bundle(self._choose, self._load_bundle)
        return {**found, "weight": replace(found["weight"], bundle=bundle)}

    def _choose(self, parts: Sequence[StoredPart]) -> list[Collection[str]]:
        columns = self.spec.in_features
        self._parts = parts
        self._schemes = [self._settled(part, columns) for part in parts]
        return [
            _taken(part, scheme, columns) for part, scheme in zip(parts, self._schemes, strict=True)
        ]

    def _settled(self, part: StoredPart, columns: int) -> Scheme | None:
        """What both the configuration and the tensors say that a layer is."""
        scheme = self._checkpoint.scheme(part, columns)
        if scheme is None:
            _check_plain(part, columns)
            return None
        wanted = scheme.tensors(part.rows, columns)
        left_out = _LEFT_OUT.fullmatch(part.name) and not _is_quantised(part)
        if left_out and (missing_of(part, wanted) or _is_float(part)):
            _check_plain(part, columns)
            return None
        check_headers(part, scheme, wanted)
        return scheme

    def _load_bundle(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        layers = zip(self._parts, self._schemes, tensors, strict=True)
        self._pieces = [self._piece(*layer) for layer in layers]
        self._load_parts([], self.spec.dtype)

    def _piece(
        self, part: StoredPart, scheme: Scheme | None, tensors: Mapping[str, Tensor]
    ) -> CodedWeight | Tensor:
        if scheme is None:
            weight = tensors["weight"]
            return weight if part.change is None else part.change(weight)
        try:
            coded = scheme.decode(LayerData(part, self.spec.in_features, tensors))
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {part.name!r} ({scheme.label}): {error.message}") from None
        return coded if part.change is None else _laid_out(coded, part.change)

    def made_of(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Any:
        """Prepared as one weight if all parts are alike, else part by part."""
        pieces, self._pieces = self._pieces, None
        if pieces is None:
            return super().made_of(parts, dtype, bias)
        coded = [piece for piece in pieces if isinstance(piece, CodedWeight)]
        if not coded:
            plain = [piece for piece in pieces if isinstance(piece, Tensor)]
            return super().made_of(plain, dtype, bias)
        if len(coded) == len(pieces) and _alike(coded):
            return self._coded([_fitting(piece, self.spec) for piece in coded], bias)
        if _EXPERT.search(self.spec.name):
            return super().made_of([_dense(piece) for piece in pieces], dtype, bias)
        rows = [piece.shape[0] for piece in pieces]
        biases = [None] * len(rows) if bias is None else list(bias.split(rows))
        self._beside = [self._alone(*each) for each in zip(pieces, biases, strict=True)]
        return self._beside

    def _coded(self, pieces: list[CodedWeight], bias: Tensor | None, gated: bool = True) -> Any:
        spec = self.spec
        try:
            return self._ops.prepare_coded(
                pieces, bias, gated=spec.gated and gated, leaves=spec.leaves, dtype=spec.dtype
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {spec.name}: {error.message}") from None

    def _alone(self, piece: CodedWeight | Tensor, bias: Tensor | None) -> Any:
        spec = self.spec
        if isinstance(piece, CodedWeight):
            return self._coded([_fitting(piece, spec)], bias, gated=False)
        return self._ops.prepare_linear([piece], bias, dtype=spec.dtype, leaves=spec.leaves)

    # ---- products -----------------------------------------------------------------------------

    def apply(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """See `LinearMethod.apply`."""
        if not self._beside:
            return super().apply(x, out_dtype, keep)
        return torch.cat([self._ops.linear(x, part, out_dtype) for part in self._beside], 1)

    def gated(self, x: Tensor, activation: str, keep: str | None = None) -> Tensor:
        """See `LinearMethod.gated`."""
        if not self._beside:
            return super().gated(x, activation, keep)
        return LinearMethod.gated(self, x, activation, keep)

    def likeliest(self, x: Tensor) -> Tensor:
        """See `LinearMethod.likeliest`."""
        return LinearMethod.likeliest(self, x) if self._beside else super().likeliest(x)

    @property
    def prepared(self) -> Any:
        """See `LinearMethod.prepared`."""
        return None if self._beside else super().prepared

    # ---- for another process ------------------------------------------------------------------

    def _keep(self) -> Any:
        if not self._beside:
            return super()._keep()
        assert self._ops.keep_linear is not None
        return [self._ops.keep_linear(part) for part in self._beside]

    def _restore(self, kept: Any) -> None:
        if not isinstance(kept, list):
            super()._restore(kept)
            return
        assert self._ops.restore_linear is not None, "whoever keeps it restores it"
        self._prepared = self._beside = [self._ops.restore_linear(part) for part in kept]


def _is_float(part: StoredPart) -> bool:
    weight = part.tensors.get("weight")
    return weight is not None and weight.dtype in FLOATS


def _is_quantised(part: StoredPart) -> bool:
    """Whether there is more than a float weight."""
    return not _is_float(part) or any("scale" in name for name in part.tensors)


def _check_plain(part: StoredPart, columns: int) -> None:
    """Refuse a layer that is said to be as it was, and is not."""
    if not _is_float(part):
        raise contradiction(part, "not quantised", "it has no weight of a float type")
    shape = part.tensors["weight"].shape
    if part.change is not None and len(shape) == 2:
        shape = tuple(part.change(torch.empty(shape, device="meta")).shape)
    if shape != (part.rows, columns):
        want = [part.rows, columns]
        raise contradiction(part, "not quantised", f"its weight is {list(shape)}, not {want}")


def _alike(coded: Sequence[CodedWeight]) -> bool:
    """Whether one product can do all."""
    first = coded[0]
    groups = sorted({piece.group for piece in coded})
    return (
        all((p.kind, p.activations) == (first.kind, first.activations) for p in coded)
        and all(group % groups[0] == 0 for group in groups)
        and all(_same_order(piece, first) for piece in coded)
    )


def _same_order(one: CodedWeight, other: CodedWeight) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _fitting(coded: CodedWeight, spec: LinearSpec) -> CodedWeight:
    """In groups small enough that none crosses from one leaf to the next: the same weight."""
    leaf = spec.in_features // spec.leaves
    if coded.group >= spec.in_features or leaf % coded.group == 0:
        return coded
    return coded.in_groups_of(math.gcd(coded.group, leaf))


def _dense(piece: CodedWeight | Tensor) -> Tensor:
    return piece.dequantise() if isinstance(piece, CodedWeight) else piece


def _taken(part: StoredPart, scheme: Scheme | None, columns: int) -> Collection[str]:
    if scheme is None:
        return {"weight"}
    return {name for name in scheme.tensors(part.rows, columns) if name in part.tensors}


def _laid_out(coded: CodedWeight, change: Callable[[Tensor], Tensor]) -> CodedWeight:
    """With the rows in the family's order. Where a family has plain weights the other way round,
    codes are rows of outputs all the same."""
    if change is transposed:
        return coded
    zeros = None if coded.zeros is None else change(coded.zeros)
    return replace(coded, codes=change(coded.codes), scales=change(coded.scales), zeros=zeros)
