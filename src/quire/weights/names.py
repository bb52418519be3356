"""How names in a checkpoint map to a model's parameters, as data.

A family states a `NameRules`; nothing here knows families or files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quire.weights.kv_scales import is_unused, our_names


@dataclass(frozen=True, slots=True)
class Merge:
    """Layers that checkpoints keep apart and the model stacks in one weight, in this order."""

    target: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """One checkpoint tensor that holds the same parameter of many layers, along its first
    dimension: expert weights, mostly."""

    source: str
    """End of the checkpoint's name, without the dot before it."""
    target: str
    """End of the parameters' names, `{}` being the index along the first dimension."""
    layout: Callable[[Tensor], Tensor] | None = None
    """From a slice to the parameter, if it is laid out otherwise."""
    dims: tuple[int, ...] = (3,)
    """Dimensions that the checkpoint's tensor may have; one with others is taken for something
    else."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that a checkpoint lays out otherwise than the parameter."""

    pattern: str
    """Regular expression of the whole (renamed) name."""
    change: Callable[[Tensor], Tensor]


QKV: Final = Merge("qkv_proj", ("q_proj", "k_proj", "v_proj"))
GATE_UP: Final = Merge("gate_up_proj", ("gate_proj", "up_proj"))
_EXPERT_SCALES: Final = ("weight_scale", "activation_scale", "input_scale")


def _expert_stacks(layer: str) -> tuple[Stack, ...]:
    """One of an expert's layers: weights `[E, N, K]`, and scales of each expert's whole weight,
    of its rows or of blocks, `[E, …]`. transformers leaves `weight` out of the names."""
    source, target = f"experts.{layer}", f"experts.{{}}.{layer}."
    of_scales = [(name, name) for name in _EXPERT_SCALES] + [("scale_inv", "weight_scale_inv")]
    return (
        Stack(source, f"{target}weight"),
        *(Stack(f"{source}_{name}", target + ours, dims=(1, 2, 3)) for name, ours in of_scales),
    )


def _of_mlx(place: str) -> Iterator[Stack]:
    """mlx-lm's: of each layer by itself the weights, scales, biases of groups, and the bias."""
    for layer in (*GATE_UP.parts, "down_proj"):
        for name, dims in (("weight", 3), ("scales", 3), ("biases", 3), ("bias", 2)):
            yield Stack(f"{place}.{layer}.{name}", f"experts.{{}}.{layer}.{name}", dims=(dims,))


EXPERT_STACKS: Final = (
    *_expert_stacks("gate_up_proj"), *_expert_stacks("down_proj"), *_of_mlx("switch_mlp"),
)  # fmt: skip
"""Expert weights as newer libraries keep them, one tensor for all; scales, if they are fp8
(`FP8Experts` of transformers 5.24, `integrations/finegrained_fp8.py`); and as mlx-lm does
(`models/switch_layers.py`)."""
MLX_EXPERT_STACKS: Final = tuple(_of_mlx("experts"))
"""Those of gpt-oss by mlx-lm, which names no other place."""


@dataclass(frozen=True, slots=True)
class NameRules:
    """The differences between a checkpoint's names and the model's."""

    merges: tuple[Merge, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    """(checkpoint prefix, our prefix); the first that fits is replaced."""
    ignore: tuple[str, ...] = ()
    """Regular expressions of checkpoint names (after renaming) that carry nothing we need."""
    substitutions: tuple[tuple[str, str], ...] = ()
    """(regular expression, replacement): all are applied, in order, after `renames`."""
    layouts: tuple[Layout, ...] = ()
    """The first that fits is applied, before parts are merged."""
    stacks: tuple[Stack, ...] = ()
    """Tensors that are cut into many parameters. Checkpoints may have them or the parameters."""

    def renamed(self, name: str) -> str:
        """A checkpoint's name in our spelling."""
        for old, new in self.renames:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        for pattern, replacement in self.substitutions:
            name = re.sub(pattern, replacement, name)
        return name

    def layout(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """How the parameter of that name differs from the (renamed) tensor of that name."""
        for layout in self.layouts:
            if re.fullmatch(layout.pattern, name):
                return layout.change
        return None

    def pieces(
        self, name: str, tensor: Tensor, laid_out: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """A tensor under its (renamed) name, or the slices of a stack, each under its own. A scale
        of keys and values has the names that `kv_scales` gives it.

        `laid_out`: as the parameter is, not as the checkpoint has it; slices are always.
        """
        for stack in self.stacks:
            if tensor.dim() in stack.dims and name.endswith(f".{stack.source}"):
                head = name.removesuffix(stack.source)
                for i, part in enumerate(tensor):
                    piece = part if stack.layout is None else stack.layout(part)
                    yield head + stack.target.format(i), piece
                return
        change = self.layout(name) if laid_out else None
        for ours in our_names(name):
            yield ours, tensor if change is None else change(tensor)

    def ignored(self, name: str) -> bool:
        """Whether a (renamed) name may be skipped."""
        return is_unused(name) or any(re.fullmatch(pattern, name) for pattern in self.ignore)

    def sources(self, parameter: str) -> tuple[str, ...]:
        """Names under which a checkpoint holds a parameter: several if it is merged from parts.

        A checkpoint may also hold it merged already, under the parameter's own name.
        """
        pieces = parameter.split(".")
        for merge in self.merges:
            if merge.target in pieces:
                place = pieces.index(merge.target)
                head, tail = pieces[:place], pieces[place + 1 :]
                return tuple(".".join([*head, part, *tail]) for part in merge.parts)
        return (parameter,)


def transposed(weight: Tensor) -> Tensor:
    """`[K, N]` as `[N, K]`: checkpoints that multiply from the left."""
    return weight.t()


def uninterleaved(rows: Tensor) -> Tensor:
    """Even rows, then odd ones: gate and up side by side from gate and up in turns."""
    return torch.cat((rows[0::2], rows[1::2]))


def transposed_uninterleaved(weight: Tensor) -> Tensor:
    """`[K, N]` with columns in turns as `[N, K]` with even, then odd rows."""
    return uninterleaved(weight.t())


def as_row(vector: Tensor) -> Tensor:
    """`[D]` as `[1, D]`: one of the rows that are stacked."""
    return vector.unsqueeze(0)


def grouped_qkv(kv_heads: int, group: int) -> Callable[[Tensor], Tensor]:
    """Rows that go, KV head by KV head, `group` query heads, key, value: as all queries, all keys,
    all values. A tensor that cannot be cut so is left to be refused for its shape."""

    def layout(rows: Tensor) -> Tensor:
        if rows.shape[0] % (kv_heads * (group + 2)):
            return rows
        by_head = rows.reshape(kv_heads, group + 2, -1, *rows.shape[1:])
        parts = by_head.split((group, 1, 1), dim=1)
        return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])

    return layout
