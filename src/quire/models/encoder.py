"""What encoder families share: attention in both directions, norms, activations, the step's input.

No KV cache and no chunks: a prompt is computed whole, in one step. Knows no family and no
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.kernels.dispatch import ops
from quire.layers.linear import Linear
from quire.layers.parameter import Parameter, Parameters
from quire.registry import did_you_mean
from quire.weights.names import NameRules


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """R whole prompts with T tokens in one flat batch, in order, without padding."""

    input_ids: Tensor
    """`[T]` int64."""
    positions: Tensor
    """`[T]` int64, from 0 in each prompt."""
    token_types: Tensor
    """`[T]` int64: 1 in the second text of a pair, else 0."""
    query_start_loc: Tensor
    """`[R + 1]` int32: prompt r is `query_start_loc[r] .. query_start_loc[r + 1]`."""


class Head(Protocol):
    """A classification head over pooled states."""

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to float32 logits `[R, labels]`."""
        ...

    def parameters(self) -> Parameters:
        """Under the checkpoint's names."""
        ...


class Encoder(Protocol):
    """A family: whole prompts to hidden states, and its own head.

    A token's hidden state depends only on the tokens of its own prompt, bit for bit.
    """

    PREFIXES: tuple[str, ...]
    """Names under which checkpoints with a head hold the encoder."""

    def __init__(self, shape: ModelShape, device: str) -> None: ...

    def __call__(self, step: EncoderInput) -> Tensor:
        """Hidden states `[T, H]` after the last layer."""
        ...

    def parameters(self) -> Parameters:
        """Under the checkpoint's names, without prefix."""
        ...

    def name_rules(self) -> NameRules:
        """How checkpoints of the family spell names."""
        ...

    @classmethod
    def head(cls, shape: ModelShape, num_labels: int) -> Head:
        """The family's classification head."""
        ...


class LayerNorm:
    """`[T, H] -> [T, H]`."""

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        self._size, self._eps = size, eps
        self._weight: Tensor
        self._bias: Tensor | None = None
        self._has_bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x`."""
        return ops.layer_norm(x, self._weight, self._bias, self._eps)

    def parameters(self) -> Parameters:
        """`weight` and perhaps `bias`."""
        found = {"weight": Parameter((self._size,), self._load_weight)}
        if self._has_bias:
            found["bias"] = Parameter((self._size,), self._load_bias)
        return found

    def _load_weight(self, tensor: Tensor) -> None:
        self._weight = tensor.clone()

    def _load_bias(self, tensor: Tensor) -> None:
        self._bias = tensor.clone()


class EncoderAttention:
    """Multi-head attention within each prompt, in both directions. The two projections get their
    names from the family."""

    def __init__(self, shape: ModelShape, bias: bool, window: int | None = None) -> None:
        self._heads, self._dim = shape.num_heads, shape.head_dim
        size = self._heads * self._dim
        self._window = window
        self.qkv = Linear(shape.hidden_size, (size, size, size), bias)
        self.out = Linear(size, shape.hidden_size, bias)

    def __call__(self, x: Tensor, step: EncoderInput, rope_table: Tensor | None = None) -> Tensor:
        """`[T, H] -> [T, H]`."""
        split = self.qkv(x).view(-1, 3, self._heads, self._dim)
        q, k, v = split.unbind(1)
        if rope_table is not None:
            q, k = ops.rotary(q, k, step.positions, rope_table)
        scale = self._dim**-0.5
        out = ops.encoder_attention(q, k, v, step.query_start_loc, scale, self._window)
        return self.out(out.reshape(-1, self._heads * self._dim))


def _relu(x: Tensor) -> Tensor:
    return torch.clamp_min(x, 0)


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula (Hendrycks & Gimpel 2016)."""
    wide = x.to(torch.float32)
    inner = (wide + wide * wide * wide * 0.044715).mul_(0.7978845608028654)
    return ops.tanh(inner).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (wide / ops.exp(-wide).add_(1.0)).to(x.dtype)


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": lambda x: ops.gelu(x),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "none": lambda x: x,
    "relu": _relu,
    "silu": _silu,
    "tanh": lambda x: ops.tanh(x),
}


def activation(name: object) -> Callable[[Tensor], Tensor]:
    """The function by its name in a configuration.

    Raises:
        ModelLoadError: there is no such function.
    """
    if name not in ACTIVATIONS:
        hint = did_you_mean(str(name), ACTIVATIONS)
        raise ModelLoadError(
            f"the activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}{hint}"
        )
    return ACTIVATIONS[str(name)]
