"""What a reader of one way to quantise says: its tensors, and what they mean.

A `Scheme` is one row of a checkpoint's configuration: "int4 in groups of 128". It names the tensors
that a layer has then, with shapes and types, and turns them into a `CodedWeight`. `LayerData` is
what it reads from, and refuses what cannot be right by the tensor's name. Knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from quire import envs
from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight, all_numbers
from quire.quantization.bits import powers_of_two
from quire.weights.bundles import StoredPart

FLOATS: Final = frozenset({"F32", "F16", "BF16"})
OF_ACTIVATIONS: Final = frozenset({
    "input_scale", "input_zero_point", "output_scale", "output_zero_point",
    "activation_scale", "input_scale_ub", "input_global_scale",
})  # fmt: skip
"""Tensors that any layer may have and that are not read: they say how activations were rounded,
whose scales are found for each row here."""
_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor that a scheme has."""

    types: frozenset[str]
    """Types that it may have, as the checkpoint's format names them."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Shapes that it may have; `None`: any, `Scheme.decode` looks at it."""
    optional: bool = False
    """A checkpoint may leave it out."""


class Scheme(Protocol):
    """One way in which the weight of a layer is quantised."""

    @property
    def label(self) -> str:
        """For people: `int4 in groups of 128`."""
        ...

    @property
    def activations(self) -> str:
        """See `CodedWeight.activations`."""
        ...

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """Those of the weight of a layer `[N, K]`, by what follows the layer's name."""
        ...

    def decode(self, layer: LayerData) -> CodedWeight:
        """The weight.

        Raises:
            ModelLoadError: the tensors contradict each other or hold what cannot be.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerData:
    """The tensors of one layer, as the checkpoint has them."""

    part: StoredPart
    columns: int
    """K."""
    tensors: Mapping[str, Tensor]

    @property
    def rows(self) -> int:
        """N."""
        return self.part.rows

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def refuse(self, name: str, why: str) -> ModelLoadError:
        """An error about a tensor."""
        return ModelLoadError(f"tensor {self.part.tensors[name].name!r}: {why}")

    def floats(self, name: str) -> Tensor:
        """A tensor of scales as float32.

        Raises:
            ModelLoadError: not all of it are finite numbers.
        """
        tensor = self.tensors[name]
        if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            raw = tensor.view(torch.uint8)
            if bool((raw == 255).any()):
                raise self.refuse(name, "holds exponents of 255, which are no numbers")
            return powers_of_two(raw)
        values = tensor.to(torch.float32)
        if not bool(values.isfinite().all()):
            at = values.isfinite().logical_not().nonzero()[0].tolist()
            raise self.refuse(name, f"must hold finite numbers, got {_item(values, at)} at {at}")
        return values

    def e4m3(self, name: str) -> Tensor:
        """Codes of float8 e4m3, perhaps stored as bytes or words of them.

        Raises:
            ModelLoadError: some are NaN.
        """
        codes = self.tensors[name].view(torch.float8_e4m3fn)
        if not all_numbers(codes):
            raise self.refuse(name, "holds codes that are NaN")
        return codes


def _item(values: Tensor, at: list[int]) -> float:
    return float(values[tuple(at)])


def missing_of(part: StoredPart, wanted: Mapping[str, Wanted]) -> list[str]:
    """Tensors that the scheme needs and the checkpoint lacks."""
    return [n for n, w in wanted.items() if not w.optional and n not in part.tensors]


def check_headers(part: StoredPart, scheme: Scheme, wanted: Mapping[str, Wanted]) -> None:
    """Compare a layer's headers with what the scheme has.

    Raises:
        ModelLoadError: they contradict each other; the message has both.
    """
    missing = missing_of(part, wanted)
    if missing:
        raise contradiction(part, scheme.label, f"{', '.join(missing)} missing")
    for name, want in wanted.items():
        tensor = part.tensors.get(name)
        if tensor is None:
            continue
        if tensor.dtype not in want.types:
            types = " or ".join(sorted(want.types))
            raise contradiction(part, scheme.label, f"{name} is {tensor.dtype}, not {types}")
        if want.shapes is not None and tensor.shape not in want.shapes:
            shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in want.shapes))
            raise contradiction(part, scheme.label, f"{name} is {list(tensor.shape)}, not {shapes}")


def contradiction(part: StoredPart, said: str, but: str) -> ModelLoadError:
    """An error that has both: what the configuration says of a layer, and what its tensors are."""
    names = [f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in part.tensors.items()]
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return ModelLoadError(
        f"the checkpoint's configuration says that {part.name!r} is {said}, but {but}. "
        f"It has {shown}"
    )


def of_integers() -> str:
    """`CodedWeight.activations` of weights that are small whole numbers and whose checkpoint says
    nothing of activations."""
    return "int8" if envs.CPU_INT4_W4A8 else "float"


def per_row(scales: Tensor, rows: int) -> Tensor:
    """A scale of the whole tensor, or one for each row, as `[N, 1]`."""
    return scales.reshape(-1, 1).expand(rows, 1).contiguous()


def blocks_to_rows(scales: Tensor, rows: int, block_rows: int) -> Tensor:
    """Scales of blocks `[⌈N / block_rows⌉, G]` as those of rows `[N, G]`."""
    return scales.repeat_interleave(block_rows, 0)[:rows].contiguous()


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)
