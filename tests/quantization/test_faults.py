"""Checkpoints that contradict themselves, hold what cannot be, or are in unread formats."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantised_writers import FORMATS, checkpoint
from quire.config import ModelShape
from quire.errors import ModelLoadError
from quire.models.registry import load_model, weight_format
from quire.quantization.refused import REFUSED

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints by format, each written once."""
    found = {}

    def write(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("checkpoint")
            found[name] = checkpoint(folder, FORMATS[name](), layers=1)[1]
        return found[name]

    return write


def refused(folder, tmp_path, tensors=None, config=None):
    """The message about a checkpoint with other tensors or another configuration."""
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] |= config or {}
    (tmp_path / "config.json").write_text(json.dumps(said))
    stored = load_file(folder / "model.safetensors")
    for name, change in (tensors or {}).items():
        stored[name] = change(stored[name])
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelShape.from_folder(tmp_path), tmp_path, "float32", "cpu")
    return caught.value.message


def put(value, at=0):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return change


HOSTILE = [
    ("gptq 4", "scales", put(torch.nan), r"finite numbers, got nan at \[0, 0\]"),
    ("gptq 4", "scales", put(torch.inf, 3), r"finite numbers, got inf at \[0, 3\]"),
    ("gptq 4", "g_idx", put(-1), "groups must be 0 to 9, got -1"),
    ("gptq 4", "g_idx", put(10), "groups must be 0 to 9, got 10"),
    ("gptq 4", "g_idx", put(1), "a group has 64 columns, but group 0 has 63"),
    ("gptq 4 short last group", "g_idx", put(6), "a group has 96 columns, but group 0 has 95"),
    ("gptq 4 short last group", "g_idx", put(7), "groups must be 0 to 6, got 7"),
    ("awq gemm", "scales", put(torch.nan), "finite numbers, got nan"),
    ("awq gemv", "scales", put(-torch.inf), "finite numbers, got -inf"),
    ("ct int8", "weight_scale", put(torch.nan), "finite numbers, got nan"),
    ("ct int4 g32", "weight_scale", put(torch.nan), "finite numbers, got nan"),
    ("ct int4 g32", "weight_shape", put(255), r"must be \[256, 640\], got \[255, 640\]"),
    ("ct int4 actorder", "weight_g_idx", put(77), "groups must be 0 to 9, got 77"),
    ("ct nvfp4", "weight_global_scale", put(0.0), "must not be 0"),
    ("ct nvfp4", "weight_scale", put(torch.nan), "finite numbers, got nan"),
    ("ct mxfp4", "weight_scale", put(255), "exponents of 255"),
    ("ct fp8 tensor", "weight", put(torch.nan), "codes that are NaN"),
    ("fp8 block", "weight_scale_inv", put(torch.nan), "finite numbers, got nan"),
    ("modelopt nvfp4", "weight_scale_2", lambda t: t * torch.inf, "finite numbers, got inf"),
    ("bnb int8", "SCB", put(torch.nan), "finite numbers, got nan"),
    ("bnb int8", "weight_format", lambda t: t + 1, "only the plain layout of rows"),
    ("bnb nf4", "weight.absmax", put(torch.inf), "finite numbers, got inf"),
    ("bnb nf4", "weight.absmax", lambda t: t[1:].clone(), "must hold 2560 scales of blocks of 64"),
    ("bnb nf4", "weight.quant_map", put(0.5), "is not the table of nf4"),
    ("bnb nf4", "weight.quant_state.bitsandbytes__nf4", put(0), "holds no state of bitsandbytes"),
    ("bnb nf4", "weight.absmax", put(torch.nan), "finite numbers, got nan"),
    ("ct mxfp8", "weight_scale", put(255), "exponents of 255"),
    ("ct mxfp8", "weight", put(torch.nan), "codes that are NaN"),
    ("quark int8", "weight_scale", put(torch.inf, 2), r"finite numbers, got inf at \[2\]"),
    ("quark mxfp4", "weight_scale", put(255), "exponents of 255"),
    ("ct nvfp4", "weight_global_scale", put(torch.nan), "finite numbers, got nan"),
    ("modelopt fp8", "weight", put(torch.nan), "codes that are NaN"),
    ("gptq 4", "g_idx", put(2**31 - 1), "groups must be 0 to 9, got 2147483647"),
    ("ct int4 actorder", "weight_g_idx", put(-2), "groups must be 0 to 9, got -2"),
]
TOO_LARGE = [
    ("ct mxfp8", "weight_scale", put(254), "at most 7.54e+35 for codes up to 448"),
    ("ct mxfp4", "weight_scale", put(254), "at most 5.63e+37 for codes up to 6"),
    ("ct nvfp4", "weight_global_scale", put(1e-44), "scales must be finite, got inf"),
    ("modelopt nvfp4", "weight_scale_2", lambda t: t * 0 + 3e38, "scales must be finite, got inf"),
    ("modelopt fp8", "weight_scale", lambda t: t * 0 + 1e37, "got 1e+37"),
    ("ct int8", "weight_scale", put(1e37), "got 1e+37"),
    ("ct int4 g32", "weight_scale", put(3e38), "at most 2.25e+37 for codes up to 15"),
    ("gptq 4", "scales", lambda t: t.float() * 0 + 3e38, "got 3e+38"),
]
"""Numbers, each finite, that make infinite ones together."""
SHAPES = [
    ("ct mxfp8", "weight_scale", 1),
    ("ct mxfp4", "weight_scale", 0),
    ("ct nvfp4", "weight_scale", 1),
    ("modelopt nvfp4", "weight_scale", 0),
    ("bnb nf4", "weight", 0),
    ("bnb nf4", "weight.quant_map", 0),
    ("bnb int8", "SCB", 0),
    ("fp8 block", "weight_scale_inv", 1),
    ("gptq 4", "qzeros", 1),
    ("gptq 4", "g_idx", 0),
    ("awq gemm", "qzeros", 0),
    ("ct int4 g64 asymmetric", "weight_zero_point", 0),
    ("ct int4 actorder", "weight_g_idx", 0),
]
"""Tensors, and the dimension in which they lack the last."""


@pytest.mark.parametrize(("name", "tensor", "change", "why"), HOSTILE)
def test_hostile_tensors_are_refused_by_name(name, tensor, change, why, written, tmp_path):
    said = refused(written(name), tmp_path, {f"{LAYER}.{tensor}": change})
    assert f"layer {LAYER!r} (" in said and f"tensor '{LAYER}.{tensor}': " in said
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)


@pytest.mark.parametrize(("name", "tensor", "change", "why"), TOO_LARGE)
def test_weights_that_would_be_infinite_are_refused(name, tensor, change, why, written, tmp_path):
    said = refused(written(name), tmp_path, {f"{LAYER}.{tensor}": change})
    assert f"layer {LAYER!r} (" in said and why in said


@pytest.mark.parametrize(("name", "tensor", "dim"), SHAPES)
def test_wrong_shapes_are_refused_by_name(name, tensor, dim, written, tmp_path):
    def shorter(stored):
        return stored.narrow(dim, 0, stored.shape[dim] - 1).contiguous()

    said = refused(written(name), tmp_path, {f"{LAYER}.{tensor}": shorter})
    shape = list(shorter(load_file(written(name) / "model.safetensors")[f"{LAYER}.{tensor}"]).shape)
    assert f"{LAYER!r} is " in said and f" {tensor} " in said and f"{shape}, not [" in said


CONTRADICTIONS = [
    ("gptq 4", {"bits": 8}, "int8 in groups of 64 (GPTQ), but qweight is [", ", not ["),
    ("gptq 4", {"group_size": 32}, "int4 in groups of 32 (GPTQ), but qzeros is [", ", not ["),
    ("awq gemm", {"version": "gemv"}, "(AWQ gemv), but qzeros is [", ", not ["),
    ("ct int8", {"ignore": ["re:.*q_proj"]}, "not quantised, but it has no weight of a float", ""),
    ("fp8 block", {"weight_block_size": [64, 64]}, "blocks of 64 x 64, but weight_scale_inv", ""),
    ("fp8 block", {"weight_block_size": None}, "fp8 (e4m3), but weight_scale_inv is [", "not []"),
    ("bnb int8", {"load_in_8bit": False, "load_in_4bit": True}, "fp4 (bitsandbytes), but", ""),
]


@pytest.mark.parametrize(("name", "config", "said", "more"), CONTRADICTIONS)
def test_contradictions_are_told_with_both(name, config, said, more, written, tmp_path):
    message = refused(written(name), tmp_path, config=config)
    assert "configuration says that 'model.layers.0." in message
    assert said in message and more in message and ". It has " in message


def test_missing_wrong_and_unexpected_tensors_are_told(written, tmp_path):
    folder = written("gptq 4")
    message = refused(folder, tmp_path, {f"{LAYER}.qzeros": lambda _: None})
    assert "qzeros missing. It has " in message and f"{LAYER!r} is int4" in message
    message = refused(folder, tmp_path, {f"{LAYER}.scales": lambda t: t.int()})
    assert "scales is I32, not BF16 or F16 or F32" in message
    parts = ("qweight", "qzeros", "scales", "g_idx")
    nothing = {f"{LAYER}.{part}": lambda _: None for part in parts}
    assert f"missing: {LAYER}.weight" in refused(folder, tmp_path, nothing)


UNREAD = [
    ({"quant_method": "gptq", "bits": 5}, "GPTQ with 5 bits is not read; nearest: 4 of 2, 3, 4, 8"),
    ({"quant_method": "gptq", "bits": "four"}, "'bits' must be a whole number, got 'four'"),
    ({"quant_method": "gptq"}, "lacks 'bits'"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "the format 'marlin'"),
    ({"quant_method": "awq", "bits": 3}, "AWQ with 3 bits is not read; nearest: 4"),
    ({"quant_method": "awq", "version": "gemv_fast"}, "save it with the version gemm"),
    ({"quant_method": "compressed-tensors"}, "'config_groups' must be an object"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two positive whole numbers"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "nearest: FP8, NVFP4"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 0},
        "'group_size' must be a positive whole number, got 0",
    ),
    ({"quant_method": ["gptq"], "bits": 4}, "is quantised (['gptq']), which quire does not read"),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}},
        "global_quant_config of Quark has weights of 'uint4' None",
    ),
    (
        {
            "quant_method": "quark",
            "layer_quant_config": {"*k_proj": {"weight": [{"dtype": "fp8_e4m3"}] * 2}},
        },
        "layer_quant_config.*k_proj of Quark has weights quantised twice",
    ),
    ({"quant_method": "quark", "global_quant_config": 3}, "must be an object, got 3"),
    ({"quant_method": "quark"}, "'global_quant_config' must be an object with 'weight'"),
    ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit"),
    *(({"quant_method": name}, advice) for name, advice in REFUSED.items()),
]  # fmt: skip


@pytest.mark.parametrize(("config", "why"), UNREAD)
def test_what_is_not_read_is_refused_with_what_is_nearest(config, why, written):
    shape = ModelShape.from_folder(written("gptq 4"))
    shape.raw["quantization_config"] = config
    with pytest.raises(ModelLoadError) as caught:
        weight_format(shape)
    assert why in caught.value.message
    assert "quantization_config" in caught.value.message or "read" in caught.value.message


def test_groups_of_compressed_tensors_that_are_not_read(written, tmp_path):
    def said(weights, form="pack-quantized"):
        group = {"targets": ["Linear"], "weights": weights}
        config = {"format": form, "config_groups": {"group_0": group}}
        return refused(written("ct int8"), tmp_path, config=config)

    assert "weights of 9 bits" in said({"num_bits": 9, "type": "int"})
    assert "int8 in groups" not in said({"num_bits": 4}, "marlin-24")
    assert "'marlin-24', which quire does not read" in said({"num_bits": 4}, "marlin-24")
    assert "['int'], which quire does not read" in said({"num_bits": 4}, ["int"])
    assert "strategy 'attn_head'" in said({"num_bits": 4, "strategy": "attn_head"})


def test_files_beside_the_configuration(written, tmp_path):
    """quantize_config.json (GPTQ) and the like count where config.json says nothing."""
    folder = written("gptq 4")
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    del said["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    shape = ModelShape.from_folder(tmp_path)
    assert shape.raw["quantization_config"]["quant_method"] == "gptq"
    load_model(shape, tmp_path, "float32", "cpu")
