"""An encoder family is one row and one class: a toy from outside is served like BERT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny
from quire import LLM
from quire.config.encoders import ENCODERS, EncoderFamily
from quire.errors import ConfigError
from quire.models.pooling import encoder_class

ENCODERS.register("TestToy", EncoderFamily("toy_encoder:ToyEncoder", starts_after_padding=True))
PAD = 3
SIZE, ROWS = tiny.BASE["hidden_size"], tiny.BASE["max_position_embeddings"]


def save(folder: Path, architecture: str, **more: Any) -> dict[str, torch.Tensor]:
    config = {**tiny.BASE, "architectures": [architecture], "pad_token_id": PAD, **more}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    torch.manual_seed(0)
    weights = {
        "toy.words.weight": torch.randn(len(tiny.VOCAB), SIZE),
        "toy.places.weight": torch.randn(ROWS, SIZE),
    }
    if architecture.endswith("ForSequenceClassification"):
        weights["toy_head.weight"] = torch.randn(2, SIZE)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.save_tokenizer(folder)
    return weights


def state(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    return weights["toy.words.weight"][ids[0]] + weights["toy.places.weight"][PAD + 1]


def test_a_row_makes_an_embedder(tmp_path: Path) -> None:
    weights = save(tmp_path, "TestToyModel")
    prompts = tiny.prompts(3)
    with LLM(str(tmp_path)) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        assert llm.llm_engine.config.model.max_model_len == ROWS - PAD - 1
    for ids, output in zip(prompts, outputs, strict=True):
        want = torch.nn.functional.normalize(state(weights, ids), dim=0)
        np.testing.assert_allclose(output.outputs.embedding, want, atol=1e-6)


def test_the_same_row_makes_a_classifier(tmp_path: Path) -> None:
    weights = save(tmp_path, "TestToyForSequenceClassification", num_labels=2)
    prompts = tiny.prompts(3)
    with LLM(str(tmp_path)) as llm:
        outputs = llm.classify(prompts, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        want = (weights["toy_head.weight"] @ state(weights, ids)).softmax(0)
        np.testing.assert_allclose(output.outputs.probs, want, atol=1e-5)


def test_the_row_says_that_no_text_comes_of_it(tmp_path: Path) -> None:
    save(tmp_path, "TestToyModel")
    with pytest.raises(ConfigError, match="TestToyModel has no head that generates text"):
        LLM(str(tmp_path), runner="generate")


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_every_row_names_a_class(name: str) -> None:
    family = encoder_class(name)
    for member in ("PREFIXES", "__call__", "parameters", "name_rules", "head"):
        assert hasattr(family, member), member
