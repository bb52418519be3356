"""Quantises an unquantised checkpoint while it is loaded: `--quantization int8`, `int4` and vLLM's
online names.

Layer by layer, some rows at a time: beside the model there is one layer's tensor, as without. What
a weight becomes depends on its own row, group, block or layer alone. Embeddings and heads get 8
bits with `int8` and `int4`, and stay as they are with the others, as in vLLM, unless they are
named; norms, routers and layers with fewer than 32 columns stay. Knows no family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from quire.config.online_schemes import FLAG, GROUPS, SCHEMES, OnlineChoice, OnlinePlan
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.layers.linear_method import PLAIN, LinearMethod, LinearSpec, PlainMethod
from quire.layers.parameter import Parameters
from quire.logger import get_logger
from quire.quantization import online_floats
from quire.quantization.checkpoint import PlannedWeight, fitting
from quire.quantization.entries import matches
from quire.quantization.scheme import ceil_div
from quire.spelling import did_you_mean
from quire.weights.names import GATE_UP, QKV

logger = get_logger(__name__)

INT4_GROUP: Final = GROUPS[0]
"""Columns of one scale: 4.5 bits for each weight."""
_ROWS: Final = 1 << 19
"""Elements that are float32 at a time."""
_LEAST: Final = 1e-30
"""A row whose scale is less counts as zeros."""
_HEADS: Final = ("lm_head", "embed_tokens", "output_layer")
"""Last part of the names of layers as long as the vocabulary."""
_KEPT: Final = ("gate", "shared_expert_gate")
"""Last part of the names of layers that choose and weigh: a rounding chooses other experts."""
_EXPERT: Final = re.compile(r"(.*\.)?experts\.\d+\..*")
_STACKS: Final = {merge.target: merge.parts for merge in (QKV, GATE_UP)}


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """How a plan keeps the layers of a model."""

    plan: OnlinePlan
    encoder: bool = False
    """Of an encoder: `int8` leaves activations as they are. An embedding has all of a text's
    rounding errors in it, and no next token that hides them."""
    seen: list[str] = field(default_factory=list)
    """Names of the layers that asked."""
    coded: list[str] = field(default_factory=list)
    """Of those, the ones that are kept as codes."""

    @property
    def codes_embeddings(self) -> bool:
        """Whether an embedding that is no head's is a layer, which may be kept as codes."""
        return True

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """See `WeightFormat`."""
        self.seen.extend(_names(spec))
        choice = self._named(spec)
        if choice is _UNNAMED:
            choice = self._usual(spec)
        if choice is None or spec.in_features < INT4_GROUP:
            return PLAIN.linear_method(spec)
        assert isinstance(choice, OnlineChoice)
        if self.encoder and choice.scheme == "int8":
            choice = replace(choice, scheme="int8_weight_only")
        self.coded.append(spec.name)
        return OnlineMethod(spec, _fits(spec, choice))

    def _named(self, spec: LinearSpec) -> OnlineChoice | None | object:
        """What the plan says of a layer by its name, or by those of all that are stacked in it.

        Raises:
            ConfigError: it says different things of these: they are multiplied together.
        """
        whole, *parts = _names(spec)
        found = self._said_of(whole)
        if found is not _UNNAMED or not parts:
            return found
        said = {part: self._said_of(part) for part in parts}
        if len({id(_UNNAMED) if c is _UNNAMED else c for c in said.values()}) > 1:
            named = [part for part, choice in said.items() if choice is not _UNNAMED]
            raise ConfigError(
                f"{FLAG}: {', '.join(parts)} are multiplied together as {whole}, so all get the "
                f"same scheme; it says different things of {', '.join(named)}: name all of them"
            )
        return said[parts[0]]

    def _said_of(self, name: str) -> OnlineChoice | None | object:
        if any(matches(name, pattern) for pattern in self.plan.ignore):
            return None
        fits = (choice for pattern, choice in self.plan.targets if matches(name, pattern))
        return next(fits, _UNNAMED)

    def _usual(self, spec: LinearSpec) -> OnlineChoice | None:
        """What becomes of a layer of its kind."""
        last = spec.name.rpartition(".")[2]
        if last in _KEPT:
            return None
        if _EXPERT.fullmatch(spec.name):
            return self.plan.moe
        if last in _HEADS and self.plan.linear is not None:
            scheme = self.plan.linear.scheme
            if not SCHEMES[scheme].codes_ends:
                return None
            return OnlineChoice("int8") if scheme == "int4" else self.plan.linear
        return self.plan.linear

    def check_names(self) -> None:
        """Once the model is built: every name is some layer's, and some layer has codes.

        Raises:
            ConfigError: one is not; the message suggests one that is. Or no layer has.
        """
        patterns = [*self.plan.ignore, *(pattern for pattern, _ in self.plan.targets)]
        for pattern in patterns:
            if any(matches(name, pattern) for name in self.seen):
                continue
            if pattern.startswith("re:"):
                logger.warning("%s: %r fits no layer of this model", FLAG, pattern)
                continue
            near = did_you_mean(pattern, self.seen) or f", as {self.seen[0]!r} is"
            raise ConfigError(f"{FLAG}: {pattern!r:.120} is no linear layer of this model{near}")
        if not self.coded:
            why = "it has no experts" if self.plan.linear is None else "all are left out"
            raise ConfigError(
                f"--quantization: no layer of this model would be quantised ({why}); nearest: int8"
            )


_UNNAMED: Final = object()
"""The plan does not name the layer."""


def _names(spec: LinearSpec) -> list[str]:
    """Of a layer: its own, and those of the layers that are stacked in it."""
    head, dot, last = spec.name.rpartition(".")
    parts = _STACKS.get(last, ()) if len(spec.parts) > 1 else ()
    return [spec.name, *(f"{head}{dot}{part}" for part in parts)]


def _fits(spec: LinearSpec, choice: OnlineChoice) -> OnlineChoice:
    """Groups of int4 are made smaller where they would cross from one leaf to the next; where no
    group fits, the layer is kept as int8."""
    if choice.scheme != "int4":
        return choice
    for group in sorted(GROUPS, reverse=True):
        if group <= choice.group and spec.in_features % (spec.leaves * group) == 0:
            return replace(choice, group=group)
    return OnlineChoice("int8")


class OnlineMethod(PlainMethod):
    """A layer of an unquantised checkpoint, kept as codes.

    Args:
        spec: The layer.
        choice: What becomes of it.
    """

    def __init__(self, spec: LinearSpec, choice: OnlineChoice) -> None:
        super().__init__(spec)
        self._choice = choice

    @property
    def activations(self) -> str:
        """See `CodedWeight.activations`."""
        return "int8" if self._choice.scheme in ("int8", "int4", "w8a8_int8") else "float"

    @property
    def form(self) -> str:
        """See `LinearMethod.form`."""
        if self._choice.scheme == "int4":
            return f"int4 in groups of {self._choice.group}"
        if self._choice.scheme in ("int8", "w8a8_int8"):
            return "int8"
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return f"{SCHEMES[self._choice.scheme].about}, products in {dtype}"

    def planned(self) -> list[PlannedWeight]:
        """What will become of it; bytes are those of codes and scales."""
        rows, columns = self.spec.out_features, self.spec.in_features
        bits, scales = _SIZES[self._choice.scheme](rows, columns, self._choice.group)
        nbytes = rows * columns * bits // 8 + scales
        return [PlannedWeight(self.form, self.activations, rows * columns, nbytes)]

    def coded(self, weight: Tensor) -> CodedWeight:
        """A weight `[N, K]` as codes and scales.

        Raises:
            ModelLoadError: it has numbers that are not finite.
        """
        scheme = self._choice.scheme
        if scheme == "int4":
            return int4(weight, self._choice.group)
        return _MAKERS[scheme](weight)

    def made_of(self, parts: Sequence[Tensor], dtype: torch.dtype, bias: Tensor | None) -> Any:
        """See `PlainMethod.made_of`."""
        spec = self.spec
        try:
            coded = [fitting(self.coded(part), spec) for part in parts]
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {spec.name}: {error.message}") from None
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
        scale = _largest(wide).div_(-8.0).to(torch.bfloat16).to(torch.float32)
        scale.masked_fill_(scale == 0, 1.0)
        scales[rows] = scale.squeeze(2)
        given = wide.div_(scale).round_().add_(8.0).clamp_(0, 15)
        # They fit int8, too, which float32 becomes five times as fast as uint8.
        codes.view(torch.int8)[rows] = given.view(-1, k)
    zeros = torch.full((1, 1), 8, dtype=torch.uint8, device=weight.device).expand(n, k // group)
    return CodedWeight("int4", codes, scales, zeros, group, "int8")


def _largest(groups: Tensor) -> Tensor:
    """Of `[N, G, group]` the number of the largest size, the first among equals: `[N, G, 1]`."""
    high, low = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    found = torch.where(high > -low, high, low)
    # amax is ten times as fast as argmax. Which comes first counts only where there are both signs.
    at = (high == -low).squeeze(2).nonzero(as_tuple=True)
    some = groups[at]
    found[at] = some.gather(1, some.abs().argmax(1, keepdim=True))
    return found


def _some_rows(weight: Tensor) -> list[slice]:
    n, k = weight.shape
    step = max(1, _ROWS // max(1, k))
    return [slice(first, min(n, first + step)) for first in range(0, n, step)]


def int8_weight_only(weight: Tensor) -> CodedWeight:
    """As `int8`; activations stay as they are."""
    return replace(int8(weight), activations="float")


_MAKERS: Final[dict[str, Callable[[Tensor], CodedWeight]]] = {
    "int8": int8,
    "w8a8_int8": int8,
    "int8_weight_only": int8_weight_only,
    "fp8_per_tensor": online_floats.fp8_per_tensor,
    "fp8_per_channel": online_floats.fp8_per_channel,
    "fp8_per_block": online_floats.fp8_per_block,
    "mxfp8": online_floats.mxfp8,
    "mxfp4": online_floats.mxfp4,
    "nvfp4_per_token": online_floats.nvfp4,
    "int8_per_channel_weight_only": int8_weight_only,
}
_Sizes = Callable[[int, int, int], tuple[int, int]]
_SIZES: Final[dict[str, _Sizes]] = {
    "int8": lambda n, k, g: (8, 4 * n),
    "w8a8_int8": lambda n, k, g: (8, 4 * n),
    "int8_weight_only": lambda n, k, g: (8, 4 * n),
    "int4": lambda n, k, g: (4, 2 * n * (k // g)),
    "fp8_per_tensor": lambda n, k, g: (8, 4),
    "fp8_per_channel": lambda n, k, g: (8, 4 * n),
    "fp8_per_block": lambda n, k, g: (8, 4 * ceil_div(n, 128) * ceil_div(k, 128)),
    "mxfp8": lambda n, k, g: (8, n * ceil_div(k, 32)),
    "mxfp4": lambda n, k, g: (4, n * ceil_div(k, 32)),
    "nvfp4_per_token": lambda n, k, g: (4, n * ceil_div(k, 16) + 4),
    "int8_per_channel_weight_only": lambda n, k, g: (8, 4 * n),
}
"""Bits of a code and bytes of all scales, by rows, columns and columns of a group."""
