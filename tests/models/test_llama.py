"""Llama against a dense forward in float64, over the variants of the family."""

import math
import random

import pytest
import torch

import dense_llama
from paged_run import load, serve
from quire.config.model import EMBEDDED_FOLDER
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.rotary import cos_sin_table, inverse_frequencies
from quire.weights.dummy import random_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "GQA": {},
    "MHA": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "odd sizes": {"hidden_size": 50, "head_dim": 10, "intermediate_size": 33, "vocab_size": 51},
}


def prompt(length, vocab=97, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_match(tmp_path, variant):
    folder = random_checkpoint(tmp_path, VARIANTS[variant])
    model = load(folder)
    ids = prompt(90, model.shape.vocab_size)
    got = serve(model, [ids], random.Random(0), chunk=lambda: 37)[0]
    want = dense_llama.logits(folder, ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.3, "logits that are all alike prove nothing"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types_match_within_their_precision(tmp_path, dtype):
    folder = random_checkpoint(tmp_path, {"torch_dtype": dtype})
    model = load(folder)
    assert model.dtype == getattr(torch, dtype)
    ids = prompt(60)
    got = serve(model, [ids], random.Random(0))[0].double()
    want = dense_llama.logits(folder, ids)
    error = (got - want).norm() / want.norm()
    assert error < {"bfloat16": 4e-2, "float16": 3e-3}[dtype]


def test_dtype_can_be_chosen(tmp_path):
    folder = random_checkpoint(tmp_path, {"torch_dtype": "bfloat16"})
    model = load(folder, "float32")
    ids = prompt(30)
    got = serve(model, [ids], random.Random(0))[0]
    torch.testing.assert_close(got.double(), dense_llama.logits(folder, ids), atol=1e-4, rtol=1e-4)


def test_the_embedded_model_matches_too():
    folder = EMBEDDED_FOLDER / "quire-demo"
    model = load(folder, "float32")
    ids = prompt(100, 2048)
    got = serve(model, [ids], random.Random(0))[0]
    torch.testing.assert_close(got.double(), dense_llama.logits(folder, ids), atol=1e-3, rtol=1e-4)


def test_parameters_are_counted_once(tmp_path):
    _, weights = dense_llama.read(random_checkpoint(tmp_path, {"tie_word_embeddings": True}))
    assert load(tmp_path).num_parameters == sum(w.numel() for w in weights.values())


def shape_with(**changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    return ModelShape.from_hf_json({**config, **changes})


def test_rotary_table_holds_cosines_then_sines():
    table = cos_sin_table(shape_with(max_position_embeddings=100), "cpu")
    assert table.shape == (100, 16)
    torch.testing.assert_close(table[7, 0].item(), 0.7539022543433046)  # cos 7
    torch.testing.assert_close(table[7, 8].item(), 0.6569865987187891)  # sin 7
    longer = cos_sin_table(shape_with(max_position_embeddings=3000), "cpu")
    assert torch.equal(longer[:100], table)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain = inverse_frequencies(shape_with())
    scaled = inverse_frequencies(shape_with(rope_scaling=LLAMA3))
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linaer", "factor": 2}, "got 'linaer'; did you mean 'linear'"),
        (
            {"type": "yarnn"},
            "must be one of default, linear, ntk, .*got 'yarnn'; did you mean 'yarn'",
        ),
        ({"rope_type": "linear"}, "needs 'factor' as a positive number, got None"),
        ({"type": "yarn", "factor": math.inf}, "needs 'factor' as a positive number, got inf"),
        (
            {"type": "longrope", "short_factor": [math.inf] * 8, "long_factor": [1.0] * 8},
            r"needs 'short_factor' as \d+ positive numbers, got \[inf",
        ),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor equals high_freq_factor"),
        ({"rope_type": "ntk", "factor": 1e308}, "'ntk'.*out of range"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0.5}, "'yarn'.*by zero"),
    ],
)
def test_bad_rope_scaling_is_refused(scaling, message):
    with pytest.raises(ModelLoadError, match=message):
        inverse_frequencies(shape_with(rope_scaling=scaling))


def test_legacy_scaling_spelling_is_read():
    old = inverse_frequencies(shape_with(rope_scaling={"type": "linear", "factor": 2.0}))
    assert torch.equal(old, inverse_frequencies(shape_with()) / 2)
