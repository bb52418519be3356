"""Rotary tables: scalings by the length served, partly rotated heads, bad configurations."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config.engine import EngineConfig
from quire.config.shape import ModelShape
from quire.errors import ConfigError, ModelLoadError
from quire.layers.rotary import SCALINGS, Rope, cos_sin_table, inverse_frequencies
from quire.weights.dummy import TINY

LONGROPE = {"type": "longrope", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}


def shape_with(**changes):
    return ModelShape.from_hf_json({**TINY, **changes})


def rope_with(length=None, **scaling):
    shape = shape_with(rope_scaling=scaling, original_max_position_embeddings=128)
    return Rope.of(shape, length=length)


def test_all_scalings_are_there():
    assert set(SCALINGS) == {"default", "linear", "ntk", "dynamic", "llama3", "yarn", "longrope"}


SCALED = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 32768},
    "longrope": {"long_factor": [1 + i / 9 for i in range(16)], "short_factor": [1.0] * 16,
                 "original_max_position_embeddings": 4096},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "theta"), [*((kind, 5e5) for kind in SCALED), ("default", 10000.0)]
)
def test_tables_are_those_of_transformers_at_any_position(kind, theta):
    """Rounded as there: at position 131,000 an exact angle is 0.01 away.

    A power may be rounded otherwise, and with it one pair of dimensions.
    """
    length, scaling = 131072, {"rope_type": kind, **SCALED[kind]}
    parameters = {"rope_theta": theta, **scaling}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=1, max_position_embeddings=length,
        rope_parameters=parameters,
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 77, 4095, 32767, 99999, length - 1]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    rope = Rope(32, theta, length, scaling)
    ours = cos_sin_table(rope, "cpu")[positions[0]]
    away = (ours - torch.cat((cos[0, :, :16], sin[0, :, :16]), -1)).abs().amax(0)
    assert away.max() < 0.02
    assert (away < 1e-6).float().mean() > 0.9


def test_ntk_stretches_the_longest_wave_by_the_factor():
    plain, scaled = rope_with(), rope_with(rope_type="ntk", factor=4.0)
    ratio = inverse_frequencies(plain) / inverse_frequencies(scaled)
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1].item(), 4.0)


def test_dynamic_changes_nothing_until_longer_texts_are_served():
    plain = inverse_frequencies(rope_with())
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    for length in (None, 100, 512):
        assert torch.equal(inverse_frequencies(rope_with(length, **scaling)), plain)
    longer = inverse_frequencies(rope_with(1024, **scaling))
    base = 10000.0 * (4 * 1024 / 512 - 3) ** (16 / 14)
    torch.testing.assert_close(longer[1].item(), base ** (-2 / 16))
    assert cos_sin_table(rope_with(1024, **scaling), "cpu").shape == (1024, 16)


def test_longrope_goes_by_the_length_served():
    plain = inverse_frequencies(rope_with())
    assert torch.equal(inverse_frequencies(rope_with(128, **LONGROPE)), plain)
    assert torch.equal(inverse_frequencies(rope_with(129, **LONGROPE)), plain / 4)
    assert torch.equal(inverse_frequencies(rope_with(None, **LONGROPE)), plain / 4)
    factor = math.sqrt(1 + math.log(512 / 128) / math.log(128))
    table = cos_sin_table(rope_with(128, **LONGROPE), "cpu")
    torch.testing.assert_close(table[0, 0].item(), factor)


def test_a_position_has_the_same_entry_in_a_table_of_any_length():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    short, long = (cos_sin_table(rope_with(n, **scaling), "cpu") for n in (None, 3000))
    assert torch.equal(short, long[: len(short)])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "needs 'long_factor' as 8 positive"),
        ({**LONGROPE, "long_factor": [1.0] * 7}, "needs 'long_factor' as 8 positive numbers"),
        ({**LONGROPE, "long_factor": [0.0] * 8}, "needs 'long_factor' as 8 positive numbers"),
        ({"rope_type": "dynamic"}, "needs 'factor' as a positive number, got None"),
        (
            {"rope_type": "yarn", "factor": "many"},
            "needs 'factor' as a positive number, got 'many'",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"},
            "needs 'original_max_position_embeddings' as a positive number",
        ),
        ({"rope_type": "ntk", "factor": -1}, "needs 'factor' as a positive number, got -1"),
    ],
)
def test_bad_scalings_are_refused(scaling, message):
    with pytest.raises(ModelLoadError, match=message):
        cos_sin_table(rope_with(**scaling), "cpu")


def test_an_odd_number_of_rotated_dimensions_is_refused():
    with pytest.raises(ModelLoadError, match="must be even for rotary positions, got 3"):
        Rope.of(shape_with(), dim=3)


@pytest.mark.parametrize(
    ("config", "default", "limit"),
    [
        ({}, 512, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048, 2048),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512, 1024),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            1024,
            1024,
        ),
        ({"rope_scaling": LONGROPE}, 512, 512),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3"}, 512, 512),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, 512, 512),
    ],
)
def test_how_long_texts_may_be(config, default, limit):
    shape = shape_with(**config)
    assert (shape.default_length, shape.length_limit) == (default, limit)
    resolved, _ = EngineConfig.from_options().resolve(shape)
    assert resolved.model.max_model_len == default
    EngineConfig.from_options(max_model_len=limit).resolve(shape)
    with pytest.raises(ConfigError, match=f"more than the {limit} positions"):
        EngineConfig.from_options(max_model_len=limit + 1).resolve(shape)


def test_a_table_has_the_positions_that_are_served():
    """A model of a million positions that serves a few thousand needs no gigabyte of them."""
    whole, short = (cos_sin_table(rope_with(length), "cpu") for length in (None, 100))
    assert len(whole) == 512 and torch.equal(short, whole[:100])
    with pytest.raises(ModelLoadError, match=r"4,611,686,018,427,387,904 positions.*max-model-len"):
        cos_sin_table(rope_with(2**62), "cpu")
