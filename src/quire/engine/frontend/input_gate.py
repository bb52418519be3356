"""Which gate a model has: one for text, one for pooling."""

from __future__ import annotations

from typing import Any

from quire.config import ModelConfig, ModelShape, read_pooler
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.pooling_input import PoolingInputProcessor
from quire.tokenizer import Tokenizer


def make_input_processor(
    model: ModelConfig, shape: ModelShape, tokenizer: Tokenizer | None, **options: Any
) -> InputProcessor:
    """The gate for a model; `options` are those of `InputProcessor`.

    Raises:
        StartupError: the model's files do not say how it pools, or its default sampling
            parameters are out of range.
    """
    pooler = read_pooler(model, shape)
    if pooler is None:
        gate = InputProcessor(model, shape, tokenizer, **options)
        gate.default_params()  # bad ones are refused now, not with the first request
        return gate
    return PoolingInputProcessor(model, shape, tokenizer, pooler=pooler, **options)
