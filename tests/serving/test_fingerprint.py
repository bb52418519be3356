"""`system_fingerprint`: another one wherever the same request may get other bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from quire.config import CacheConfig, ModelConfig, ServerConfig
from quire.serving.server_state import ServerState

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "quantization_config": {"group_size": 64}},
    {"quantization": "int4", "quantization_config": {"group_size": 128}},
    {"quantization": "int4", "quantization_config": {"ignore": ["lm_head"]}},
    {"quantization": "int4", "quantization_config": {"ignore": ["re:.*layers.0."]}},
    {"quantization": "int4", "quantization_config": {"targets": {"re:.*down_proj": "int8"}}},
    {"quantization": "int4", "quantization_config": {"targets": {"re:.*down_proj": None}}},
    {"dtype": "float32"},
)


def fingerprint(cache: CacheConfig | None = None, **model: Any) -> str:
    engine = FakeEngine()
    config = dataclasses.replace(engine.config, model=ModelConfig(**model))
    engine.config = dataclasses.replace(config, cache=cache or CacheConfig())
    return ServerState(ServerConfig(), engine).model_for().fingerprint


def test_schemes_of_layers_and_of_keys_and_values_are_told_apart() -> None:
    found = [fingerprint(**options) for options in OPTIONS]
    found += [
        fingerprint(CacheConfig(kv_cache_dtype="fp8")),
        fingerprint(CacheConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])),
    ]
    assert len(set(found)) == len(found)
    assert found[: len(OPTIONS)] == [fingerprint(**options) for options in OPTIONS]


def test_a_file_counts_by_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {"ignore": ["lm_head"]}
    given = [str(tmp_path / "a.json"), f"@{tmp_path / 'b.json'}"]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(said))
    found = {fingerprint(quantization="int8", quantization_config=c) for c in (said, *given)}
    assert len(found) == 1
    (tmp_path / "a.json").write_text(json.dumps({"ignore": []}))
    assert fingerprint(quantization="int8", quantization_config=given[0]) not in found
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")
    assert fingerprint(quantization="int8", quantization_config=said) not in found
