"""The gate of pooling models: prompts as for text, cut on request; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from quire.config import ModelConfig, ModelShape, PoolerSpec
from quire.engine.frontend.input_gate import text_gate
from quire.engine.frontend.pooling_input import PoolingInputProcessor
from quire.errors import ContextLengthExceeded, InvalidRequest, UnsupportedTask
from quire.params import PoolingParams, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

CONTEXT = 16
SHAPE = ModelShape(
    architecture="BertModel", vocab_size=len(tiny.VOCAB), hidden_size=8, intermediate_size=8,
    num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position_embeddings=CONTEXT,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    tiny.save_tokenizer(folder)
    return Tokenizer.from_folder(Path(folder))


def gate(tokenizer: Tokenizer | None = None, **spec: Any) -> PoolingInputProcessor:
    pooler = PoolerSpec(
        **{"task": "embed", "backbone": "Bert", "whole_prompts": True, "pooling": "cls", "size": 8}
        | spec
    )
    return PoolingInputProcessor(
        ModelConfig(), SHAPE, tokenizer, pooler=pooler, max_model_len=CONTEXT
    )


def ids(of: PoolingInputProcessor, prompt: Any, **params: Any) -> list[int]:
    done = of.process("r", prompt, PoolingParams(**params), arrival_time=0.0)
    (request,) = done.requests
    return request.prompt_token_ids


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    assert ids(gate(), [5] * CONTEXT) == [5] * CONTEXT
    with pytest.raises(ContextLengthExceeded, match="at most 16 tokens, but the prompt has 17"):
        ids(gate(), [5] * (CONTEXT + 1))


@pytest.mark.parametrize(
    ("keep", "side", "want"),
    [(3, "right", [5, 6, 7]), (3, "left", [28, 29, 30]), (-1, "right", [*range(5, 5 + CONTEXT)])],
)
def test_token_ids_are_cut(keep: int, side: str, want: list[int]) -> None:
    prompt = list(range(5, 31))
    got = ids(gate(), prompt, truncate_prompt_tokens=keep, truncation_side=side)
    assert got == want
    got = ids(
        gate(), {"prompt_token_ids": prompt}, truncate_prompt_tokens=keep, truncation_side=side
    )
    assert got == want


@pytest.mark.parametrize("spelled", [lambda text: text, lambda text: {"prompt": text}])
def test_text_is_cut_between_its_special_tokens(tokenizer: Tokenizer, spelled: Any) -> None:
    whole = tokenizer.encode("hello world paris france")
    cut = ids(gate(tokenizer), spelled("hello world paris france"), truncate_prompt_tokens=4)
    assert cut == [*whole[:3], whole[-1]]
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        ids(gate(), spelled("hello"), truncate_prompt_tokens=4)


def test_each_request_has_an_id_of_its_own_and_refused_ones_use_none() -> None:
    one = gate()
    with pytest.raises(InvalidRequest, match="at least one token"):
        ids(one, [])
    params = PoolingParams()
    admitted = [one.process("same", [5], params, arrival_time=0.0) for _ in range(2)]
    assert [p.requests[0].request_id for p in admitted] == ["same-00000000", "same-00000001"]


def test_no_text_comes_of_it() -> None:
    message = "gives embeddings; it generates no text"
    with pytest.raises(UnsupportedTask, match=message):
        text_gate(gate())
    with pytest.raises(UnsupportedTask, match=message):
        gate().process("r", [5], SamplingParams(), arrival_time=0.0)


def test_prefixes_are_read_only_where_the_last_token_alone_counts() -> None:
    def reads(params: PoolingParams, **spec: Any) -> bool:
        done = gate(**spec).process("r", [5], params, arrival_time=0.0)
        return not done.params.skip_reading_prefix_cache

    decoder = {"whole_prompts": False, "pooling": "last"}
    assert reads(PoolingParams(), **decoder)
    assert not reads(PoolingParams(task="token_embed"), **decoder)
    assert not reads(PoolingParams(skip_reading_prefix_cache=True), **decoder)
    assert not reads(PoolingParams(), **{**decoder, "pooling": "mean"})
    assert not reads(PoolingParams())
