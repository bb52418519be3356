"""`--kv-cache-dtype` at every door, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.cli.serve import build_parser
from quire.config.cli import engine_config
from quire.errors import ConfigError


def test_flags_and_files(tmp_path: Path) -> None:
    parser = build_parser()
    flags = "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0 sliding_window"
    cache = engine_config(parser.parse(flags.split())).cache
    assert cache.kv_cache_dtype == "int8_per_token_head"
    assert cache.kv_cache_dtype_skip_layers == ["0", "sliding_window"]
    (tmp_path / "c.yaml").write_text("kv-cache-dtype: fp8\nkv-cache-dtype-skip-layers: [1, 2]\n")
    cache = engine_config(parser.parse(["--config", str(tmp_path / "c.yaml")])).cache
    assert cache.kv_cache_dtype == "fp8" and cache.kv_cache_dtype_skip_layers == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_dtype": "fp4"}, "one of auto, .*, got 'fp4'"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "got 'int4_per_token_head'"),
        ({"kv_cache_dtype_skip_layers": ["-1"]}, "numbers of layers and .*, got '-1'"),
        ({"kv_cache_dtype_skip_layers": ["all"]}, "got 'all'"),
        ({"kv_cache_dtype_skip_layers": [True]}, "list of texts, got .True."),
    ],
)
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_options(**options)


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="layers 0 to [0-9]+, got 400"):
        LLM(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[400])


def test_skipped_layers_are_as_without() -> None:
    """All skipped: the same tokens and log-probabilities; some: the capital is still right."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    told = {}
    for skip in ([], [0], [*range(5)]):
        with LLM(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=skip) as llm:
            (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
            told[len(skip)] = output.outputs[0]
    with LLM() as llm:
        (output,) = llm.generate(["The capital of France is"], params, use_tqdm=False)
    assert {one.text for one in told.values()} == {" Paris."}
    assert told[5].logprobs == output.outputs[0].logprobs != told[0].logprobs
