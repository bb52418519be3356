"""What a model folder says about pooling, and every way in which it or an option can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from quire import LLM, PoolingParams, SamplingParams
from quire.config import EngineConfig, ModelConfig, ModelShape, read_pooler
from quire.config.model import EMBEDDED_MODEL
from quire.core.admission import change_limits
from quire.errors import ConfigError, InvalidRequest, ModelLoadError, UnsupportedTask
from quire.tokenizer.tokenizer import Tokenizer


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    config = {**tiny.BASE, "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def read(folder: Path, **options: Any) -> Any:
    model = ModelConfig(model=str(folder), **options)
    return read_pooler(model, ModelShape.from_folder(folder))


@pytest.mark.parametrize(
    ("architecture", "options", "task"),
    [
        ("LlamaForCausalLM", {}, None),
        ("GPT2LMHeadModel", {}, None),
        ("ChatGLMModel", {}, None),
        ("LlamaForCausalLM", {"runner": "pooling"}, "embed"),
        ("LlamaForCausalLM", {"task": "embed"}, "embed"),
        ("LlamaForCausalLM", {"task": "generate"}, None),
        ("LlamaModel", {}, "embed"),
        ("BertModel", {}, "embed"),
        ("ModernBertForMaskedLM", {"task": "embedding"}, "embed"),
        ("BertForSequenceClassification", {}, "classify"),
        ("BertForSequenceClassification", {"task": "score"}, "classify"),
        ("BertForSequenceClassification", {"convert": "embed"}, "embed"),
        ("LlamaForSequenceClassification", {"task": "classify"}, "classify"),
    ],
)
def test_what_a_model_is_run_for(
    tmp_path: Path, architecture: str, options: dict[str, Any], task: str | None
) -> None:
    pooler = read(write(tmp_path, architecture), **options)
    assert (pooler and pooler.task) == task


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("BertModel", {"runner": "generate"}, "BertModel has no head that generates text"),
        ("BertModel", {"task": "generate"}, "no head that generates text"),
        ("LlamaModel", {"runner": "generate"}, "no head"),
        ("BertModel", {"convert": "classify"}, "BertModel has no classification head"),
        ("LlamaForCausalLM", {"task": "classify"}, "no classification head"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "use --convert embed"),
        ("BertModel", {"task": "embed", "runner": "generate"}, "means --runner pooling"),
        ("BertModel", {"pooler_config": {"pooling": "CLS"}}, "unknown key 'pooling'"),
        ("BertModel", {"pooler_config": {"pooling_type": "STEP"}}, "CLS, MEAN.*got 'STEP'"),
        ("BertModel", {"pooler_config": {"use_activation": 1}}, "true or false, got 1"),
        ("BertModel", {"pooler_config": {"dimensions": 49}}, "from 1 to 48.*got 49"),
        ("BertModel", {"pooler_config": {"matryoshka_dimensions": 8}}, "a list of positive"),
    ],
)
def test_options_that_contradict(
    tmp_path: Path, architecture: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, architecture), **options)


@pytest.mark.parametrize(
    ("option", "value"), [("runner", "draft"), ("convert", "reward"), ("task", "sing")]
)
def test_values_of_options(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} must be one of .*, got '{value}'"):
        ModelConfig(**{option: value})


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
    ],
)
def test_sentence_transformers_folders(tmp_path: Path, mode: str, pooling: str) -> None:
    tiny.sentence_transformer(write(tmp_path, "BertModel"), mode, normalize=pooling == "cls")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 64}', "utf-8")
    pooler = read(tmp_path)
    assert (pooler.pooling, pooler.use_activation) == (pooling, pooling == "cls")
    config, _ = EngineConfig.from_options(model=str(tmp_path)).resolve(
        ModelShape.from_folder(tmp_path)
    )
    assert config.model.max_model_len == 64


def test_newer_spelling_of_the_mode(tmp_path: Path) -> None:
    tiny.sentence_transformer(write(tmp_path, "LlamaForCausalLM"), "x")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}', "utf-8")
    pooler = read(tmp_path)
    assert (pooler.task, pooler.pooling, pooler.use_activation) == ("embed", "last", True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pooling_mode_cls_token": True}, "exactly one of"),
        ({"pooling_mode_mean_tokens": False}, "exactly one of.*got none"),
        (
            {"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True},
            "got pooling_mode_weightedmean_tokens",
        ),
    ],
)
def test_bad_modes(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    tiny.sentence_transformer(write(tmp_path, "BertModel"), **extra)
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "a list of objects"),
        ("not json", "cannot read"),
        ([{"type": "x.Transformer", "path": ""}, {"type": "x.LSTM", "path": "1"}], "'LSTM'"),
        ([{"type": "x.Pooling", "path": "../../secret"}], "outside the folder"),
    ],
)
def test_bad_modules(tmp_path: Path, modules: Any, message: str) -> None:
    text = modules if isinstance(modules, str) else json.dumps(modules)
    (write(tmp_path, "BertModel") / "modules.json").write_text(text, "utf-8")
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 2}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            "none",
        ),
        (
            {"id2label": {"0": "no"}, "sbert_ce_default_activation_function": "torch.nn.Sigmoid()"},
            "sigmoid",
        ),
    ],
)
def test_class_activations(tmp_path: Path, changes: dict[str, Any], activation: str) -> None:
    pooler = read(write(tmp_path, "BertForSequenceClassification", **changes))
    assert pooler.activation == activation
    assert pooler.size == changes.get("num_labels", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 0}, "from 1 to 100000, got 0"),
        ({"sbert_ce_default_activation_function": "os.system"}, "Sigmoid.*got 'os.system'"),
    ],
)
def test_bad_classifiers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(write(tmp_path, "BertForSequenceClassification", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "absolute, got 'relative_key'"),
        ({"hidden_act": "gleu"}, "did you mean 'gelu'"),
        ({"num_attention_heads": 5}, "multiple of num_attention_heads, got 48 and 5"),
        ({"architectures": ["BertoModel"]}, "BertoModel"),
    ],
)
def test_bad_encoders(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tiny.make(tmp_path, "BertModel")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tiny.make(tmp_path, "BertModel")
    write(tmp_path, "BertForSequenceClassification", num_labels=2, type_vocab_size=2)
    with pytest.raises(ModelLoadError, match=r"missing: classifier\.bias, classifier\.weight"):
        LLM(str(tmp_path))


def test_dense_layers(tmp_path: Path) -> None:
    """Transformer, Pooling, Dense with tanh, Normalize."""
    model = tiny.make(tmp_path, "BertModel")
    tiny.sentence_transformer(tmp_path, dense=["2_Dense"])
    dense = tmp_path / "2_Dense"
    dense.mkdir()
    weights = {"linear.weight": torch.randn(20, 48), "linear.bias": torch.randn(20)}
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    config = {"in_features": 48, "out_features": 20, "bias": True}
    config["activation_function"] = "torch.nn.modules.activation.Tanh"
    (dense / "config.json").write_text(json.dumps(config), "utf-8")
    prompts = tiny.prompts(3)
    with LLM(str(tmp_path)) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        mean = tiny.hidden(model, ids).mean(0)
        want = (weights["linear.weight"] @ mean + weights["linear.bias"]).tanh()
        want = torch.nn.functional.normalize(want, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=1e-5, rtol=0)
    (dense / "config.json").write_text(json.dumps({**config, "in_features": 47}), "utf-8")
    with pytest.raises(ModelLoadError, match="in_features must be 48"):
        read(tmp_path)


def test_wordpiece_from_vocab_txt(tmp_path: Path) -> None:
    """The same ids as transformers' own reading of the file."""
    tiny.save_tokenizer(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    theirs = tiny.transformers().BertTokenizer(str(tmp_path / "vocab.txt"))
    texts = ["Hello, WORLD?", "the cat é ü 日本", "paris", "", "x" * 150]
    for text in texts:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    pair, reference = ours.encode_pair("hello world", "the cat"), theirs("hello world", "the cat")
    assert pair.ids == reference["input_ids"]
    assert [int(i >= pair.split) for i in range(len(pair.ids))] == reference["token_type_ids"]
    assert (
        ours.encode_within("hello world paris", 4)
        == theirs("hello world paris", truncation=True, max_length=4)["input_ids"]
    )
    with pytest.raises(InvalidRequest, match="lone surrogates"):
        ours.encode_pair("a", "\ud800")
    with pytest.raises(InvalidRequest, match="lone surrogates"):
        ours.encode_within("\ud800", 5)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n", "utf-8")
    with pytest.raises(ModelLoadError, match=r"no token '\[SEP\]'"):
        Tokenizer.from_folder(tmp_path)


def test_encoders_compute_whole_prompts(tmp_path: Path) -> None:
    tiny.make(tmp_path, "BertModel")
    with LLM(str(tmp_path), max_num_batched_tokens=50) as llm:
        scheduler = llm.llm_engine.config.scheduler
        assert (scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill) == (160, False)
        with pytest.raises(InvalidRequest, match="long_prefill_token_threshold must be 0"):
            change_limits(scheduler, {"long_prefill_token_threshold": 8}, 160)
        with pytest.raises(InvalidRequest, match="at most 160 tokens, but the prompt has 161"):
            llm.embed([[5] * 161])
        assert len(llm.embed([[5] * 160], use_tqdm=False)) == 1
        llm.llm_engine.core.scheduler.check_integrity()
    with pytest.raises(ConfigError, match="computed whole, got 16"):
        LLM(str(tmp_path), long_prefill_token_threshold=16)
    with pytest.raises(ConfigError, match="max-model-len 161 is more than the 160"):
        LLM(str(tmp_path), max_model_len=161)


def test_verbs_and_kinds(tmp_path: Path) -> None:
    with LLM(EMBEDDED_MODEL) as text, pytest.raises(UnsupportedTask, match="generates text"):
        text.embed("hello")
    tiny.make(tmp_path, "BertModel")
    with LLM(str(tmp_path)) as llm:
        for wrong in (
            lambda: llm.generate("hello", SamplingParams()),
            lambda: llm.classify("hello"),
            lambda: llm.encode([[5]], PoolingParams(dimensions=8)),
            lambda: llm.encode([[5]], pooling_task="score"),
        ):
            with pytest.raises(UnsupportedTask):
                wrong()
        with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
            llm.encode([[5]], [PoolingParams()] * 2)
        with pytest.raises(InvalidRequest, match=r"as many as data_2 \(2\), got 3"):
            llm.score(["a", "b", "c"], ["a", "b"])
        with pytest.raises(InvalidRequest, match="data_2 must be a text"):
            llm.score("a", [])
        assert not llm.llm_engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "sing"), ("dimensions", 0), ("dimensions", True), ("truncate_prompt_tokens", -2),
        ("truncation_side", "up"), ("use_activation", 2),
    ],
)  # fmt: skip
def test_pooling_params(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be") as caught:
        PoolingParams(**{field: value})
    assert caught.value.param == field
