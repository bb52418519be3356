"""BERT, and RoBERTa, XLM-RoBERTa and CamemBERT, which differ in positions and head only.

Absolute learned positions, a norm after each block, biases everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from quire.config.encoders import first_position
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
from quire.weights.names import Merge, NameRules

RULES: Final = NameRules(
    merges=(Merge("qkv", ("query", "key", "value")),),
    substitutions=(
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    ),
    ignore=(r"embeddings\.position_ids", r"pooler\..*", r"(cls|lm_head|classifier|score)\..*"),
)


class BertLayer(Module):
    """Attention and MLP, each followed by a norm over its sum with what went in."""

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        eps: float,
        act: Callable[[Tensor], Tensor],
    ) -> None:
        size, inner = shape.hidden_size, shape.intermediate_size
        self._attention = EncoderAttention(
            context.at("attention"), shape, True, ("self.qkv", "output.dense")
        )
        self._attention_norm = LayerNorm(context, size, eps)
        self._up = Linear(context.at("intermediate.dense"), size, inner, True)
        at = context.at("output.dense")
        self._down = Linear(at, inner, size, True, leaves=inner_leaves(inner))
        self._norm = LayerNorm(context, size, eps)
        self._act = act

    def __call__(self, x: Tensor, step: EncoderInput) -> Tensor:
        """`[T, H] -> [T, H]`."""
        x = self._attention_norm(self._attention(x, step) + x)
        return self._norm(self._down(self._act(self._up(x))) + x)

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        return {
            "attention": self._attention,
            "attention.output.LayerNorm": self._attention_norm,
            "intermediate.dense": self._up,
            "output.dense": self._down,
            "output.LayerNorm": self._norm,
        }


class BertEncoder(Encoder):
    """Hugging Face's `BertModel` without its pooler."""

    PREFIXES: tuple[str, ...] = ("bert.",)

    def __init__(self, context: LayerContext, shape: ModelShape, device: str) -> None:
        """Raises `ModelLoadError` if the configuration asks for something the family lacks."""
        raw = shape.raw
        kind = raw.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ModelLoadError(f"position_embedding_type must be absolute, got {kind!r}")
        eps = float(raw.get("layer_norm_eps", 1e-12))
        act = activation(context.ops, raw.get("hidden_act", "gelu"))
        size = shape.hidden_size
        self._types = int(raw.get("type_vocab_size", 2))
        self._first = first_position(shape)
        self._word = Embedding(context, shape.vocab_size, size)
        self._position = Embedding(context, shape.max_position_embeddings, size)
        self._type = Embedding(context, self._types, size)
        self._norm = LayerNorm(context, size, eps)
        self._layers = ModuleList(
            BertLayer(context.at(f"encoder.layer.{i}"), shape, eps, act)
            for i in range(shape.num_layers)
        )

    def __call__(self, step: EncoderInput) -> Tensor:
        """See `Encoder`."""
        types = step.token_types.clamp_max(self._types - 1)
        x = self._word(step.input_ids) + self._type(types)
        x = self._norm(x + self._position(step.positions + self._first))
        for layer in self._layers:
            x = layer(x, step)
        return x

    def children(self) -> Mapping[str, Module]:
        """Under Hugging Face's names."""
        return {
            "embeddings.word_embeddings": self._word,
            "embeddings.position_embeddings": self._position,
            "embeddings.token_type_embeddings": self._type,
            "embeddings.LayerNorm": self._norm,
            "encoder.layer": self._layers,
        }

    def name_rules(self) -> NameRules:
        """Old checkpoints call a norm's weight gamma and its bias beta."""
        return RULES

    @classmethod
    def head(cls, context: LayerContext, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """BERT's pooler and a linear classifier."""
        return BertClassifier(context, shape, num_labels, "pooler.dense", "classifier")


class RobertaEncoder(BertEncoder):
    """Hugging Face's `RobertaModel`: positions begin after the padding id."""

    PREFIXES = ("roberta.",)

    @classmethod
    def head(cls, context: LayerContext, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """RoBERTa's head has its own dense layer."""
        return BertClassifier(context, shape, num_labels, "classifier.dense", "classifier.out_proj")


class BertClassifier(ClassificationHead):
    """out(tanh(dense(first token)))."""

    def __init__(
        self, context: LayerContext, shape: ModelShape, num_labels: int, dense: str, out: str
    ) -> None:
        self._ops = context.ops
        self._names = (dense, out)
        self._dense = Linear(context.at(dense), shape.hidden_size, shape.hidden_size, True)
        self._out = Linear(context.at(out), shape.hidden_size, num_labels, True)

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to logits `[R, labels]`."""
        return self._out(self._ops.tanh(self._dense(pooled)))

    def children(self) -> Mapping[str, Module]:
        """Both layers, under the names of the family."""
        return dict(zip(self._names, (self._dense, self._out), strict=True))
