"""A decoder family as its differences from Llama: data that `decoder.py` reads, nothing that
computes; and what stands at the place of a layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.config.shape import ModelShape
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cache_tensors import KVCache
from quire.layers.context import LayerContext
from quire.layers.module import MLPBlock, Module
from quire.layers.rotary import Rope

PLACEMENTS: Final[dict[str, dict[str, str]]] = {
    "pre": {"attention_in": "input_layernorm", "mlp_in": "post_attention_layernorm"},
    "post": {
        "attention_out": "post_attention_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    },
    "sandwich": {
        "attention_in": "input_layernorm",
        "attention_out": "post_attention_layernorm",
        "mlp_in": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    },
    "after": {"attention_sum": "input_layernorm", "mlp_sum": "post_attention_layernorm"},
    "parallel": {"attention_in": "input_layernorm"},
    "parallel_two": {"attention_in": "input_layernorm", "mlp_in": "post_attention_layernorm"},
}
"""Where a layer's norms stand, and their names.

`pre`: before attention and before MLP. `post`: on what they give, before it is added.
`sandwich`: both. `after`: on the sums. `parallel`: attention and MLP read the same norm (or, with
`parallel_two`, one each) and are added together.
"""

FULL: Final = "full"
"""The usual name of a rotary table."""


@dataclass(frozen=True, slots=True)
class DecoderStyle:
    """What families do differently. A new family adds a field here, with the plain default."""

    norm: str = "rms"
    """Row of `quire.layers.norm.NORMS`, everywhere in the model."""
    norm_eps: float | None = None
    """What norms add to the variance; `None`: the configuration's `rms_norm_eps`."""
    placement: str = "pre"
    """Row of `PLACEMENTS`."""
    residual_is_normed: bool = False
    """The residual stream goes on from the norm's result (an option of BLOOM)."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the stream."""
    final_norm: bool = True

    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    clip_qkv: float = 0.0
    """Queries, keys and values are kept within plus and minus this, before they are normed or
    rotated; 0: they are not."""
    qk_norm: Literal["", "head", "per_head", "full"] = ""
    """Norm of queries and keys: of each head, with one weight for all heads or one per head; or of
    all heads together."""
    qk_norm_kind: str | None = None
    """Row of `NORMS`, if not that of the model."""
    attention_scale: float | None = None
    """Factor of `q.k`; `None`: head_dim**-0.5."""
    scale_by_layer: bool = False
    """The factor is divided by the layer's number, counted from 1 (an option of GPT-2)."""
    attention_softcap: float = 0.0
    alibi: float = 0.0
    """Factor of the ALiBi slopes; 0: none."""
    alibi_bias_max: float = 8.0
    """The least slope is 2 to the minus this."""
    sinks: bool = False
    """Attention has `sinks`, one per head."""

    ropes: Mapping[str, Rope] | None = None
    """Rotary tables by name; `None`: one, `FULL`, as the configuration says."""
    layer_ropes: tuple[str | None, ...] = ()
    """Name of each layer's table, `None` for a layer without positions; if empty, all have
    `FULL` (or nothing, if there is no such table)."""
    learned_positions: int = 0
    """Rows of a table of learned positions that is added to the embedding; 0: there is none."""
    position_offset: int = 0
    """Row of position 0 in that table."""

    gated: bool = True
    """The MLP is down(act(gate) * up), not down(act(up))."""
    activation: str | None = None
    """Name in `quire.layers.activation`; `None`: the configuration's `hidden_act`."""
    mlp_bias: bool = False

    embedding_size: int | None = None
    """Width of embedding and head where it is not the model's; then it is projected in and out."""
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    """Rounded to the model's type before it is used, as the families that have one do."""
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    attention: Callable[[LayerContext, int], AttentionBlock] | None = None
    """Makes the attention of a layer, from its context and index, where it is not the usual one
    (MLA)."""
    mlp: Callable[[LayerContext, int], MLPBlock] | None = None
    """Makes what follows the attention in a layer, where it is not the usual one (MoE)."""

    @property
    def eps(self) -> float:
        """What norms add to the variance, once that is settled."""
        assert self.norm_eps is not None, "settled() fills it in"
        return self.norm_eps

    def settled(self, shape: ModelShape) -> DecoderStyle:
        """With what depends on the configuration filled in.

        Raises:
            ModelLoadError: the rotary positions asked for cannot be.
        """
        ropes = {FULL: Rope.of(shape)} if self.ropes is None else self.ropes
        eps = shape.rms_norm_eps if self.norm_eps is None else self.norm_eps
        activation = self.activation or shape.hidden_act
        return replace(self, ropes=ropes, norm_eps=eps, activation=activation)


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """What every layer of one forward pass reads."""

    positions: Tensor
    metadata: AttentionMetadata
    rope_tables: Mapping[str, Tensor]
    attention: AttentionBackend

    @property
    def rope_table(self) -> Tensor:
        """The table that layers have unless their family says otherwise."""
        return self.rope_tables[FULL]

    def of_layer(self, index: int) -> StepInput:
        """What one layer reads: groups of layers have block tables of their own."""
        metadata = self.metadata.of_layer(index)
        return self if metadata is self.metadata else replace(self, metadata=metadata)


class AttentionBlock(Module):
    """What stands at the place of a layer's attention; its parameters are below `self_attn`."""

    def __call__(self, x: Tensor, kv_cache: KVCache, step: StepInput) -> Tensor:
        """`[T, H] -> [T, H]`; stores this step's keys and values."""
        raise NotImplementedError
