"""What a request from a journal must find again before it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import EngineConfig, envs
from quire.engine.frontend.disk.identity import identity
from quire.kernels import compiled
from quire.kernels.dispatch import build_of, choose, title_of

INFO = {"dtype": "bfloat16", "device": "cpu", "place": "here", "kernels": "native avx2 0a"}


def told(info: Mapping[str, str] = INFO, **options: Any) -> dict[str, str]:
    return identity(EngineConfig.from_options(**options), info)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"quantization": "int8"}, "quantisation"),
        ({"quantization_config": {"linear": "int8"}}, "quantisation"),
        ({"quantization_config": {"linear": "int8", "ignore": ["lm_head"]}}, "quantisation"),
        ({"kv_cache_dtype": "fp8"}, "type of keys and values"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "type of keys and values"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "type of keys and values"),
        ({"hf_overrides": {"rope_theta": 9.0}}, "overrides of the model"),
    ],
)
def test_options_that_change_tokens_are_told_apart(options: dict[str, Any], what: str) -> None:
    plain, other = told(), told(**options)
    assert [name for name in plain if plain[name] != other[name]] == [what]


@pytest.mark.parametrize("kernels", ["native avx512 0a", "native avx2 0b", "reference"])
def test_other_kernels_are_told_apart(kernels: str) -> None:
    plain, other = told(), told({**INFO, "kernels": kernels})
    assert [name for name in plain if plain[name] != other[name]] == ["kernels"]


def test_a_build_is_named_by_its_file() -> None:
    """Whoever changes one byte of the compiled module has another build."""
    if compiled.lib is None:
        pytest.skip("kernels are not built")
    content = Path(compiled.lib.__file__).read_bytes()
    assert compiled.build() == hashlib.sha256(content).hexdigest()[:16]
    native = build_of(choose("native"))
    assert native == f"native {compiled.lib.isa()} {compiled.build()}, torch {torch.__version__}"
    assert build_of(choose("reference")) == f"reference, torch {torch.__version__}"
    assert title_of(choose("reference")) == "reference"
    assert title_of(choose("native")) == " ".join(native.split()[:2])


def test_options_that_change_none_are_not() -> None:
    assert told(max_num_seqs=3, swap_space=0.5, block_size=32) == told()


def test_the_activations_of_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = told()
    monkeypatch.setattr(envs, "CPU_INT4_W4A8", False)
    assert told() != plain


def test_schemes_of_layers_are_told_apart() -> None:
    given = [
        {"quantization": "int4"},
        {"quantization": "int4", "quantization_config": {"group_size": 64}},
        {"quantization": "int4", "quantization_config": {"ignore": ["lm_head"]}},
        {"quantization": "int4", "quantization_config": {"targets": {"lm_head": "int4"}}},
    ]
    found = [told(**options)["quantisation"] for options in given]
    assert len(set(found)) == len(given)
