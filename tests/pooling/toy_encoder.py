"""The least that an encoder family is: a table of vectors, one per token, and a position bias."""

from __future__ import annotations

from torch import Tensor

from quire.config.encoders import first_position
from quire.config.shape import ModelShape
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.module import Module
from quire.models.encoder import ClassificationHead, Encoder, EncoderInput
from quire.weights.names import NameRules


class ToyHead(ClassificationHead):
    def __init__(self, context: LayerContext, shape: ModelShape, num_labels: int) -> None:
        self._linear = Linear(context.at("toy_head"), shape.hidden_size, num_labels, False)

    def __call__(self, pooled: Tensor) -> Tensor:
        return self._linear(pooled)

    def children(self) -> dict[str, Module]:
        return {"toy_head": self._linear}


class ToyEncoder(Encoder):
    PREFIXES = ("toy.",)

    def __init__(self, context: LayerContext, shape: ModelShape, device: str) -> None:
        self._words = Embedding(context, shape.vocab_size, shape.hidden_size)
        self._places = Embedding(context, shape.max_position_embeddings, shape.hidden_size)
        self._first = first_position(shape)

    def __call__(self, step: EncoderInput) -> Tensor:
        return self._words(step.input_ids) + self._places(step.positions + self._first)

    def children(self) -> dict[str, Module]:
        return {"words": self._words, "places": self._places}

    def name_rules(self) -> NameRules:
        return NameRules()

    @classmethod
    def head(cls, context: LayerContext, shape: ModelShape, num_labels: int) -> ClassificationHead:
        return ToyHead(context, shape, num_labels)
