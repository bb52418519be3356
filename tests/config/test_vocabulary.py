"""`config.json` in the spellings of many families gives one shape; senseless values are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.shape import LIMITS, ModelShape
from quire.config.vocabulary import ALIASES, canonical, merged
from quire.errors import ModelLoadError

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "hidden_act": "gelu",
}


def fields(shape: ModelShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in ModelShape.__slots__ if name != "raw"}


@pytest.mark.parametrize(
    ("name", "other"), [(n, o) for n, others in ALIASES.items() for o in others if n in PLAIN]
)
def test_every_other_spelling_gives_the_same_shape(name: str, other: str) -> None:
    config = dict(PLAIN)
    config[other] = config.pop(name)
    shape = ModelShape.from_hf_json(config)
    assert fields(shape) == fields(ModelShape.from_hf_json(PLAIN))
    assert shape.raw[name] == PLAIN[name], "families read the common name"
    assert shape.raw[other] == PLAIN[name], "nothing is taken away"


def test_the_common_name_wins_except_where_the_padded_one_counts() -> None:
    assert canonical({"num_hidden_layers": 3, "n_layer": 4})["num_hidden_layers"] == 3
    assert canonical({"vocab_size": 100, "padded_vocab_size": 128})["vocab_size"] == 128
    assert canonical({"num_hidden_layers": None, "n_layer": 4})["num_hidden_layers"] == 4


def test_a_nested_text_model_wins_over_the_outer_entries() -> None:
    inner = {k: v for k, v in PLAIN.items() if k != "architectures"}
    outer = {
        "architectures": ["LlavaForConditionalGeneration"],
        "vocab_size": 7,
        "eos_token_id": 5,
        "vision_config": {"hidden_size": 9},
        "text_config": {**inner, "architectures": ["LlamaForCausalLM"], "bos_token_id": None},
    }
    shape = ModelShape.from_hf_json(outer)
    assert (shape.vocab_size, shape.hidden_size) == (100, 64)
    assert shape.architecture == "LlavaForConditionalGeneration"
    assert shape.eos_token_ids == (5,)
    twice = {"architectures": ["X"], "thinker_config": {"text_config": inner}}
    assert ModelShape.from_hf_json(twice).hidden_size == 64
    with pytest.raises(ModelLoadError, match="'text_config' must be an object"):
        ModelShape.from_hf_json({**PLAIN, "text_config": [1]})


@pytest.mark.parametrize(
    ("entries", "heads"),
    [
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 71}, 1),
        ({"model_type": "falcon", "new_decoder_architecture": True, "multi_query": True,
          "num_kv_heads": 2}, 2),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "gpt_bigcode", "multi_query": False}, 8),
        ({"model_type": "gpt_bigcode"}, 1),
        ({"model_type": "RefinedWeb", "multi_query": True, "n_head_kv": 2}, 2),
        ({"attn_config": {"attn_type": "multiquery_attention", "kv_n_heads": 8}}, 1),
        ({"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}, 2),
        ({"attn_config": {"kv_n_heads": None}}, 8),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"multi_query_attention": False, "multi_query_group_num": 2}, 8),
        ({}, 8),
    ],
)  # fmt: skip
def test_key_value_heads_said_with_switches(entries: dict[str, Any], heads: int) -> None:
    config = {k: v for k, v in PLAIN.items() if k != "num_key_value_heads"}
    assert ModelShape.from_hf_json({**config, **entries}).num_kv_heads == heads


def test_older_families_have_an_mlp_of_four_times_the_width() -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 4,
        "n_layer": 2, "n_positions": 128, "n_inner": None, "vocab_size": 50,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    }  # fmt: skip
    shape = ModelShape.from_hf_json(gpt2)
    assert (shape.intermediate_size, shape.num_kv_heads, shape.head_dim) == (256, 4, 16)
    assert shape.hidden_act == "gelu_new"
    with pytest.raises(ModelLoadError, match="misses 'intermediate_size'"):
        ModelShape.from_hf_json({**gpt2, "model_type": "other"})


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ({"model_type": "mpt"}, 256),
        ({"model_type": "mpt", "expansion_ratio": 2}, 128),
        ({"model_type": "hf_olmo", "mlp_ratio": 8, "mlp_hidden_size": None}, 256),
        ({"model_type": "hf_olmo", "mlp_ratio": 8, "mlp_hidden_size": 200}, 100),
        ({"model_type": "mpt", "expansion_ratio": "4"}, "got '4'"),
        ({"model_type": "mpt", "expansion_ratio": float("nan")}, "got nan"),
        ({"model_type": "hf_olmo", "mlp_hidden_size": [1]}, r"got \[1\]"),
        ({"model_type": "hf_olmo"}, "misses 'intermediate_size'"),
    ],
)
def test_an_mlp_measured_by_the_model(entries: dict[str, Any], size: int | str) -> None:
    config = {**PLAIN, **entries, "intermediate_size": None}
    if isinstance(size, int):
        assert ModelShape.from_hf_json(config).intermediate_size == size
        return
    with pytest.raises(ModelLoadError, match=size):
        ModelShape.from_hf_json(config)


def test_rope_parameters_of_several_kinds_of_layers() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {k: v for k, v in PLAIN.items() if k != "rope_theta"}
    shape = ModelShape.from_hf_json({**config, "rope_parameters": rope})
    assert (shape.rope_theta, shape.rope_scaling) == (1e6, rope["full_attention"])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_size": 2**40}, f"'hidden_size' must be at most {2**20}"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, got 0"),
        ({"num_hidden_layers": True}, "got True"),
        ({"head_dim": 2.5}, "got 2.5"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' must be a number above 0, got -1"),
        ({"rope_theta": float("nan")}, "'rope_theta' must be a number above 0"),
        ({"rope_theta": 1e-46}, "'rope_theta' must be from 1e-30 to 1e30, got 1e-46"),
        ({"rope_theta": 10**400}, "must be from 1e-30 to 1e30, got an integer of 1329 bits"),
        ({"rope_theta": "much"}, "got 'much'"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"rope_parameters": [1]}, "'rope_parameters' must be an object"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id"),
        ({"architectures": []}, "--hf-overrides"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
    ],
)
def test_senseless_values_are_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        ModelShape.from_hf_json({**PLAIN, **entries})
    assert words in caught.value.message
    assert len(caught.value.message) < 300


def test_a_missing_size_names_the_spellings_that_are_read() -> None:
    with pytest.raises(ModelLoadError, match=r"misses 'num_hidden_layers' \(also read: n_layer,"):
        ModelShape.from_hf_json({k: v for k, v in PLAIN.items() if k != "num_hidden_layers"})


def test_overrides_merge_into_objects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "text_config": {"head_dim": 8}}))
    over = {"text_config": {"rope_theta": 7.0}, "max_position_embeddings": 99}
    shape = ModelShape.from_folder(tmp_path, over)
    assert (shape.head_dim, shape.rope_theta, shape.max_position_embeddings) == (8, 7.0, 99)
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
names = st.sampled_from([*PLAIN, *LIMITS, "text_config", "rope_scaling", "rope_parameters",
                         "eos_token_id", "n_embd", "multi_query", "model_type"])  # fmt: skip


@given(st.dictionaries(names, json_values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_configuration_crashes_the_reader(entries: dict[str, Any]) -> None:
    try:
        shape = ModelShape.from_hf_json({**PLAIN, **entries})
    except ModelLoadError:
        return
    assert 1 <= shape.num_layers <= LIMITS["num_hidden_layers"]
