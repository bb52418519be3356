"""ModernBERT: rotary positions, norms before the blocks, gated MLP, every third layer global.

Local layers see `local_attention / 2` tokens to either side and have a rotary base of their own.
The first layer's attention has no norm: its input is the norm of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from quire.config.leaves import inner_leaves
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.module import Module, ModuleList
from quire.layers.norm import LayerNorm
from quire.models.encoder import (
    ClassificationHead,
    Encoder,
    EncoderAttention,
    EncoderInput,
    activation,
)
from quire.weights.names import NameRules

GLOBAL, LOCAL = "full_attention", "sliding_attention"
_THETAS: Final = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
_OLD_THETAS: Final = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}
RULES: Final = NameRules(ignore=(r"(head|decoder|classifier|score)\..*", r".*\.inv_freq"))


def _eps(raw: dict[str, Any]) -> float:
    return float(raw.get("norm_eps", 1e-5))


def layer_kinds(shape: ModelShape) -> list[str]:
    """`full_attention` or `sliding_attention` of each layer."""
    kinds = shape.raw.get("layer_types")
    every = int(shape.raw.get("global_attn_every_n_layers", 3))
    if kinds is None:
        kinds = [LOCAL if i % every else GLOBAL for i in range(shape.num_layers)]
    if len(kinds) != shape.num_layers or not set(kinds) <= {GLOBAL, LOCAL}:
        raise ModelLoadError(
            f"layer_types must name {GLOBAL} or {LOCAL} for each of {shape.num_layers} layers, "
            f"got {kinds!r}"
        )
    return list(kinds)


def rope_table(shape: ModelShape, kind: str, device: str) -> Tensor:
    """Float32 `[positions, head_dim]` of a kind of layer: cosines, then sines."""
    given = (shape.raw.get("rope_parameters") or {}).get(kind) or {}
    if given.get("rope_type", "default") != "default" or shape.raw.get("rope_scaling"):
        raise ModelLoadError("ModernBERT with scaled rotary positions is not supported")
    theta = given.get("rope_theta") or shape.raw.get(_OLD_THETAS[kind]) or _THETAS[kind]
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, float(theta) ** -exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device, torch.float32)


class ModernBertLayer(Module):
    """Attention and gated MLP, each behind a norm, around a residual stream."""

    def __init__(self, context: LayerContext, shape: ModelShape, kind: str, first: bool) -> None:
        raw, size, inner = shape.raw, shape.hidden_size, shape.intermediate_size
        norm_bias, mlp_bias = bool(raw.get("norm_bias", False)), bool(raw.get("mlp_bias", False))
        window = int(raw.get("local_attention", 128)) // 2 if kind == LOCAL else None
        self._attn_norm = None if first else LayerNorm(context, size, _eps(raw), norm_bias)
        self._attn = EncoderAttention(
            context.at("attn"),
            shape,
            bool(raw.get("attention_bias", False)),
            ("Wqkv", "Wo"),
            window,
        )
        self._mlp_norm = LayerNorm(context, size, _eps(raw), norm_bias)
        self._wi = Linear(context.at("mlp.Wi"), size, 2 * inner, mlp_bias)
        at = context.at("mlp.Wo")
        self._wo = Linear(at, inner, size, mlp_bias, leaves=inner_leaves(inner))
        self._act = activation(context.ops, raw.get("hidden_activation", "gelu"))

    def __call__(self, x: Tensor, step: EncoderInput, rope_table: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`."""
        normed = x if self._attn_norm is None else self._attn_norm(x)
        x = x + self._attn(normed, step, rope_table)
        inner, gate = self._wi(self._mlp_norm(x)).chunk(2, dim=-1)
        return x + self._wo(self._act(inner) * gate)

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        norm = self._attn_norm
        first: dict[str, Module] = {} if norm is None else {"attn_norm": norm}
        return first | {
            "attn": self._attn,
            "mlp_norm": self._mlp_norm,
            "mlp.Wi": self._wi,
            "mlp.Wo": self._wo,
        }


class ModernBertEncoder(Encoder):
    """Hugging Face's `ModernBertModel`."""

    PREFIXES: tuple[str, ...] = ("model.",)

    def __init__(self, context: LayerContext, shape: ModelShape, device: str) -> None:
        """Raises `ModelLoadError` if the configuration asks for something the family lacks."""
        norm = (
            context,
            shape.hidden_size,
            _eps(shape.raw),
            bool(shape.raw.get("norm_bias", False)),
        )
        kinds = layer_kinds(shape)
        self._kinds = kinds
        self._tables = {kind: rope_table(shape, kind, device) for kind in set(kinds)}
        self._embeddings = Embedding(context, shape.vocab_size, shape.hidden_size)
        self._norm, self._final_norm = LayerNorm(*norm), LayerNorm(*norm)
        self._layers = ModuleList(
            ModernBertLayer(context.at(f"layers.{i}"), shape, kind, i == 0)
            for i, kind in enumerate(kinds)
        )

    def __call__(self, step: EncoderInput) -> Tensor:
        """See `Encoder`."""
        x = self._norm(self._embeddings(step.input_ids))
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            x = layer(x, step, self._tables[kind])
        return self._final_norm(x)

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        return {
            "embeddings.tok_embeddings": self._embeddings,
            "embeddings.norm": self._norm,
            "layers": self._layers,
            "final_norm": self._final_norm,
        }

    def name_rules(self) -> NameRules:
        """Heads of other tasks are skipped."""
        return RULES

    @classmethod
    def head(cls, context: LayerContext, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """Dense, activation, norm, classifier."""
        return ModernBertClassifier(context, shape, num_labels)


class ModernBertClassifier(ClassificationHead):
    """classifier(norm(act(dense(pooled state))))."""

    def __init__(self, context: LayerContext, shape: ModelShape, num_labels: int) -> None:
        raw, size = shape.raw, shape.hidden_size
        self._dense = Linear(
            context.at("head.dense"), size, size, bool(raw.get("classifier_bias", False))
        )
        self._act = activation(context.ops, raw.get("classifier_activation", "gelu"))
        self._norm = LayerNorm(context, size, _eps(raw), bool(raw.get("norm_bias", False)))
        self._classifier = Linear(context.at("classifier"), size, num_labels, True)

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to logits `[R, labels]`."""
        return self._classifier(self._norm(self._act(self._dense(pooled))))

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        return {
            "head.dense": self._dense,
            "head.norm": self._norm,
            "classifier": self._classifier,
        }
