"""`quire inspect` tells what the engine then does; the model tree in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli import main as cli
from quire.cli.inspect import as_text, inspect
from quire.config import EngineConfig, ModelConfig
from quire.weights.dummy import random_checkpoint
from quire.weights.files import SafetensorsCheckpoint


def report(**options: Any) -> dict[str, Any]:
    return inspect(EngineConfig.from_options(**options))


def test_it_tells_what_the_engine_does() -> None:
    told = report(model="quire-demo-draft", max_model_len=256)
    with LLM("quire-demo-draft", max_model_len=256) as llm:
        worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
        assert told["weight_bytes"] == worker.weight_bytes
        plan = worker.plan
        assert told["kv_cache"]["bytes_per_token"] * plan.num_blocks * plan.block_size == plan.bytes
        assert told["tokenizer"]["vocab_size"] == llm.get_tokenizer().vocab_size
    assert told["max_model_len"] == 256 and told["supported"] is True
    assert told["tokenizer"]["chat_templates"] == ["default"]
    assert told["features"]["tied_embeddings"] is True


def test_no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda *_: pytest.fail("data was read"))
    assert report(model="quire-demo")["parameters"] > 1_000_000


def test_flags_change_what_is_told() -> None:
    plain = report(model="quire-demo")
    wide = report(model="quire-demo", dtype="float32")
    assert wide["weight_bytes"] == 2 * plain["weight_bytes"]
    assert wide["kv_cache"]["bytes_per_token"] == 2 * plain["kv_cache"]["bytes_per_token"]
    fewer = report(model="quire-demo", hf_overrides={"num_key_value_heads": 2})
    assert fewer["kv_cache"]["bytes_per_token"] * 2 == plain["kv_cache"]["bytes_per_token"]
    assert report(model="quire-demo", load_format="dummy")["weights"]["estimated"] is True


def test_text_and_json(capsys: Any) -> None:
    assert cli.main(["inspect", "quire-demo"]) == 0
    text = capsys.readouterr().out
    for words in ("LlamaForCausalLM", "BF16 in 1 file,", "per token", "default chat template"):
        assert words in text
    assert cli.main(["inspect", "quire-demo", "--json", "--max-model-len", "1k"]) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 1000


def test_an_unknown_architecture_and_its_code(tmp_path: Path, capsys: Any) -> None:
    config = {"architectures": ["LlamaForCasualLM"], "auto_map": {"AutoModel": "x.Y"}}
    folder = random_checkpoint(tmp_path, config)
    told = report(model=str(folder))
    assert told["supported"] is False and "did you mean 'LlamaForCausalLM'" in told["reason"]
    assert told["features"]["code_never_run"] is True
    assert "tokenizer" in told["tokenizer"]["problem"]
    assert cli.main(["inspect", str(folder)]) == 0
    assert "LlamaForCasualLM (unknown)" in capsys.readouterr().out


def test_code_of_a_model_is_mentioned_and_not_run(tmp_path: Path, caplog: Any) -> None:
    from quire.models.registry import load_model

    folder = random_checkpoint(tmp_path, {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}})
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    load_model(ModelConfig(model=str(folder)).read_shape(), folder, "auto", "cpu")
    assert caplog.text.count("quire never runs it") == 1


def test_the_tree_of_a_model_in_the_log(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.models.registry import load_model

    folder = random_checkpoint(tmp_path)
    shape = ModelConfig(model=str(folder)).read_shape()
    with caplog.at_level("INFO", "quire"):
        load_model(shape, folder, "auto", "cpu")
        assert "embed_tokens" not in caplog.text
        monkeypatch.setenv("VLLM_LOG_MODEL_INSPECTION", "true")
        model = load_model(shape, folder, "auto", "cpu")
    assert f"LlamaForCausalLM: {model.num_parameters:,} parameters in float32" in caplog.text
    for line in (
        "model (DecoderModel)",
        "embed_tokens (Embedding)",
        "qkv_proj (Linear)",
        "weight [128, 48] x 2",
        "kernels ",
        "attention paged",
    ):
        assert line in caplog.text, caplog.text


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weights_that_are_quantised_while_they_are_loaded(scheme: str) -> None:
    told = report(model="quire-demo", quantization=scheme)
    schemes = told["weights"]["schemes"]
    assert sum(row["layers"] for row in schemes.values()) == 21
    assert ("int4 in groups of 32" in schemes) == (scheme == "int4")
    with LLM("quire-demo", quantization=scheme) as llm:
        worker = llm.llm_engine.core.executor._worker  # type: ignore[attr-defined]
        assert told["weight_bytes"] == pytest.approx(worker.weight_bytes, rel=0.02)
    lines = as_text(told).splitlines()
    assert any("bits per weight, int8 activations" in line for line in lines)
