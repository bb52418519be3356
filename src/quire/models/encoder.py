"""What encoder families share: the step's input, attention in both directions, activations.

There is no KV cache and there are no chunks: a prompt is computed whole, in one step. Knows no
family and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quire.config.leaves import head_leaves
from quire.config.shape import ModelShape
from quire.kernels.dispatch import Ops
from quire.layers.activation import activation as plain_activation
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.module import Module
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


class ClassificationHead(Module):
    """What a classifier computes from pooled states."""

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to float32 logits `[R, labels]`."""
        raise NotImplementedError


class Encoder(Module):
    """One encoder family: whole prompts to hidden states, and its own classification head.

    Parameters have the checkpoint's names, without prefix. A token's hidden state depends only on
    the tokens of its own prompt, bit for bit.
    """

    PREFIXES: tuple[str, ...]
    """Names under which checkpoints with a head hold the encoder."""

    def __init__(self, context: LayerContext, shape: ModelShape, device: str) -> None:
        raise NotImplementedError

    def __call__(self, step: EncoderInput) -> Tensor:
        """Hidden states `[T, H]` after the last layer."""
        raise NotImplementedError

    def name_rules(self) -> NameRules:
        """How checkpoints of the family spell names."""
        raise NotImplementedError

    @classmethod
    def head(cls, context: LayerContext, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """The family's classification head."""
        raise NotImplementedError


class EncoderAttention(Module):
    """Multi-head attention within each prompt, in both directions."""

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        bias: bool,
        names: tuple[str, str],
        window: int | None = None,
    ) -> None:
        """`names` are the family's of the two projections."""
        self._ops = context.ops
        self._names = names
        self._heads, self._dim = shape.num_heads, shape.head_dim
        size = self._heads * self._dim
        self._window = window
        self._qkv = Linear(context.at(names[0]), shape.hidden_size, (size, size, size), bias)
        leaves = head_leaves(self._heads, self._heads, self._dim)
        self._out = Linear(context.at(names[1]), size, shape.hidden_size, bias, leaves=leaves)

    def __call__(self, x: Tensor, step: EncoderInput, rope_table: Tensor | None = None) -> Tensor:
        """`[T, H] -> [T, H]`."""
        split = self._qkv(x).view(-1, 3, self._heads, self._dim)
        q, k, v = split.unbind(1)
        if rope_table is not None:
            q, k = self._ops.rotary(q, k, step.positions, rope_table)
        scale = self._dim**-0.5
        out = self._ops.encoder_attention(q, k, v, step.query_start_loc, scale, self._window)
        return self._out(out.reshape(-1, self._heads * self._dim))

    def children(self) -> Mapping[str, Module]:
        """Both projections."""
        return dict(zip(self._names, (self._qkv, self._out), strict=True))


def activation(ops: Ops, name: object) -> Callable[[Tensor], Tensor]:
    """The function by its name in a configuration.

    Raises:
        ModelLoadError: there is no such function.
    """
    if name == "none":
        return lambda x: x
    return plain_activation(ops, str(name), gated=False)
