"""Checkpoints as people's tools write them: biases of zeros, lists in other spellings, entries of
older versions. Each loads with the weights that it had before, or is refused with what is wrong."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_run import serve
from quantised_writers import FORMATS, checkpoint
from quire.config import ModelConfig, ModelShape
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.dispatch import default_ops
from quire.layers.linear_method import LinearSpec
from quire.models.registry import load_model
from quire.quantization.checkpoint import CheckpointMethod
from quire.quantization.compressed_tensors import CompressedTensors
from quire.quantization.entries import spellings
from quire.quantization.scheme import OF_ACTIVATIONS
from quire.weights.bundles import StoredPart, StoredTensor

DOWN = "model.layers.0.mlp.down_proj"
HEADS = ("model.language_model", "language_model.model")
PLAIN = StoredTensor("x.weight", (8, 64), "BF16")


def changed(folder, tensors=None, **config):
    """The checkpoint with more tensors and other entries of its configuration."""
    stored = load_file(folder / "model.safetensors") | (tensors or {})
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def load(folder):
    return load_model(ModelShape.from_folder(folder), folder, "float32", "cpu")


def logits(folder):
    model = load(folder)
    hidden = torch.linspace(-1, 1, 256).repeat(3, 1)
    return model.compute_logits(hidden), [
        parameter.form for name, parameter in model.parameters().items() if name.endswith("weight")
    ]


def after_prompt(folder):
    """Logits that all layers had a part in, and the layers' forms."""
    return serve(load(folder), [[1, 40, 7, 90]], random.Random(0))[0], logits(folder)[1]


def said(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    return {"quantization_config": config["quantization_config"] | entries}


# ---- compressed-tensors --------------------------------------------------------------------------


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("symmetric", [True, None])
def test_zeros_of_a_symmetric_layer_are_a_contradiction(symmetric, unpacked, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["ct int4 g64 asymmetric"](), layers=1)
    entries = said(folder)
    weights = entries["quantization_config"]["config_groups"]["group_0"]["weights"]
    del weights["symmetric"]
    weights |= {} if symmetric is None else {"symmetric": symmetric}
    tensors = {}
    if unpacked:
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.endswith("zero_point"):
                rows = tensor.shape[0] * 8
                tensors[name] = torch.full((rows, tensor.shape[1]), 1, dtype=torch.int8)
    with pytest.raises(ModelLoadError, match=r"zero_point.*symmetric"):
        load(changed(folder, tensors, **entries))


@pytest.mark.parametrize("unpacked", [False, True])
def test_zeros_in_the_middle_are_none(unpacked, tmp_path):
    """Some writers have them beside symmetric weights."""
    _, folder = checkpoint(tmp_path, FORMATS["ct int4 g32"](), layers=1)
    want = logits(folder)[0]
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("weight_scale"):
            rows, groups = tensor.shape
            middle = torch.full((rows // 8, groups), -0x77777778, dtype=torch.int32)
            zeros = torch.zeros(rows, groups, dtype=torch.int8) if unpacked else middle
            tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    assert torch.equal(logits(changed(folder, tensors))[0], want)


def test_entries_under_the_old_name(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["ct int4 g32"](), layers=1)
    want, forms = logits(folder)
    entries = said(folder)["quantization_config"]
    del entries["quant_method"]
    old = changed(folder, quantization_config=None, compression_config=entries)
    got, same = logits(old)
    assert torch.equal(got, want) and forms == same and "int8 activations" in str(forms)


def test_keys_and_values_alone(tmp_path):
    """Weights stay, and the scales are there for --kv-cache-dtype fp8."""
    plain, _ = checkpoint(tmp_path, FORMATS["ct int4 g32"](), layers=1)
    want = logits(plain)[0]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    entries = {"quant_method": "compressed-tensors", "config_groups": {}}
    with pytest.raises(ModelLoadError, match="config_groups"):
        load(changed(plain, quantization_config=entries))
    entries |= {"kv_cache_scheme": scheme}
    assert torch.equal(logits(changed(plain, quantization_config=entries))[0], want)
    entries = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert torch.equal(logits(changed(plain, quantization_config=entries))[0], want)


def test_groups_rank_by_name_then_expression_then_class():
    def group(bits, *targets):
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
        return {"targets": list(targets), "weights": weights}

    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {}}
    groups = [group(2, "Linear"), group(3, "re:.*proj"), attention, group(4, DOWN)]
    config = {
        "format": "pack-quantized",
        "config_groups": {str(i): g for i, g in enumerate(groups)},
    }
    made = CompressedTensors(config)

    def width(name):
        return made.scheme(StoredPart(name, 8, {}), 64).width

    assert [width(n) for n in (DOWN, "model.layers.1.mlp.down_proj", "lm_head")] == [4, 3, 2]


# ---- GPTQ, names, lists --------------------------------------------------------------------------


def test_biases_of_zeros_are_read_past(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["gptq 4"](), layers=1)
    want = logits(folder)[0]
    names = [n for n in load_file(folder / "model.safetensors") if n.endswith(".qweight")]
    biases = {
        name.replace("qweight", "bias"): torch.zeros(tensor.shape[1], dtype=torch.float16)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name in names
    }
    assert torch.equal(logits(changed(folder, biases))[0], want)
    biases[f"{DOWN}.bias"][3] = 0.5
    with pytest.raises(ModelLoadError, match=rf"{DOWN}.bias.*no bias"):
        load(changed(folder, biases))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_of_nf4_in_another_type(storage, tmp_path):
    """As models are saved that were trained in shards (`bnb_4bit_quant_storage`)."""
    _, folder = checkpoint(tmp_path, FORMATS["bnb nf4"](), layers=1)
    want = logits(folder)[0]
    stored = load_file(folder / "model.safetensors").items()
    as_floats = {
        n: t.flatten().view(storage)[:, None] for n, t in stored if n.endswith("_proj.weight")
    }
    assert torch.equal(logits(changed(folder, as_floats))[0], want)
    twice = {n: torch.cat([t, t]) for n, t in as_floats.items()}
    with pytest.raises(ModelLoadError, match=r"_proj\.weight': must have \d+ bytes, got"):
        load(changed(folder, twice))


@pytest.mark.parametrize(("name", "spelled"), [("gptq 4", "GPTQ"), ("gptq 4", "gptq_marlin"),
                                               ("gptq 4", "auto_gptq"), ("awq gemm", "auto_awq"),
                                               ("modelopt nvfp4", "modelopt_fp4")])  # fmt: skip
def test_formats_by_their_other_names(name, spelled, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    want = logits(folder)[0]
    assert torch.equal(logits(changed(folder, **said(folder, quant_method=spelled)))[0], want)
    shape = ModelShape.from_folder(folder)
    for given in (spelled.lower(), FORMATS[name]()[0]["quant_method"]):
        assert ModelConfig(model=str(folder), quantization=given).online_plan(shape) is None
    with pytest.raises(ConfigError, match="quantised already"):
        ModelConfig(model=str(folder), quantization="bitsandbytes").online_plan(shape)


LEFT = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


def left_out(folder, plain, name, **tensors):
    """The fp8 checkpoint with a layer ignored, and tensors beside its plain weight."""
    stored = load_file(plain / "model.safetensors")
    given = {f"{name}.{rest}": tensor for rest, tensor in tensors.items()}
    given |= {f"{name}.weight": stored[f"{name}.weight"]}
    given = {f"{name}.weight_scale": None} | given
    return changed(folder, given, **said(folder, ignore=["lm_head", name]))


@pytest.mark.parametrize("layer", [DOWN, "model.layers.0.self_attn.q_proj"])
def test_scales_of_activations_beside_a_plain_weight_are_read_past(layer, tmp_path):
    plain, folder = checkpoint(tmp_path, FORMATS["ct fp8 tensor"](), layers=1)
    want, forms = after_prompt(left_out(folder, plain, layer))
    left = {name: torch.tensor([3], dtype=torch.int8) for name in LEFT if name.endswith("point")}
    left |= {name: torch.tensor([0.5]) for name in LEFT if name.endswith("scale")}
    got, same = after_prompt(left_out(folder, plain, layer, **left))
    assert torch.equal(got, want) and forms == same


@pytest.mark.parametrize("word", [True, False])
def test_scales_of_activations_beside_a_plain_head(word, tmp_path):
    """Whether the configuration leaves it out or nothing is said of it."""
    plain, folder = checkpoint(tmp_path, FORMATS["ct fp8 tensor"](), layers=1)
    head = load_file(plain / "model.safetensors")["model.embed_tokens.weight"].clone()
    entries = said(folder, ignore=["lm_head"] if word else []) | {"tie_word_embeddings": False}
    want = logits(changed(folder, {"lm_head.weight": head}, **entries))[0]
    left = {"lm_head.input_scale": torch.tensor(0.5)}
    assert torch.equal(logits(changed(folder, left))[0], want)
    with pytest.raises(ModelLoadError, match=r"says that 'lm_head' is .*weight_scale"):
        load(changed(folder, {"lm_head.weight_scale": torch.tensor(0.5)}))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_activations_beside_a_quantised_layer(name, tmp_path):
    """Whatever the format: rows find their own."""
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    want, forms = after_prompt(folder)
    beside = {f"{DOWN}.{left}": torch.tensor(7.0) for left in OF_ACTIVATIONS}
    got, same = after_prompt(changed(folder, beside))
    assert torch.equal(got, want) and forms == same


@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_zero_points_of_floats_are_zeros(kind, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["ct fp8 channel"](), layers=1)
    want = after_prompt(folder)[0]
    name = f"{DOWN}.weight_zero_point"
    zeros = torch.zeros(256, 1).to(kind)
    assert torch.equal(after_prompt(changed(folder, {name: zeros}))[0], want)
    zeros[-1] = 1
    with pytest.raises(ModelLoadError, match=rf"{name}.*must be 0"):
        load(changed(folder, {name: zeros}))


@pytest.mark.parametrize("rest", ["weight_scale", "weight_zero_point", "weight_scale_inv"])
def test_scales_of_a_plain_weight_are_a_contradiction(rest, tmp_path):
    plain, folder = checkpoint(tmp_path, FORMATS["ct fp8 tensor"](), layers=1)
    why = rf"says that '{DOWN}' is not quantised, but it has {rest}. It has weight \w+ .*{rest} F32"
    with pytest.raises(ModelLoadError, match=why):
        load(left_out(folder, plain, DOWN, **{rest: torch.tensor([0.5])}))


def test_an_empty_list_leaves_the_word_to_the_other(tmp_path):
    plain, folder = checkpoint(tmp_path, FORMATS["fp8 block"](), layers=1)
    left = {
        name: tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
        if DOWN in name
    }
    left[f"{DOWN}.weight_scale_inv"] = None
    entries = said(folder, ignored_layers=[], modules_to_not_convert=[DOWN])
    got = logits(changed(folder, left, **entries))
    assert torch.isfinite(got[0]).all()


def test_lists_may_have_the_names_of_modules_or_of_tensors():
    names = [f"{head}.layers.0.mlp.up_proj" for head in HEADS]
    assert [spellings(name) for name in names] == [tuple(names), tuple(names[::-1])]
    assert spellings("language_model.lm_head") == ("language_model.lm_head", "lm_head")
    assert spellings(DOWN) == (DOWN,)


@pytest.mark.parametrize("listed", [0, 1])
@pytest.mark.parametrize("stored", [0, 1])
def test_a_layer_that_is_listed_in_another_spelling_is_left(stored, listed):
    names = [f"{head}.layers.0.mlp.up_proj" for head in HEADS]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = {"format": "pack-quantized", "ignore": [names[listed]],
              "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    spec = LinearSpec("model.layers.0.mlp.up_proj", default_ops(), torch.float32, 64, (8,), False)
    method = CheckpointMethod(spec, CompressedTensors(config))
    left = StoredPart(names[stored], 8, {"weight": PLAIN})
    assert method.choose([left]) == [{"weight"}]
    packed = {
        "weight_packed": StoredTensor("x.weight_packed", (8, 8), "I32"),
        "weight_scale": StoredTensor("x.weight_scale", (8, 2), "BF16"),
    }
    other = names[stored].replace("layers.0", "layers.1")
    assert method.choose([StoredPart(other, 8, packed)]) == [set(packed)]
