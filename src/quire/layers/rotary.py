"""Rotary position tables: frequencies, their scalings, and the cosines and sines.

A table is computed once at load for all positions that are served, so a position's entry never
depends on a batch. Frequencies and angles are rounded to float32 where Hugging Face's
implementation rounds them, as when models are trained: 100,000 positions on, exact ones would be
some thousandths of a radian away. Powers, cosines and sines are taken in float64 and then rounded,
so that machines agree. Scalings that Hugging Face chooses anew for each sequence by its length
(`dynamic`, `longrope`) are chosen once, by the greatest length served. Knows the entries of
`config.json`, no family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.spelling import did_you_mean


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of some layers."""

    dim: int
    """Dimensions of a head that are rotated: the first ones."""
    theta: float
    max_position_embeddings: int
    scaling: dict[str, Any] = field(default_factory=dict)
    """`rope_scaling` of the configuration."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1), not (i, i + dim / 2)."""
    original_max_position_embeddings: int | None = None
    """Positions before the context was extended, if the scaling itself does not say."""
    length: int | None = None
    """The greatest length served, if not `max_position_embeddings`."""

    @classmethod
    def of(cls, shape: ModelShape, **changes: Any) -> Rope:
        """What the configuration says, with `changes` over it.

        Raises:
            ModelLoadError: the rotated part of a head is not a whole, even number of dimensions.
        """
        nested = shape.raw.get("rope_parameters") or {}
        part = shape.raw.get("partial_rotary_factor") or nested.get("partial_rotary_factor") or 1.0
        rope = cls(
            int(shape.head_dim * part),
            shape.rope_theta,
            shape.max_position_embeddings,
            shape.rope_scaling or {},
            original_max_position_embeddings=shape.raw.get("original_max_position_embeddings"),
        )
        rope = dataclasses.replace(rope, **changes)
        if rope.dim % 2 or rope.dim < 2:
            raise ModelLoadError(f"head_dim must be even for rotary positions, got {rope.dim}")
        return rope

    @property
    def positions(self) -> int:
        """Those served: rows of the table."""
        return self.length or self.max_position_embeddings

    @property
    def original(self) -> int:
        """Positions before the context was extended."""
        made_for = self.original_max_position_embeddings or self.max_position_embeddings
        return int(_number(self, "original_max_position_embeddings", made_for))

    @property
    def kind(self) -> str:
        """Row of `SCALINGS`."""
        kind = self.scaling.get("rope_type") or self.scaling.get("type") or "default"
        # Phi-3's first configurations say "yarn" or "su" and mean this.
        return "longrope" if "short_factor" in self.scaling else str(kind)


def cos_sin_table(rope: Rope | ModelShape, device: str) -> Tensor:
    """Float32 `[positions, dim]`: cosines, then sines, of each position.

    Raises:
        ModelLoadError: the model asks for a scaling quire does not know, or misses a number; or
            there is no memory for so many positions.
    """
    rope = Rope.of(rope) if isinstance(rope, ModelShape) else rope
    frequencies, factor = _scaled(rope)
    try:
        return _table(rope.positions, frequencies, factor).to(device, torch.float32)
    except (RuntimeError, MemoryError):  # torch has no class of its own for that
        raise ModelLoadError(
            f"there is no memory for a table of {rope.positions:,} positions: serve fewer "
            "(--max-model-len)"
        ) from None


def _table(count: int, frequencies: Tensor, factor: float) -> Tensor:
    positions = torch.arange(count, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).to(torch.float64)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)


def inverse_frequencies(rope: Rope | ModelShape) -> Tensor:
    """Angle per position of each pair of dimensions, float32 `[dim / 2]`, after scaling."""
    return _scaled(Rope.of(rope) if isinstance(rope, ModelShape) else rope)[0]


def _scaled(rope: Rope) -> tuple[Tensor, float]:
    """Frequencies, and the factor of cosines and sines."""
    scale = SCALINGS.get(rope.kind)
    if scale is None:
        hint = did_you_mean(rope.kind, SCALINGS)
        raise ModelLoadError(
            f"rope_scaling type must be one of {', '.join(SCALINGS)}, got {rope.kind!r}{hint}"
        )
    try:
        return scale(rope)
    except (ArithmeticError, TypeError, ValueError) as error:  # such as a context of one token
        raise ModelLoadError(f"rope_scaling {rope.scaling!r:.200}: {error}") from None


def _waves(rope: Rope, theta: float | None = None) -> Tensor:
    """Positions per radian of each pair before scaling, float32 `[dim / 2]`."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return ((theta or rope.theta) ** exponents.to(torch.float64)).to(torch.float32)


def _plain(rope: Rope, theta: float | None = None) -> Tensor:
    return 1.0 / _waves(rope, theta)


def _default(rope: Rope) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: Rope) -> tuple[Tensor, float]:
    """Positions divided by `factor` (Position Interpolation, Chen et al. 2023)."""
    return _plain(rope) / _number(rope, "factor"), 1.0


def _ntk(rope: Rope) -> tuple[Tensor, float]:
    """A larger base, so that the longest wave is `factor` times as long (NTK-aware, bloc97)."""
    return _plain(rope, rope.theta * _number(rope, "factor") ** _ntk_exponent(rope)), 1.0


def _dynamic(rope: Rope) -> tuple[Tensor, float]:
    """NTK-aware for the greatest length served, if it exceeds what the model was made for."""
    factor, made_for = _number(rope, "factor"), rope.max_position_embeddings
    grown = factor * max(rope.positions, made_for) / made_for - (factor - 1)
    return _plain(rope, rope.theta * grown ** _ntk_exponent(rope)), 1.0


def _ntk_exponent(rope: Rope) -> float:
    if rope.dim <= 2:
        raise ModelLoadError("rope_scaling by a larger base needs more than 2 rotated dimensions")
    return rope.dim / (rope.dim - 2)


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    frequencies, factor = _plain(rope), _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low == high:
        raise ModelLoadError(f"rope_scaling: low_freq_factor equals high_freq_factor ({low:g})")
    original = _number(rope, "original_max_position_embeddings")
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): dimensions that turn often are kept, those that turn less than
    once are divided by `factor`, with a ramp between; cosines and sines are scaled."""
    factor = _number(rope, "factor", rope.max_position_embeddings / rope.original)
    fast, slow = _number(rope, "beta_fast", 32), _number(rope, "beta_slow", 1)

    def dimension(turns: float) -> float:
        """The (fractional) pair that turns so often over the original context."""
        waves = math.log(rope.original / (turns * 2 * math.pi))
        return rope.dim * waves / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = (high - low) or 0.001  # the reference implementation's guard
    kept = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    waves = _waves(rope)
    frequencies = 1 / (factor * waves) * (1 - kept) + 1 / waves * kept
    return frequencies, _yarn_factor(rope, factor)


def _yarn_factor(rope: Rope, factor: float) -> float:
    if rope.scaling.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    mscale, all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if mscale and all_dim:
        mscale, all_dim = _number(rope, "mscale"), _number(rope, "mscale_all_dim")
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention scores with the context: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Rope) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a divisor per dimension, one list for contexts up to the
    original length and one for longer ones; cosines and sines are scaled."""
    name = "long_factor" if rope.positions > rope.original else "short_factor"
    divisors = _numbers(rope, name)
    factor = _number(rope, "factor", rope.max_position_embeddings / rope.original)
    usual = math.sqrt(1 + math.log(factor) / math.log(rope.original)) if factor > 1 else 1.0
    attention_factor = _number(rope, "attention_factor", usual)
    waves = torch.tensor(divisors, dtype=torch.float32) * _waves(rope)
    return 1 / waves, attention_factor


def _number(rope: Rope, name: str, default: float | None = None) -> float:
    value = rope.scaling.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ModelLoadError(f"rope_scaling needs {name!r} as a positive number, got {value!r}")
    return float(value)


def _numbers(rope: Rope, name: str) -> Sequence[float]:
    values = rope.scaling.get(name)
    count = rope.dim // 2
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(0 < v < math.inf for v in values)
    ):
        raise ModelLoadError(
            f"rope_scaling needs {name!r} as {count} positive numbers, got {values!r:.60}"
        )
    return values


SCALINGS: Final[dict[str, Callable[[Rope], tuple[Tensor, float]]]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""All rope scalings, by the name in `rope_scaling`."""
