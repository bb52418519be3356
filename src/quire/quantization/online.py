"""Quantises an unquantised checkpoint while it is loaded: `--quantization int8` and `int4`.

Layer by layer, some rows at a time: beside the model there is one layer's tensor, as without. What
a weight becomes depends on its own row or group alone. Embeddings and heads get 8 bits in both
schemes; norms, routers and layers with fewer than 32 columns stay as they are. Knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels.coded import CodedWeight
from quire.layers.linear_method import PLAIN, LinearMethod, LinearSpec, PlainMethod
from quire.layers.parameter import Parameters
from quire.quantization.checkpoint import PlannedWeight

INT4_GROUP: Final = 32
"""Columns of one scale: 4.5 bits for each weight."""
_ROWS: Final = 1 << 22
"""Elements that are float32 at a time."""
_LEAST: Final = 1e-30
"""A row whose scale is less counts as zeros."""
_HEADS: Final = ("lm_head", "embed_tokens", "output_layer")
"""Last part of the names of layers as long as the vocabulary."""
_KEPT: Final = ("gate", "shared_expert_gate")
"""Last part of the names of layers that choose and weigh: a rounding chooses other experts."""


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """How one scheme keeps the layers of a model."""

    scheme: str
    """`int8` or `int4`."""
    codes_embeddings: bool = True
    """Whether an embedding that is no head's is kept as codes."""

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        last = spec.name.rpartition(".")[2]
        if last in _KEPT or spec.in_features < INT4_GROUP:
            return PLAIN.linear_method(spec)
        groups = self.scheme == "int4" and last not in _HEADS
        fits = spec.in_features % (spec.leaves * INT4_GROUP) == 0
        return OnlineMethod(spec, INT4_GROUP if groups and fits else 0)


class OnlineMethod(PlainMethod):
    """A layer of an unquantised checkpoint, kept as codes.

    Args:
        spec: The layer.
        group: Columns of one scale of int4; 0: int8, one scale for each row.
    """

    def __init__(self, spec: LinearSpec, group: int) -> None:
        super().__init__(spec)
        self._group = group

    @property
    def form(self) -> str:
        """See `LinearMethod.form`."""
        return f"int4 in groups of {self._group}" if self._group else "int8"

    def planned(self) -> list[PlannedWeight]:
        """What will become of it; bytes are those in memory."""
        weights = self.spec.out_features * self.spec.in_features
        scales = weights // self._group * 2 if self._group else self.spec.out_features * 4
        codes = weights // 2 if self._group else weights
        return [PlannedWeight(self.form, "int8", weights, codes + scales)]

    def made_of(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Any:
        """See `PlainMethod.made_of`."""
        spec = self.spec
        coded = [int4(part, self._group) if self._group else int8(part) for part in parts]
        return self._ops.prepare_coded(
            coded, bias, gated=spec.gated, leaves=spec.leaves, dtype=dtype
        )

    def parameters(self) -> Parameters:
        """See `PlainMethod.parameters`."""
        return {name: replace(p, form=self.form) for name, p in super().parameters().items()}


def int8(weight: Tensor) -> CodedWeight:
    """One scale for each row: max |w| / 127; codes are w / scale, rounded, ties to even."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    for rows in _some_rows(weight):
        wide = weight[rows].to(torch.float32, copy=True)
        scale = wide.abs().amax(1, keepdim=True).div_(127.0)
        scales[rows] = scale.masked_fill_(scale < _LEAST, 1.0)
        codes[rows] = wide.div_(scale).round_().clamp_(-127, 127).to(torch.int8)
    return CodedWeight("int8", codes, scales, None, weight.shape[1], "int8")


def int4(weight: Tensor, group: int) -> CodedWeight:
    """Codes 0 to 15 around 8, one scale for each group of columns.

    The scale is the number of the largest size over -8, so that it has a code of its own (as Q4_0
    of GGUF), rounded to bfloat16, which costs nothing: codes are made for what it is then.
    """
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // group, device=weight.device)
    for rows in _some_rows(weight):
        wide = weight[rows].to(torch.float32, copy=True).view(-1, k // group, group)
        largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
        scale = largest.div_(-8.0).to(torch.bfloat16).to(torch.float32)
        scale.masked_fill_(scale == 0, 1.0)
        scales[rows] = scale.squeeze(2)
        given = wide.div_(scale).round_().add_(8.0).clamp_(0, 15)
        codes[rows] = given.to(torch.uint8).view(-1, k)
    zeros = torch.full((1, 1), 8, dtype=torch.uint8, device=weight.device).expand(n, k // group)
    return CodedWeight("int4", codes, scales, zeros, group, "int8")


def _some_rows(weight: Tensor) -> list[slice]:
    n, k = weight.shape
    step = max(1, _ROWS // max(1, k))
    return [slice(first, min(n, first + step)) for first in range(0, n, step)]
