"""BERT, and RoBERTa, XLM-RoBERTa and CamemBERT, which differ in positions and head only.

Absolute learned positions, a norm after each block, biases everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from quire.config.encoders import first_position
from quire.config.leaves import inner_leaves
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.kernels.dispatch import ops
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.layers.parameter import Parameters, prefixed
from quire.models.encoder import (
    ClassificationHead,
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


class BertLayer:
    """Attention and MLP, each followed by a norm over its sum with what went in."""

    def __init__(self, shape: ModelShape, eps: float, act: Callable[[Tensor], Tensor]) -> None:
        size, inner = shape.hidden_size, shape.intermediate_size
        self._attention = EncoderAttention(shape, bias=True)
        self._attention_norm = LayerNorm(size, eps)
        self._up = Linear(size, inner, True)
        self._down = Linear(inner, size, True, leaves=inner_leaves(inner))
        self._norm = LayerNorm(size, eps)
        self._act = act

    def __call__(self, x: Tensor, step: EncoderInput) -> Tensor:
        """`[T, H] -> [T, H]`."""
        x = self._attention_norm(self._attention(x, step) + x)
        return self._norm(self._down(self._act(self._up(x))) + x)

    def parameters(self) -> Parameters:
        """Under Hugging Face's names."""
        return (
            prefixed("attention.self.qkv", self._attention.qkv.parameters())
            | prefixed("attention.output.dense", self._attention.out.parameters())
            | prefixed("attention.output.LayerNorm", self._attention_norm.parameters())
            | prefixed("intermediate.dense", self._up.parameters())
            | prefixed("output.dense", self._down.parameters())
            | prefixed("output.LayerNorm", self._norm.parameters())
        )


class BertEncoder:
    """Hugging Face's `BertModel` without its pooler."""

    PREFIXES: tuple[str, ...] = ("bert.",)

    def __init__(self, shape: ModelShape, device: str) -> None:
        """Raises `ModelLoadError` if the configuration asks for something the family lacks."""
        raw = shape.raw
        kind = raw.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise ModelLoadError(f"position_embedding_type must be absolute, got {kind!r}")
        eps = float(raw.get("layer_norm_eps", 1e-12))
        act = activation(raw.get("hidden_act", "gelu"))
        size = shape.hidden_size
        self._types = int(raw.get("type_vocab_size", 2))
        self._first = first_position(shape)
        self._word = Embedding(shape.vocab_size, size)
        self._position = Embedding(shape.max_position_embeddings, size)
        self._type = Embedding(self._types, size)
        self._norm = LayerNorm(size, eps)
        self._layers = [BertLayer(shape, eps, act) for _ in range(shape.num_layers)]

    def __call__(self, step: EncoderInput) -> Tensor:
        """See `Encoder`."""
        types = step.token_types.clamp_max(self._types - 1)
        x = self._word(step.input_ids) + self._type(types)
        x = self._norm(x + self._position(step.positions + self._first))
        for layer in self._layers:
            x = layer(x, step)
        return x

    def parameters(self) -> Parameters:
        """Under Hugging Face's names."""
        found = (
            prefixed("embeddings.word_embeddings", self._word.parameters())
            | prefixed("embeddings.position_embeddings", self._position.parameters())
            | prefixed("embeddings.token_type_embeddings", self._type.parameters())
            | prefixed("embeddings.LayerNorm", self._norm.parameters())
        )
        for i, layer in enumerate(self._layers):
            found |= prefixed(f"encoder.layer.{i}", layer.parameters())
        return found

    def name_rules(self) -> NameRules:
        """Old checkpoints call a norm's weight gamma and its bias beta."""
        return RULES

    @classmethod
    def head(cls, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """BERT's pooler and a linear classifier."""
        return BertClassifier(shape, num_labels, "pooler.dense", "classifier")


class RobertaEncoder(BertEncoder):
    """Hugging Face's `RobertaModel`: positions begin after the padding id."""

    PREFIXES = ("roberta.",)

    @classmethod
    def head(cls, shape: ModelShape, num_labels: int) -> ClassificationHead:
        """RoBERTa's head has its own dense layer."""
        return BertClassifier(shape, num_labels, "classifier.dense", "classifier.out_proj")


class BertClassifier:
    """out(tanh(dense(first token)))."""

    def __init__(self, shape: ModelShape, num_labels: int, dense: str, out: str) -> None:
        self._names = (dense, out)
        self._dense = Linear(shape.hidden_size, shape.hidden_size, True)
        self._out = Linear(shape.hidden_size, num_labels, True)

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to logits `[R, labels]`."""
        return self._out(ops.tanh(self._dense(pooled)))

    def parameters(self) -> Parameters:
        """Under the names that the checkpoint's family has for the two layers."""
        dense, out = self._names
        return prefixed(dense, self._dense.parameters()) | prefixed(out, self._out.parameters())
