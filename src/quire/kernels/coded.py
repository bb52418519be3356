"""A quantised weight as numbers: what every quantised checkpoint becomes before kernels pack it.

`CodedWeight` says what the codes mean; `KINDS` what a code of each kind is worth. Readers of
checkpoint formats make one; `ops.prepare_coded` takes it. Knows no checkpoint and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError

ACTIVATIONS: Final = ("int8", "float")
"""What the rows of a product are: int8 codes with a scale for each row, or floats as they are."""


@dataclass(frozen=True, slots=True)
class CodeKind:
    """What a code is worth."""

    dtype: torch.dtype
    """In which codes are kept, one to an element."""
    lowest: int = 0
    highest: int = 255
    """Between which codes are, both included. Of no meaning for float types."""
    values: tuple[float, ...] = ()
    """What each code is worth; empty: the number it is."""
    step: float = 0.0
    """All values are whole multiples of it, at most 255 apart; 0: they are not. What is not can
    only be multiplied with activations that are floats."""
    bits: int = 8


KINDS: Final[dict[str, CodeKind]] = {
    "int8": CodeKind(torch.int8, -128, 127, step=1.0),
    "int4": CodeKind(torch.uint8, 0, 15, step=1.0, bits=4),
    "e4m3": CodeKind(torch.float8_e4m3fn),
    "e5m2": CodeKind(torch.float8_e5m2),
    "e2m1": CodeKind(
        torch.uint8, 0, 15, step=0.5, bits=4,
        # OCP Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent, one of mantissa
        values=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0,
                -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    ),
    "nf4": CodeKind(
        torch.uint8, 0, 15, bits=4,
        # QLoRA (Dettmers et al. 2023), appendix E
        values=(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
                -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
                0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
                0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                0.7229568362236023, 1.0),
    ),
    "fp4": CodeKind(
        torch.uint8, 0, 15, bits=4,
        # bitsandbytes 0.50, functional.get_4bit_type("fp4"): sign, two bits of exponent, one of
        # mantissa, divided by the largest
        values=(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5,
                0.1666666716337204, 0.25,
                0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5,
                -0.1666666716337204, -0.25),
    ),
    "iq4_nl": CodeKind(
        torch.uint8, 0, 15, step=1.0, bits=4,
        # kvalues_iq4nl of ggml
        values=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    ),
}  # fmt: skip
"""By name. `int4` holds 2 and 3 bit codes as well: with zeros, any code from 0 to 15."""


LARGEST: Final = 3.38e38
"""Of a weight: what bfloat16 and float32 still hold."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A quantised weight [N, K] as numbers, whatever checkpoint it came from.

    weight[n, k] = (value(codes[n, k]) - zeros[n, g]) * scales[n, g] - minima[n, g] with
    g = k // group, where k counts in the order in which the codes stand. The first difference is
    exact, the product rounded to float32, then the second difference.

    Raises:
        ModelLoadError: sizes or types do not fit, a scale is not finite, or a code or a zero is out
            of range; the message begins with what is wrong, so put the layer's name before it.
    """

    kind: str
    """A name in `KINDS`."""
    codes: Tensor
    """[N, K], of the kind's type."""
    scales: Tensor
    """float32 [N, G], G = ceil(K / group)."""
    zeros: Tensor | None
    """Of an integer type, [N, G], in units of codes; `None`: 0. Only for kinds without `values`,
    and in the range of codes."""
    group: int
    """Columns that have one scale; K: one scale for each row. The last group may be shorter."""
    activations: str
    """One of `ACTIVATIONS`: part of what the layer is, never chosen by the number of rows."""
    order: Tensor | None = None
    """int64 [K]: column k of `codes` is column order[k] of the weight (desc_act); `None`: k."""
    minima: Tensor | None = None
    """float32 [N, G], as GGUF has them; `None`: 0."""

    def __post_init__(self) -> None:
        """Refuse what is no weight."""
        kind = self._kind()
        if self.codes.dim() != 2 or self.codes.dtype != kind.dtype:
            raise ModelLoadError(
                f"codes of kind {self.kind} must be {_name(kind.dtype)} [N, K], got "
                f"{_name(self.codes.dtype)} {list(self.codes.shape)}"
            )
        n, k = self.codes.shape
        if type(self.group) is not int or not 1 <= self.group <= max(1, k):
            raise ModelLoadError(f"a group must have 1 to {k} columns (K), got {self.group!r:.40}")
        if self.activations not in ACTIVATIONS:
            known = " or ".join(ACTIVATIONS)
            raise ModelLoadError(f"activations must be {known}, got {self.activations!r:.40}")
        if self.activations == "int8" and not kind.step:
            raise ModelLoadError(
                f"weights of kind {self.kind} are no whole numbers, so activations must be float"
            )
        self._check_scales("scales", self.scales, n, -(-k // self.group))
        if self.minima is not None:
            self._check_scales("minima", self.minima, n, -(-k // self.group))
        self._check_codes(kind)
        self._check_products(kind)
        if self.order is not None:
            self._check_order(k)

    def _kind(self) -> CodeKind:
        if self.kind not in KINDS:
            raise ModelLoadError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r:.40}")
        return KINDS[self.kind]

    def _check_scales(self, what: str, numbers: Tensor, n: int, groups: int) -> None:
        if tuple(numbers.shape) != (n, groups) or numbers.dtype != torch.float32:
            raise ModelLoadError(
                f"{what} must be float32 [{n}, {groups}] for groups of {self.group}, got "
                f"{_name(numbers.dtype)} {list(numbers.shape)}"
            )
        if not bool(numbers.isfinite().all()):
            bad = numbers.isfinite().logical_not().nonzero()[0].tolist()
            raise ModelLoadError(
                f"{what} must be finite, got {numbers[bad[0], bad[1]]} for row {bad[0]}, "
                f"group {bad[1]}"
            )

    def _check_codes(self, kind: CodeKind) -> None:
        if kind.dtype.is_floating_point:
            if not all_numbers(self.codes):
                raise ModelLoadError(f"codes of kind {self.kind} must be finite numbers")
        elif kind.bits < 8:
            _check_range("codes", self.codes, kind)
        if self.zeros is None:
            return
        if kind.values or kind.dtype.is_floating_point:
            raise ModelLoadError(f"weights of kind {self.kind} have no zeros")
        if self.zeros.shape != self.scales.shape or self.zeros.dtype.is_floating_point:
            raise ModelLoadError(
                f"zeros must be integers {list(self.scales.shape)}, got "
                f"{_name(self.zeros.dtype)} {list(self.zeros.shape)}"
            )
        _check_range("zeros", self.zeros, kind)

    def _check_products(self, kind: CodeKind) -> None:
        """No code may stand for infinity, whichever are there: a look at scales is enough."""
        if not self.scales.numel():
            return
        largest, most = float(self.scales.abs().max()), _widest(kind, self.zeros is not None)
        if largest * most > LARGEST:
            raise ModelLoadError(
                f"scales must be at most {LARGEST / most:.3g} for codes up to {most:g}, as larger "
                f"weights are no finite numbers; got {largest:.3g}"
            )

    def _check_order(self, k: int) -> None:
        order = self.order
        assert order is not None
        right = order.dtype == torch.int64 and tuple(order.shape) == (k,)
        if not right or not torch.equal(order.sort().values, torch.arange(k, device=order.device)):
            raise ModelLoadError(f"order must name each of the {k} columns once")

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1]

    def values(self) -> Tensor:
        """value(code) - zero as float32 [N, K], exact, in the order in which codes stand."""
        kind = KINDS[self.kind]
        if kind.values:
            table = torch.tensor(kind.values, dtype=torch.float32, device=self.codes.device)
            return table[self.codes.to(torch.int64)]
        numbers = self.codes.to(torch.float32)
        if self.zeros is None:
            return numbers
        return numbers.sub_(self._spread(self.zeros.to(torch.float32)))

    def dequantise(self) -> Tensor:
        """The weight, float32 [N, K], columns as the activations have them: the definition."""
        weight = self.values().mul_(self._spread(self.scales))
        if self.minima is not None:
            weight.sub_(self._spread(self.minima))
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """[N, G] for each column."""
        return of_groups.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]

    def in_groups_of(self, group: int) -> CodedWeight:
        """The same weight with smaller groups.

        Raises:
            ModelLoadError: the groups that it has are no multiples of `group`.
        """
        k = self.codes.shape[1]
        if self.group % group and self.group < k:
            raise ModelLoadError(f"groups of {self.group} cannot be cut into groups of {group}")
        first = torch.arange(0, k, group, device=self.scales.device) // self.group
        zeros = None if self.zeros is None else self.zeros[:, first]
        minima = None if self.minima is None else self.minima[:, first]
        scales = self.scales[:, first]
        return replace(self, scales=scales, zeros=zeros, minima=minima, group=group)

    def as_int8(self) -> CodedWeight:
        """The same weight in codes of 8 bits, whose values are whole numbers.

        Raises:
            ModelLoadError: its values are no whole multiples of one number.
        """
        kind = KINDS[self.kind]
        if not kind.step:
            raise ModelLoadError(f"weights of kind {self.kind} are no whole numbers")
        if self.kind == "int8":
            return self
        codes = self.codes.to(torch.int8)
        if kind.values:
            whole = [round(value / kind.step) for value in kind.values]
            codes = torch.tensor(whole, dtype=torch.int8)[self.codes.to(torch.int64)]
        # Steps are powers of two: the product is exact.
        return replace(self, kind="int8", codes=codes, scales=self.scales * kind.step)


def all_numbers(codes: Tensor) -> bool:
    """Whether float8 codes are all finite."""
    raw = codes.view(torch.uint8)
    if not raw.numel():
        return True
    if codes.dtype == torch.float8_e4m3fn:
        # NaN is 0x7f and 0xff, the largest bytes with a sign and without; there is no infinity.
        return int(raw.max()) < 255 and int(raw.view(torch.int8).max()) < 127
    return int((raw & 0x7C).max()) < 0x7C


def concat(parts: Sequence[CodedWeight]) -> CodedWeight:
    """Layers whose rows are stacked, as one. Scales of whole tensors are to be expanded to rows
    before; groups may differ if the larger are multiples of the smallest.

    Raises:
        ModelLoadError: they differ in what one product cannot do differently.
    """
    if len(parts) == 1:
        return parts[0]
    group = min(part.group for part in parts)
    parts = [part if part.group == group else part.in_groups_of(group) for part in parts]
    first = parts[0]
    for what in ("kind", "activations"):
        said = {getattr(part, what) for part in parts}
        if len(said) > 1:
            raise ModelLoadError(f"layers stacked in one must have the same {what}, got {said}")
    if any(part.shape[1] != first.shape[1] or not _same(part.order, first.order) for part in parts):
        raise ModelLoadError("layers stacked in one must have the same columns in the same order")
    codes, scales = (
        torch.cat([getattr(part, what) for part in parts]) for what in ("codes", "scales")
    )
    zeros = _stacked([part.zeros for part in parts], parts, torch.int32)
    minima = _stacked([part.minima for part in parts], parts, torch.float32)
    return replace(first, codes=codes, scales=scales, zeros=zeros, minima=minima)


def _stacked(
    given: Sequence[Tensor | None], parts: Sequence[CodedWeight], dtype: torch.dtype
) -> Tensor | None:
    """Numbers of groups, 0 for parts that have none; `None` if none has."""
    if all(numbers is None for numbers in given):
        return None
    return torch.cat(
        [
            torch.zeros_like(part.scales, dtype=dtype) if some is None else some.to(dtype)
            for some, part in zip(given, parts, strict=True)
        ]
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _widest(kind: CodeKind, with_zeros: bool) -> float:
    """The largest size of a code's value, less its zero."""
    if kind.values:
        return max(map(abs, kind.values))
    if kind.dtype.is_floating_point:
        return float(torch.finfo(kind.dtype).max)
    sizes = max(abs(kind.lowest), abs(kind.highest))
    return float(kind.highest - kind.lowest if with_zeros else sizes)


def _check_range(what: str, numbers: Tensor, kind: CodeKind) -> None:
    if not numbers.numel():
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < kind.lowest or high > kind.highest:
        worst = low if low < kind.lowest else high
        raise ModelLoadError(f"{what} must be {kind.lowest} to {kind.highest}, got {worst}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
