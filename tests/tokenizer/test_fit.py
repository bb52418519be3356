"""Tokenizer and model: sizes that cannot be of one model are refused before anything is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire import LLM
from quire.config import ModelConfig
from quire.errors import ModelLoadError
from quire.tokenizer import Tokenizer
from quire.tokenizer.fit import check_fit

SHAPE = ModelConfig().read_shape()


def sized(vocab_size: int) -> Any:
    return dataclasses.replace(SHAPE, vocab_size=vocab_size)


def test_a_vocabulary_larger_than_the_models(byte_level: Tokenizer) -> None:
    size = byte_level.vocab_size  # the last two are added tokens
    assert byte_level.largest_base_id() == size - 3
    with pytest.raises(
        ModelLoadError, match=f"ids up to {size - 3}, the model's vocabulary only up to 99"
    ):
        check_fit(byte_level, sized(100))
    with pytest.raises(ModelLoadError, match="point --tokenizer at the right one"):
        check_fit(byte_level, sized(size - 3))


def test_padding_and_added_tokens_are_fine(byte_level: Tokenizer, caplog: Any) -> None:
    size = byte_level.vocab_size
    check_fit(byte_level, sized(size))
    check_fit(byte_level, sized(size + 64))
    assert caplog.text == ""
    check_fit(byte_level, sized(size - 2))
    assert "2 added tokens of the tokenizer lie beyond" in caplog.text
    check_fit(byte_level, sized(10 * size))
    assert "Is this the right tokenizer for the model?" in caplog.text


def test_the_engine_asks(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "quire.engine.cores.inline.EngineCore", lambda *_, **__: pytest.fail("start")
    )
    with pytest.raises(ModelLoadError, match="not the model's tokenizer"):
        LLM("quire-demo", hf_overrides={"vocab_size": 1000})
