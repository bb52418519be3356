"""Linear layers of quantised checkpoints: each is quantised in its own way, or left as it was.

A checkpoint's format (`CheckpointFormat`) says by a layer's name how it is quantised (`Scheme`).
Its tensors decide too: what both say must agree. Layers that the model stacks may differ from each
other; such a stack becomes one weight where that changes no number, else it is multiplied part by
part. One layer is unpacked at a time.
Knows no format and no kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.layers.linear_method import LinearMethod, LinearSpec, PlainMethod, WeightFormat
from quire.layers.parameter import Bundle, Parameter, Parameters
from quire.logger import get_logger
from quire.quantization.entries import spellings
from quire.quantization.invented import invented
from quire.quantization.parts import Piece, as_one, dense, takes_floats
from quire.quantization.scheme import (
    FLOATS,
    OF_ACTIVATIONS,
    LayerData,
    Scheme,
    check_headers,
    contradiction,
    missing_of,
    of_integers,
)
from quire.weights.bundles import StoredPart
from quire.weights.names import GATE_UP, QKV, transposed

logger = get_logger(__name__)

_LEFT_OUT: Final = re.compile(r"(.*\.)?(lm_head|output|embed_\w+|gate|router|shared_expert_gate)")
"""Layers that writers leave as they are without a word in the configuration."""
_STACKS: Final = {merge.target: merge.parts for merge in (QKV, GATE_UP)}
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
    """A `quire.layers.linear_method.WeightFormat` out of a `CheckpointFormat`.

    Args:
        codes_embeddings: Rows of embeddings may be quantised, too, as those of layers are.
    """

    def __init__(self, checkpoint: CheckpointFormat, codes_embeddings: bool = False) -> None:
        self.checkpoint = checkpoint
        self.codes_embeddings = codes_embeddings

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        return CheckpointMethod(spec, self.checkpoint)


class PlannedWeight(NamedTuple):
    """What the headers say of one layer."""

    label: str
    """See `Scheme.label`; of a layer that is not quantised, its type."""
    activations: str
    """See `CodedWeight.activations`."""
    weights: int
    nbytes: int
    """In the file, with scales."""


def read_as_floats(weights: WeightFormat, spec: LinearSpec, weight: Parameter) -> Parameter:
    """A parameter that takes a layer's weight as floats, however the checkpoint keeps it: for
    layers that are multiplied with in a way of their own."""
    if not isinstance(weights, QuantisedFormat):
        return weight
    method = CheckpointMethod(spec, weights.checkpoint)

    def load(tensors: Sequence[Mapping[str, Tensor]]) -> None:
        pieces = [dense(piece) for piece in method.pieces(tensors)]
        weight.load(torch.cat(pieces).to(spec.dtype))

    return replace(weight, bundle=Bundle(method.choose, load))


class CheckpointMethod(PlainMethod):
    """A layer of such a checkpoint. What it is shows when the checkpoint is opened."""

    def __init__(self, spec: LinearSpec, checkpoint: CheckpointFormat) -> None:
        super().__init__(spec)
        self._checkpoint = checkpoint
        self._parts: Sequence[StoredPart] = ()
        self._schemes: Sequence[Scheme | None] = ()
        self._pieces: list[Piece] | None = None
        self._beside: list[Any] = []
        """If the layer is no single prepared weight: what it is instead."""
        self._form = ""

    # ---- loading ------------------------------------------------------------------------------

    def parameters(self) -> Parameters:
        """`weight`, whatever tensors stand for it, and perhaps `bias`."""
        found = super().parameters()
        bundle = Bundle(self.choose, self._load_bundle)
        weight = replace(found["weight"], bundle=bundle, form=f"{of_integers()} activations")
        return {**found, "weight": weight}

    def _load_weight(self, tensor: Tensor) -> None:
        """Of random weights: there is no checkpoint to be asked, its configuration alone."""
        pieces: list[Piece] = []
        try:
            for (name, rows), plain in zip(self._named, self._split(tensor), strict=True):
                scheme = self._invented_scheme(StoredPart(name, rows, {}))
                self._schemes = [*self._schemes, scheme]
                columns = self.spec.in_features
                pieces.append(plain if scheme is None else invented(scheme, name, rows, columns))
        except ModelLoadError:
            self._schemes = ()
            logger.warning_once(
                "--load-format dummy: layers of this checkpoint's format are kept in the model's "
                "type"
            )
            super()._load_weight(tensor)
            return
        self._pieces = pieces
        self._load_parts([], tensor.dtype)

    @property
    def _named(self) -> list[tuple[str, int]]:
        """Name and rows of each layer that is stacked in this one."""
        head, dot, last = self.spec.name.rpartition(".")
        names = _STACKS.get(last, ())
        if len(names) != len(self.spec.parts):
            return [(self.spec.name, self.spec.out_features)]
        return [(head + dot + n, rows) for n, rows in zip(names, self.spec.parts, strict=True)]

    def _split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.split([rows for _, rows in self._named]))

    def _invented_scheme(self, part: StoredPart) -> Scheme | None:
        if _LEFT_OUT.fullmatch(part.name):
            return None
        return self._checkpoint.scheme(part, self.spec.in_features)

    def choose(self, parts: Sequence[StoredPart]) -> list[Collection[str]]:
        """See `Bundle.choose`."""
        columns = self.spec.in_features
        self._parts = parts
        self._schemes = [self._settled(part, columns) for part in parts]
        return [
            _taken(part, scheme, columns) for part, scheme in zip(parts, self._schemes, strict=True)
        ]

    def _settled(self, part: StoredPart, columns: int) -> Scheme | None:
        """What both the configuration and the tensors say that a layer is."""
        scheme = self._said_of(part, columns)
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

    def _said_of(self, part: StoredPart, columns: int) -> Scheme | None:
        """What the configuration says of it, under the name that fits the tensors if it has two."""
        found = [
            self._checkpoint.scheme(replace(part, name=name), columns)
            for name in spellings(part.name)
        ]
        plain = _is_float(part)
        return next((scheme for scheme in found if (scheme is None) == plain), found[0])

    def planned(self) -> list[PlannedWeight]:
        """What became of each part, once they were chosen."""
        columns, plain = self.spec.in_features, super().form
        return [
            PlannedWeight(
                plain if scheme is None else scheme.label,
                "float" if scheme is None else scheme.activations,
                part.rows * columns,
                sum(part.tensors[name].nbytes for name in _taken(part, scheme, columns)),
            )
            for part, scheme in zip(self._parts, self._schemes, strict=True)
        ]

    def _load_bundle(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        self._pieces = self.pieces(tensors)
        self._load_parts([], self.spec.dtype)

    def pieces(self, tensors: Sequence[Mapping[str, Tensor]]) -> list[Piece]:
        """The weights of the parts that were chosen.

        Raises:
            ModelLoadError: some tensors hold what cannot be.
        """
        layers = zip(self._parts, self._schemes, tensors, strict=True)
        return [self._piece(*layer) for layer in layers]

    def _piece(
        self, part: StoredPart, scheme: Scheme | None, tensors: Mapping[str, Tensor]
    ) -> Piece:
        if scheme is None:
            weight = tensors["weight"]
            return weight if part.change is None else part.change(weight)
        try:
            coded = scheme.decode(LayerData(part, self.spec.in_features, tensors))
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {part.name!r} ({scheme.label}): {error.message}") from None
        return coded if part.change is None else _laid_out(coded, part.change)

    def made_of(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Any:
        """Prepared as one weight if all parts can be one, else part by part."""
        pieces, self._pieces = self._pieces, None
        if pieces is None:
            return super().made_of(parts, dtype, bias)
        plain = [piece for piece in pieces if isinstance(piece, Tensor)]
        if len(plain) == len(pieces):
            return super().made_of(plain, dtype, bias)
        self._form = self._said(pieces)
        together = as_one(pieces)
        if together is not None:
            return self._coded(together, bias, self.spec.gated)
        if all(map(takes_floats, pieces)) or _EXPERT.search(self.spec.name):
            return super().made_of([dense(piece) for piece in pieces], dtype, bias)
        rows = [piece.shape[0] for piece in pieces]
        biases = [None] * len(rows) if bias is None else list(bias.split(rows))
        self._beside = [self._part(*each) for each in zip(pieces, biases, strict=True)]
        return self._beside

    def _said(self, pieces: Sequence[Piece]) -> str:
        """How the layer is kept, for people."""
        plain = super().form
        labels = dict.fromkeys(plain if s is None else s.label for s in self._schemes)
        kinds = {"float" if takes_floats(piece) else "int8" for piece in pieces}
        return f"{' and '.join(labels)} with {' and '.join(sorted(kinds))} activations"

    def _coded(
        self, pieces: Sequence[CodedWeight], bias: Tensor | None, gated: bool = False
    ) -> Any:
        """One prepared weight."""
        spec = self.spec
        coded = [fitting(piece, spec) for piece in pieces]
        try:
            return self._ops.prepare_coded(
                coded, bias, gated=gated, leaves=spec.leaves, dtype=spec.dtype
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {spec.name}: {error.message}") from None

    def _part(self, piece: Piece, bias: Tensor | None) -> Any:
        if isinstance(piece, CodedWeight):
            return self._coded([piece], bias)
        spec = self.spec
        return self._ops.prepare_linear([piece], bias, dtype=spec.dtype, leaves=spec.leaves)

    @property
    def form(self) -> str:
        """See `LinearMethod.form`."""
        return self._form or super().form

    @property
    def nbytes(self) -> int:
        """See `LinearMethod.nbytes`."""
        return sum(part.nbytes for part in self._beside) if self._beside else super().nbytes

    # ---- products -----------------------------------------------------------------------------

    def apply(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """See `LinearMethod.apply`."""
        if not self._beside:
            return super().apply(x, out_dtype, keep)
        found = [self._ops.linear(x, part, out_dtype) for part in self._beside]
        return torch.cat(found, 1)

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
        assert self._ops.keep_linear is not None
        beside = [self._ops.keep_linear(part) for part in self._beside]
        whole = None if beside else super()._keep()
        return {"form": self._form, "whole": whole, "beside": beside}

    def _restore(self, kept: Any) -> None:
        self._form = kept["form"]
        if kept["whole"] is not None:
            super()._restore(kept["whole"])
            return
        assert self._ops.restore_linear is not None, "whoever keeps it restores it"
        self._beside = [self._ops.restore_linear(part) for part in kept["beside"]]
        self._prepared = self._beside


def _is_float(part: StoredPart) -> bool:
    weight = part.tensors.get("weight")
    return weight is not None and weight.dtype in FLOATS


def _is_quantised(part: StoredPart) -> bool:
    """Whether there is more than a float weight."""
    others = part.tensors.keys() - OF_ACTIVATIONS
    return not _is_float(part) or any("scale" in n or n.startswith("weight_") for n in others)


def _check_plain(part: StoredPart, columns: int) -> None:
    """Refuse a layer that is said to be as it was, and is not."""
    if not _is_float(part):
        raise contradiction(part, "not quantised", "it has no weight of a float type")
    of_codes = [name for name in part.tensors if name.startswith("weight_")]
    if of_codes:
        raise contradiction(part, "not quantised", f"it has {', '.join(of_codes)}")
    shape = part.tensors["weight"].shape
    if part.change is not None and len(shape) == 2:
        shape = tuple(part.change(torch.empty(shape, device="meta")).shape)
    if shape != (part.rows, columns):
        want = [part.rows, columns]
        raise contradiction(part, "not quantised", f"its weight is {list(shape)}, not {want}")


def fitting(coded: CodedWeight, spec: LinearSpec) -> CodedWeight:
    """In groups small enough that none crosses from one leaf to the next: the same weight. With
    float activations they may cross."""
    leaf = spec.in_features // spec.leaves
    may_cross = coded.activations == "float" or spec.leaves == 1
    if may_cross or coded.group >= spec.in_features or leaf % coded.group == 0:
        return coded
    return coded.in_groups_of(math.gcd(coded.group, leaf))


def _taken(part: StoredPart, scheme: Scheme | None, columns: int) -> Collection[str]:
    """Names of the tensors that are read, or read past."""
    of_weight = {"weight"} if scheme is None else scheme.tensors(part.rows, columns).keys()
    return part.tensors.keys() & (of_weight | OF_ACTIVATIONS)


def _laid_out(coded: CodedWeight, change: Callable[[Tensor], Tensor]) -> CodedWeight:
    """With the rows in the family's order. Where a family has plain weights the other way round,
    codes are rows of outputs all the same."""
    if change is transposed:
        return coded
    minima = None if coded.minima is None else change(coded.minima)
    zeros = None if coded.zeros is None else change(coded.zeros)
    codes, scales = change(coded.codes), change(coded.scales)
    return replace(coded, codes=codes, scales=scales, zeros=zeros, minima=minima)
