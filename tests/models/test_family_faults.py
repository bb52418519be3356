"""The families' runner can fail, checkpoints of other layouts, and what every family keeps to."""

import dataclasses
import importlib
import inspect
import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file

from hf_checkpoint import build, hf_logits
from paged_run import load, serve
from quire.errors import ModelLoadError
from quire.models import registry
from quire.weights.files import SINGLE, write_safetensors
from quire.weights.names import grouped_qkv
from rows_dense import DENSE
from rows_moe import MOE

ROWS = {row.name: row for row in DENSE}
FAULTS = {
    "bloom": ("alibi", 0.9),
    "gemma2": ("logit_softcap", 7.1),
    "gemma3": ("layer_ropes", ("full",) * 6),
    "cohere2": ("layer_ropes", ("full",) * 4),
    "granite": ("residual_scale", 0.23),
    "gpt2": ("activation", "gelu"),
    "opt": ("position_offset", 1),
    "olmo2": ("norm_eps", 1e-2),
    "falcon 40b": ("placement", "pre"),
    "phi": ("ropes", {}),
    "cohere": ("attention_scale", 0.3),
    "mpt steep": ("alibi_bias_max", 14.0),
    "mpt of six heads": ("clip_qkv", 0.55),
    "olmo clipped": ("clip_qkv", 0.55),
}
"""Row, and one field of its style that is made wrong."""


def prompt(vocab=101, length=90):
    rng = random.Random(0)
    return [rng.randrange(3, vocab) for _ in range(length)]


def largest_difference(folder, judge):
    got = serve(load(folder, "float32"), [prompt()], random.Random(0))[0]
    return (got.log_softmax(-1) - hf_logits(judge, prompt()).log_softmax(-1)).abs().max()


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_style_would_be_noticed(name, tmp_path, monkeypatch):
    judge = build(ROWS[name], tmp_path)
    assert largest_difference(tmp_path, judge) < 1e-4
    family = type(load(tmp_path))
    field, value = FAULTS[name]
    honest = family.style

    def spoiled(shape):
        return dataclasses.replace(honest(shape), **{field: value})

    monkeypatch.setattr(family, "style", staticmethod(spoiled))
    assert largest_difference(tmp_path, judge) > 2e-4


@pytest.mark.parametrize("name", ["mistral", "starcoder2", "qwen2 windows"])
def test_a_wider_window_would_be_noticed(name, tmp_path, monkeypatch):
    judge = build(ROWS[name], tmp_path)
    family = type(load(tmp_path))
    honest = family.windows
    wider = staticmethod(lambda shape: [w and w + 1 for w in honest(shape)])
    monkeypatch.setattr(family, "windows", wider)
    assert largest_difference(tmp_path, judge) > 2e-4


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_inside_a_larger_one(prefix, tmp_path):
    judge = build(ROWS["gemma3"], tmp_path)
    rewrite(tmp_path, lambda n, t: (n.replace("model.", prefix, 1), t))
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    path.write_text(json.dumps(whole))
    assert largest_difference(tmp_path, judge) < 1e-4


def rewrite(folder, change):
    path = folder / SINGLE
    tensors = load_file(path)
    write_safetensors(dict(change(n, t) for n, t in tensors.items()), path)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "gpt-bigcode", "gpt-j"])
def test_checkpoints_without_the_outer_prefix(name, tmp_path):
    judge = build(ROWS[name], tmp_path)
    rewrite(tmp_path, lambda n, t: (re.sub(r"^(transformer|model)\.", "", n), t))
    assert largest_difference(tmp_path, judge) < 1e-4


def test_gpt2_buffers_in_old_checkpoints_are_skipped(tmp_path):
    judge = build(ROWS["gpt2"], tmp_path)
    path = tmp_path / SINGLE
    tensors = load_file(path)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    write_safetensors(tensors, path)
    assert largest_difference(tmp_path, judge) < 1e-4


def test_a_fused_weight_of_another_size_is_refused(tmp_path):
    build(ROWS["falcon 40b"], tmp_path)
    rewrite(tmp_path, lambda n, t: (n, t[:-1].clone() if "query_key_value" in n else t))
    with pytest.raises(ModelLoadError, match="wrong shape: .*query_key_value"):
        load(tmp_path)


def test_grouped_qkv():
    rows = torch.arange(2 * (3 + 2) * 4).view(-1, 1)  # 2 KV heads of 3 query heads, size 4
    got = grouped_qkv(2, 3)(rows).view(-1, 4)
    heads = rows.view(-1, 4)
    assert torch.equal(got, heads[[0, 1, 2, 5, 6, 7, 3, 8, 4, 9]])
    assert grouped_qkv(3, 3)(rows) is rows


def test_every_family_is_short():
    """A dense family costs at most 120 lines."""
    for name in registry.MODELS:
        module = importlib.import_module(registry.MODELS.target(name).partition(":")[0])
        assert inspect.getsource(module).count("\n") <= 120, module.__name__


def test_every_dense_family_has_rows():
    """So that no row of the registry goes untested."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tested = set()
    for row in (*DENSE, *MOE):
        kind = getattr(transformers, row.config).model_type
        tested.add(row.architecture or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    assert set(registry.MODELS) - tested <= {
        "ChatGLMForConditionalGeneration",  # not in transformers: test_chatglm
        "ChatGLMModel",
        "Gemma3ForConditionalGeneration",  # test_the_text_model_inside_a_larger_one
        "MPTForCausalLM",  # other names of families that have rows: rows patch or convert to them
        "OLMoForCausalLM",
        "RWForCausalLM",
    }


def test_an_unknown_architecture_is_refused_with_all_names():
    with pytest.raises(ModelLoadError) as caught:
        registry.MODELS.get("Gemma22ForCausalLM")
    assert "did you mean 'Gemma2ForCausalLM'?" in caught.value.message
    assert all(name in caught.value.message for name in registry.MODELS)
