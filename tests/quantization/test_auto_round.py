"""Checkpoints of AutoRound: what its entries say of layers, and what is refused.

Their tensors are those of GPTQ and AWQ (`FORMATS`)."""

import json

import pytest
from safetensors.torch import load_file, save_file

from quantised_writers import FORMATS, checkpoint, gptq
from quire.config import ModelShape
from quire.config.quant_methods import quant_method
from quire.errors import ModelLoadError
from quire.models.inspection import linears
from quire.models.registry import load_model

AT = "model.layers.0"
DOWN, OUT, UP = f"{AT}.mlp.down_proj", f"{AT}.self_attn.o_proj", f"{AT}.mlp.gate_up_proj"
ENDS = ("qweight", "qzeros", "scales", "g_idx")


def entries(folder, **said):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= said
    path.write_text(json.dumps(config))
    return folder


def forms(folder):
    model = load_model(ModelShape.from_folder(folder), folder, "float32", "cpu")
    return {linear.method.spec.name: linear.method.form for linear in linears(model)}


def plain_layer(folder, plain, name):
    """The layer as it was before."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for end in ENDS:
        del tensors[f"{name}.{end}"]
    tensors[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, path, {"format": "pt"})


def made(tmp_path, name="auto-round gptq", layers=1):
    return checkpoint(tmp_path, FORMATS[name](), layers)


def test_tensors_are_those_of_gptq(tmp_path):
    _, one = made(tmp_path / "one")
    _, other = checkpoint(tmp_path / "other", gptq(), layers=1)
    assert forms(one) == forms(other) and "GPTQ" in forms(one)[DOWN]


@pytest.mark.parametrize("key", [DOWN, ".*down_proj.*", r"mlp\.down_proj$"])
def test_layers_that_are_left(key, tmp_path):
    plain, folder = made(tmp_path)
    plain_layer(folder, plain, DOWN)
    with pytest.raises(ModelLoadError, match=f"'{DOWN}' is int4"):
        forms(folder)
    found = forms(entries(folder, extra_config={key: {"bits": 16, "data_type": "float"}}))
    assert found[DOWN] == "float32" and "int4" in found[OUT]


def test_layers_of_other_widths(tmp_path):
    """An exact name stands before an expression that fits as well."""
    plain, folder = made(tmp_path)
    weight = load_file(plain / "model.safetensors")[f"{DOWN}.weight"].float()
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{DOWN}.{end}": t for end, t in gptq(8, 128)[1](weight)[0].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    extra = {".*down.*": {"bits": 2}, DOWN: {"bits": 8, "group_size": 128}}
    assert forms(entries(folder, extra_config=extra))[DOWN].startswith("int8 in groups of 128")


def test_a_name_is_no_expression(tmp_path):
    """`…mlp.gate`, a router that is left, is found in `…mlp.gate_proj`."""
    _, folder = made(tmp_path)
    found = forms(entries(folder, extra_config={f"{AT}.mlp.gate": {"bits": 16}}))
    assert "int4" in found[UP]


@pytest.mark.parametrize("blocks", ["model.layers", "vision, model.layers", [["model.layers.0"]]])
def test_blocks(blocks, tmp_path):
    _, folder = made(tmp_path)
    assert "int4" in forms(entries(folder, block_name_to_quantize=blocks))[DOWN]


@pytest.mark.parametrize("blocks", ["model.layer", ["model.layers.1"], "vision,"])
def test_layers_outside_of_the_blocks_are_left(blocks, tmp_path):
    plain, folder = made(tmp_path)
    plain_layer(folder, plain, DOWN)
    found = forms(entries(folder, block_name_to_quantize=blocks))
    assert found[DOWN] == "float32" and "int4" in found[OUT]


def test_a_layer_that_is_named_is_quantised_wherever_it_is(tmp_path):
    plain, folder = made(tmp_path)
    plain_layer(folder, plain, DOWN)
    extra = {DOWN: {"bits": 8}}
    with pytest.raises(ModelLoadError, match=f"'{DOWN}' is int8 in groups of 64"):
        forms(entries(folder, block_name_to_quantize="vision", extra_config=extra))


def test_a_head_that_is_quantised_too(tmp_path):
    plain, folder = made(tmp_path)
    weight = load_file(plain / "model.safetensors")["model.embed_tokens.weight"].float()
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"lm_head.{end}": t for end, t in gptq(8, 64)[1](weight)[0].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    found = forms(entries(folder, extra_config={"lm_head": {"bits": 8}}))
    assert found["lm_head"].startswith("int8 in groups of 64 (GPTQ)")


def test_heads_are_left_without_a_word(tmp_path):
    plain, folder = made(tmp_path)
    head = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": head.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    found = forms(entries(folder, block_name_to_quantize=None))
    assert found["lm_head"] == "float32" and "int4" in found[DOWN]


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_may_be_missing_where_they_are_the_middle(symmetric, tmp_path):
    _, folder = made(tmp_path, "auto-round awq")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{DOWN}.qzeros"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entries(folder, sym=symmetric)
    if symmetric:
        assert "int4" in forms(folder)[DOWN]
    else:
        with pytest.raises(ModelLoadError, match=f"'{DOWN}' is int4 .*, but qzeros missing"):
            forms(folder)


@pytest.mark.parametrize("name", ["auto_round", "autoround", "Intel/auto-round", "inc"])
def test_names_of_the_method(name, tmp_path):
    _, folder = made(tmp_path)
    assert quant_method(name) == "auto-round"
    assert "int4" in forms(entries(folder, quant_method=name))[DOWN]


def test_older_files_do_not_name_their_packing(tmp_path):
    _, folder = made(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["packing_format"]
    path.write_text(json.dumps(config))
    assert "GPTQ" in forms(folder)[DOWN]


WRONG = {
    "packing": ({"packing_format": "auto_round:fp8_static"},
                "packing_format 'auto_round:fp8_static' is not read; nearest: save it as auto_"),
    "no packing": ({"packing_format": ["a"]}, r"packing_format \['a'\] is not read"),
    "type": ({"data_type": "mx_fp"}, "'data_type' must be int .*, got 'mx_fp'"),
    "bits": ({"bits": 5}, "GPTQ with 5 bits is not read"),
    "no bits": ({"bits": None}, "lacks 'bits'"),
    "bits of a layer": ({"extra_config": {DOWN: {"bits": 7}}}, f"layer '{DOWN}': GPTQ with 7"),
    "extra": ({"extra_config": [DOWN]}, "'extra_config' must be an object of objects"),
    "extra of a layer": ({"extra_config": {DOWN: 16}}, "'extra_config' must be an object of"),
    "expression": ({"extra_config": {"*(": {"bits": 16}}},
                   r"'extra_config' must be regular expressions \(.*\), got '\*\('"),
    "blocks": ({"block_name_to_quantize": [["model.layers", 0]]}, "'block_name_to_quantize' must"),
    "awq": ({"packing_format": "auto_round:auto_awq", "bits": 8}, "AWQ with 8 bits is not read"),
    "awq groups": ({"packing_format": "auto_round:auto_awq", "group_size": 96},
                   "256 columns, which groups of 96 do not divide"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_entries(wrong, tmp_path):
    said, why = WRONG[wrong]
    _, folder = made(tmp_path)
    with pytest.raises(ModelLoadError, match=why):
        forms(entries(folder, **said))
