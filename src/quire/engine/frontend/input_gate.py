"""Which gate a model has: one for text, one for pooling. They are siblings over the same parts."""

from __future__ import annotations

from typing import Any

from quire.config import ModelConfig, ModelShape, read_pooler
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.pooling_input import PoolingInputProcessor
from quire.structured.gate import LocalGate, MakeGate
from quire.tokenizer import Tokenizer

InputGate = InputProcessor | PoolingInputProcessor


def make_input_processor(
    model: ModelConfig,
    shape: ModelShape,
    tokenizer: Tokenizer | None,
    *,
    entropy: bytes = b"",
    make_grammars: MakeGate = LocalGate,
    **options: Any,
) -> InputGate:
    """The gate for a model.

    Args:
        model: Its name and options.
        shape: Its sizes.
        tokenizer: None: prompts must be token ids.
        entropy, make_grammars: See `InputProcessor`; where nothing is sampled, no seeds are drawn
            and there are no grammars.
        options: What both gates take.

    Raises:
        StartupError: the model's files do not say how it pools, or its default sampling
            parameters are out of range.
    """
    pooler = read_pooler(model, shape)
    if pooler is None:
        gate = InputProcessor(
            model, shape, tokenizer, entropy=entropy, make_grammars=make_grammars, **options
        )
        gate.default_params()  # bad ones are refused now, not with the first request
        return gate
    return PoolingInputProcessor(model, shape, tokenizer, pooler=pooler, **options)


def text_gate(gate: InputGate) -> InputProcessor:
    """The gate of a model that generates text.

    Raises:
        UnsupportedTask: this model pools.
    """
    if isinstance(gate, PoolingInputProcessor):
        raise gate.no_text()
    return gate
