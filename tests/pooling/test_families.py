"""Each pooling family against transformers, and against itself in another batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from quire import LLM, PoolingParams

POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "CLS": lambda h: h[0],
    "LAST": lambda h: h[-1],
    "MEAN": lambda h: h.mean(0),
    "MAX": lambda h: h.amax(0),
}


EMBEDDERS = [
    # architecture, changes of the configuration, pooling that holds by default
    ("BertModel", {}, "CLS"),
    ("BertModel", {"hidden_act": "gelu_new", "num_attention_heads": 3}, "CLS"),
    ("BertForMaskedLM", {"hidden_act": "relu"}, "CLS"),
    ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}, "CLS"),
    ("XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}, "CLS"),
    ("ModernBertModel", {}, "CLS"),
    ("ModernBertModel", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}, "CLS"),
    ("LlamaModel", {}, "LAST"),
    ("LlamaForCausalLM", {}, "LAST"),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}, "LAST"),
    ("Qwen2Model", {}, "LAST"),
    ("Qwen3Model", {"head_dim": 12}, "LAST"),
    ("MistralModel", {"num_key_value_heads": 2}, "LAST"),
    ("GemmaModel", {"num_key_value_heads": 1, "head_dim": 12}, "LAST"),
]
CLASSIFIERS = [
    ("BertForSequenceClassification", {"num_labels": 3}),
    ("BertForSequenceClassification", {"num_labels": 1}),
    ("RobertaForSequenceClassification", {"num_labels": 4, "pad_token_id": 1}),
    ("XLMRobertaForSequenceClassification", {"num_labels": 1, "pad_token_id": 1}),
    ("ModernBertForSequenceClassification", {"num_labels": 2}),
    ("ModernBertForSequenceClassification", {"num_labels": 2, "classifier_pooling": "mean"}),
    ("LlamaForSequenceClassification", {"num_labels": 5}),
    ("LlamaForSequenceClassification", {"num_labels": 1}),
    ("Qwen2ForSequenceClassification", {"num_labels": 1}),
    ("Qwen3ForSequenceClassification", {"num_labels": 2, "head_dim": 12}),
]


def arrays(outputs: list[Any]) -> list[np.ndarray]:
    return [output.outputs.data for output in outputs]


def alone(llm: LLM, prompts: list[list[int]], params: PoolingParams | None = None) -> list[Any]:
    return [llm.encode([p], params, use_tqdm=False)[0].outputs.data for p in prompts]


@pytest.mark.parametrize(("architecture", "changes", "pooling"), EMBEDDERS)
def test_embeddings(
    tmp_path: Path, architecture: str, changes: dict[str, Any], pooling: str
) -> None:
    model = tiny.make(tmp_path, architecture, **changes)
    prompts = tiny.prompts()
    raw = PoolingParams(use_activation=False)
    with LLM(str(tmp_path), runner="pooling", max_num_batched_tokens=200) as llm:
        together = arrays(llm.encode(prompts, raw, use_tqdm=False))
        scaled = arrays(llm.encode(prompts, use_tqdm=False))
        states = arrays(llm.encode(prompts, raw, pooling_task="token_embed", use_tqdm=False))
        again = alone(llm, prompts, raw)
    for ids, got, unit, tokens, single in zip(
        prompts, together, scaled, states, again, strict=True
    ):
        want = tiny.hidden(model, ids)
        np.testing.assert_allclose(tokens, want, atol=2e-5)
        np.testing.assert_allclose(got, POOL[pooling](want), atol=2e-5)
        np.testing.assert_allclose(
            unit, torch.nn.functional.normalize(POOL[pooling](want), dim=0), atol=1e-5
        )
        assert got.tobytes() == single.tobytes(), "the batch shows in the bits"
    assert np.stack(scaled).std(0).max() > 0.02, "embeddings that are all alike prove nothing"


@pytest.mark.parametrize(("architecture", "changes"), CLASSIFIERS)
def test_classes(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    model = tiny.make(tmp_path, architecture, **changes)
    prompts = tiny.prompts()
    with LLM(str(tmp_path), max_num_batched_tokens=200) as llm:
        bare = arrays(llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False))
        outputs = llm.classify(prompts, use_tqdm=False)
        again = alone(llm, prompts)
    for ids, got, output, single in zip(prompts, bare, outputs, again, strict=True):
        want = tiny.logits(model, ids)
        np.testing.assert_allclose(got, want, atol=3e-5)
        probs = want.sigmoid() if changes["num_labels"] == 1 else want.softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, probs, atol=1e-5)
        assert output.outputs.num_classes == changes["num_labels"]
        assert output.outputs.probs == single.tolist()
    assert np.stack(bare).std(0).max() > 0.03


@pytest.mark.parametrize("pooling", POOL)
@pytest.mark.parametrize("architecture", ["BertModel", "LlamaModel"])
def test_poolings_whatever_the_chunks(tmp_path: Path, architecture: str, pooling: str) -> None:
    """A decoder's prompt comes in pieces of 32 tokens; what was in the earlier ones counts."""
    model = tiny.make(tmp_path, architecture)
    prompts = [*tiny.prompts(5), tiny.prompts(5)[4]]
    config = {"pooling_type": pooling, "use_activation": False}
    results = []
    for budget in (32, 300):
        options = {"max_num_batched_tokens": budget, "pooler_config": config}
        with LLM(str(tmp_path), **options) as llm:
            results.append(arrays(llm.encode(prompts, use_tqdm=False)))
    for ids, got, other in zip(prompts, *results, strict=True):
        np.testing.assert_allclose(got, POOL[pooling](tiny.hidden(model, ids)), atol=2e-5)
        assert got.tobytes() == other.tobytes()


def test_prefixes_are_found_again(tmp_path: Path) -> None:
    tiny.make(tmp_path, "LlamaModel")
    prompt = tiny.prompts(2)[1]
    with LLM(str(tmp_path)) as llm:
        first, second = (llm.encode([prompt], use_tqdm=False)[0] for _ in range(2))
        whole = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(prompt) - 1
    assert first.outputs.data.tobytes() == second.outputs.data.tobytes()
    assert whole.outputs.data.shape == (len(prompt), 48)
    assert whole.outputs.data[-1].tobytes() == second.outputs.data.tobytes()


def test_bfloat16(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "BertModel")
    prompts = tiny.prompts()
    with LLM(str(tmp_path), dtype="bfloat16") as llm:
        got = arrays(llm.encode(prompts, use_tqdm=False))
        again = alone(llm, prompts)
    for ids, row, single in zip(prompts, got, again, strict=True):
        want = torch.nn.functional.normalize(tiny.hidden(model, ids)[0], dim=0)
        assert float(row @ want.numpy()) > 0.998
        assert row.tobytes() == single.tobytes()


def test_pairs_of_texts(tmp_path: Path) -> None:
    """A cross-encoder sees both texts, and which is which."""
    model = tiny.make(tmp_path, "BertForSequenceClassification", num_labels=1)
    documents = ["hello world", "paris , france", "the cat sat on the mat ."]
    with LLM(str(tmp_path)) as llm:
        outputs = llm.score("hello france ?", documents, use_tqdm=False)
        single = llm.score("hello france ?", documents[2], use_tqdm=False)[0]
        tokenizer = llm.get_tokenizer()
    for document, output in zip(documents, outputs, strict=True):
        pair = tokenizer.encode_pair("hello france ?", document)
        assert pair.ids == output.prompt_token_ids
        types = [int(i >= pair.split) for i in range(len(pair.ids))]
        want = tiny.logits(model, pair.ids, types).sigmoid()
        assert output.outputs.score == pytest.approx(float(want), abs=1e-5)
        assert abs(float(tiny.logits(model, pair.ids).sigmoid()) - float(want)) > 1e-3
    assert single.outputs.score == outputs[2].outputs.score


def test_old_names_of_norms(tmp_path: Path) -> None:
    """bert-base-uncased still calls them gamma and beta."""
    from safetensors.torch import load_file, save_file

    tiny.make(tmp_path, "BertModel")
    prompt = tiny.prompts(1)[:1]
    with LLM(str(tmp_path)) as llm:
        want = llm.encode(prompt, use_tqdm=False)[0].outputs.data
    path = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in old)
    old["embeddings.position_ids"] = torch.arange(160).unsqueeze(0)
    save_file(old, path, metadata={"format": "pt"})
    with LLM(str(tmp_path)) as llm:
        assert llm.encode(prompt, use_tqdm=False)[0].outputs.data.tobytes() == want.tobytes()
