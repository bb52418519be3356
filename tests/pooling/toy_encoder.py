"""The least that an encoder family is: a table of vectors, one per token, and a position bias."""

from __future__ import annotations

from torch import Tensor

from quire.config.encoders import first_position
from quire.config.shape import ModelShape
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.parameter import Parameters, prefixed
from quire.models.encoder import ClassificationHead, EncoderInput
from quire.weights.names import NameRules


class ToyHead:
    def __init__(self, shape: ModelShape, num_labels: int) -> None:
        self._linear = Linear(shape.hidden_size, num_labels, False)

    def __call__(self, pooled: Tensor) -> Tensor:
        return self._linear(pooled)

    def parameters(self) -> Parameters:
        return prefixed("toy_head", self._linear.parameters())


class ToyEncoder:
    PREFIXES = ("toy.",)

    def __init__(self, shape: ModelShape, device: str) -> None:
        self._words = Embedding(shape.vocab_size, shape.hidden_size)
        self._places = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self._first = first_position(shape)

    def __call__(self, step: EncoderInput) -> Tensor:
        return self._words(step.input_ids) + self._places(step.positions + self._first)

    def parameters(self) -> Parameters:
        return prefixed("words", self._words.parameters()) | prefixed(
            "places", self._places.parameters()
        )

    def name_rules(self) -> NameRules:
        return NameRules()

    @classmethod
    def head(cls, shape: ModelShape, num_labels: int) -> ClassificationHead:
        return ToyHead(shape, num_labels)
