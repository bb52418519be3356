"""What all quantised formats share: a layer's tensors become a `CodedWeight`, then a prepared one.

A format says which tensors a layer has (`CodedTensor`) and how those of one stacked part become a
`CodedWeight`. Waiting for tensors, preparing, multiplying and handing on to another process is
here. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.layers.linear_method import LinearSpec, PreparedMethod
from quire.layers.parameter import WITH_ANOTHER, Parameter, Parameters


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor of a layer, as a checkpoint has it for each stacked part."""

    shape: Callable[[int], tuple[int, ...]]
    """From the rows N of a part to the tensor's shape."""
    stored: frozenset[str] | None
    """Types that it may have, as the checkpoint's format names them (`I32`); `None`: floats."""
    dtype: torch.dtype | None = None
    """Of the parameter, where no checkpoint is read (`--load-format dummy`)."""


Convert = Callable[[Mapping[str, Tensor], int], CodedWeight]
"""From one part's tensors, by name, exactly as the checkpoint has them, and its rows N."""


class CodedMethod(PreparedMethod):
    """A layer with quantised weights.

    Args:
        spec: The layer.
        tensors: Those that stand for the weight, by their names in the checkpoint.
        convert: Makes the weight of each part of them.
    """

    def __init__(
        self, spec: LinearSpec, tensors: Mapping[str, CodedTensor], convert: Convert
    ) -> None:
        super().__init__(spec)
        self._tensors, self._convert = dict(tensors), convert
        self._here: dict[str, list[Tensor]] = {}
        self._bias: Tensor | None = None

    def parameters(self) -> Parameters:
        """The format's tensors, and perhaps `bias`."""
        spec, found = self.spec, Parameters()
        kept = self.kept_form
        for name, tensor in self._tensors.items():
            found[name] = Parameter(
                tensor.shape(spec.out_features),
                partial(self._load_whole, name),
                spec.stacked,
                tensor.dtype,
                tensor.stored,
                load_parts=partial(self._load_parts, name),
                part_shapes=tuple(tensor.shape(rows) for rows in spec.parts),
                kept=kept,
            )
            kept = kept and WITH_ANOTHER
        if spec.bias:
            shape = (spec.out_features,)
            found["bias"] = Parameter(shape, self._load_bias, spec.stacked, kept=kept)
        return found

    def _load_whole(self, name: str, tensor: Tensor) -> None:
        self._load_parts(name, [tensor], tensor.dtype)

    def _load_parts(self, name: str, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """`dtype` is the model's: codes and scales stay what they are."""
        del dtype
        self._here[name] = list(parts)
        self._prepare()

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor
        self._prepare()

    def _prepare(self) -> None:
        """Once all tensors are there. They are let go: they may be memory-mapped."""
        if len(self._here) < len(self._tensors) or (self.spec.bias and self._bias is None):
            return
        spec = self.spec
        try:
            self._prepared = self._ops.prepare_coded(
                self._coded(), self._bias, gated=spec.gated, leaves=spec.leaves, dtype=spec.dtype
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {spec.name}: {error.message}") from error
        self._here, self._bias = {}, None

    def _coded(self) -> list[CodedWeight]:
        """The parts. A checkpoint may have them stacked already."""
        counts = {len(parts) for parts in self._here.values()}
        if len(counts) > 1:
            raise ModelLoadError("some of its tensors are stacked, and others are not")
        rows = self.spec.parts if counts == {len(self.spec.parts)} else (self.spec.out_features,)
        return [
            self._convert({name: parts[i] for name, parts in self._here.items()}, n)
            for i, n in enumerate(rows)
        ]
