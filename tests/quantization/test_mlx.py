"""Checkpoints of mlx-lm: layers that differ, embeddings, experts and routers, and what is refused.

Weights are compared with MLX's in test_decoders (tests/quantization/golden)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantised_writers import FORMATS, checkpoint, mlx
from quire.config import ModelShape
from quire.errors import ModelLoadError
from quire.models.inspection import linears
from quire.models.registry import load_model
from rows_moe import SINKS, row
from test_quantised_families import ROWS, WIDE, logits, twins

GROUP = 32
ROUTER = "mlp.gate"
DOWN = "model.layers.0.mlp.down_proj"


def entries(folder, **said):
    """The configuration with other entries of the quantisation."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization"] = config["quantization_config"] = config["quantization"] | said
    path.write_text(json.dumps(config))
    return folder


def load(folder):
    return load_model(ModelShape.from_folder(folder), folder, "float32", "cpu")


def changed(folder, tensors):
    path = folder / "model.safetensors"
    kept = {n: t for n, t in (load_file(path) | tensors).items() if t is not None}
    save_file(kept, path, {"format": "mlx"})
    return folder


def whole(plain, bits=4):
    """Every matrix quantised, routers with 8 bits."""
    said = mlx(bits, GROUP)[0]
    found = {}
    for name, tensor in list(plain.items()):
        if tensor.dim() != 2:
            found[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        of_router = stem.endswith((ROUTER, "router"))
        if of_router:
            said[stem] = {"group_size": GROUP, "bits": 8}
        tensors, value = mlx(8 if of_router else bits, GROUP)[1](tensor.float())
        found |= {f"{stem}.{rest}": t for rest, t in tensors.items()}
        plain[name] = value
    return found, said


def stacked(tensors, place="switch_mlp"):
    """Experts as mlx-lm keeps them."""
    found, of_experts = {}, {}
    for name, tensor in tensors.items():
        head, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = tensor
            continue
        number, _, end = rest.partition(".")
        of_experts.setdefault(f"{head}.{place}.{end}", {})[int(number)] = tensor
    for name, parts in of_experts.items():
        found[name] = torch.stack([parts[i] for i in range(len(parts))])
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_all_of_a_mixture(tied, tmp_path, monkeypatch):
    """Experts, routers, embeddings and the head, whose rows are looked up as they are."""
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")
    made = {**ROWS["mixture"].kwargs, "tie_word_embeddings": tied, "num_hidden_layers": 2}
    apart = []

    def quantise(plain):
        if tied:
            plain.pop("lm_head.weight", None)
        found, said = whole(plain)
        apart.append(found)
        return stacked(found), said

    plain, quantised = twins(tmp_path, row("q", "Qwen3MoeConfig", **made), quantise)
    got, want = logits(quantised), logits(plain)
    assert torch.allclose(got, want, rtol=0, atol=2e-4 * float(want.abs().max()))
    save_file(apart[0], quantised / "model.safetensors", {"format": "mlx"})
    assert torch.equal(logits(quantised), got)
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "1")
    forms = {linear.method.spec.name: linear.method.form for linear in linears(load(quantised))}
    assert "float activations" in forms[f"model.layers.0.{ROUTER}"]
    assert "int8 activations" in forms["lm_head"]
    assert "int8 activations" in forms["model.layers.0.mlp.experts.3.down_proj"]


def test_gpt_oss(tmp_path, monkeypatch):
    """Gates and ups apart, where its own checkpoints have them in turns, and biases of experts."""
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")

    def quantise(plain):
        rest = dict(plain)
        for name in list(plain):
            head, experts, layer = name.partition(".experts.")
            if not experts:
                continue
            tensor = rest.pop(name)
            halves = {layer: tensor}
            if layer.startswith("gate_up_proj"):
                halves = {
                    layer.replace("gate_up", half): tensor[..., i::2]
                    for i, half in enumerate(("gate", "up"))
                }
            for end, half in halves.items():
                end = end.removesuffix("_bias") + (".bias" if end.endswith("_bias") else ".weight")
                for i, one in enumerate(half):
                    rest[f"{head}.experts.{i}.{end}"] = one.t() if one.dim() == 2 else one
        found, said = whole(rest)
        for name in list(plain):
            if name in rest:
                plain[name] = rest[name]
            elif name.endswith("gate_up_proj"):
                both = [experts_of(rest, name.replace("gate_up", half)) for half in ("gate", "up")]
                plain[name] = torch.stack(both, -1).flatten(2)
            elif name.endswith("down_proj"):
                plain[name] = experts_of(rest, name)
        return stacked(found, "experts"), said

    made = row("g", "GptOssConfig", **{**SINKS, **WIDE, "num_local_experts": 4})
    plain, quantised = twins(tmp_path, made, quantise)
    got, want = logits(quantised), logits(plain)
    assert torch.allclose(got, want, rtol=0, atol=2e-4 * float(want.abs().max()))


def experts_of(tensors, name):
    """[E, K, N] of one layer's experts."""
    head, layer = name.split(".experts.")
    each = [tensors[f"{head}.experts.{i}.{layer}.weight"] for i in range(4)]
    return torch.stack([one.t() for one in each])


# ---- what the entries say ------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", ["mode", "bits", "group_size"])
def test_layers_of_their_own(left_out, tmp_path):
    """Their entries stand alone: what they leave out is MLX's usual, not the other layers'."""
    plain, folder = checkpoint(tmp_path, FORMATS["mlx mxfp4"](), layers=1)
    weight = load_file(plain / "model.safetensors")[f"{DOWN}.weight"].float()
    own, write = {"mode": mlx, "bits": mlx, "group_size": mlx}[left_out](4, 64)
    tensors = {f"{DOWN}.{rest}": t for rest, t in write(weight)[0].items()}
    changed(entries(folder, **{DOWN: {k: v for k, v in own.items() if k != left_out}}), tensors)
    forms = {linear.method.spec.name: linear.method.form for linear in linears(load(folder))}
    assert forms[DOWN].startswith("int4 in groups of 64 (MLX)")
    assert forms["model.layers.0.self_attn.o_proj"].startswith("mxfp4 (MLX)")


def test_layers_without_scales_are_plain(tmp_path):
    plain, folder = checkpoint(tmp_path, FORMATS["mlx 4"](), layers=1)
    weight = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    left = {f"{DOWN}.weight": weight, f"{DOWN}.scales": None, f"{DOWN}.biases": None}
    changed(entries(folder, **{DOWN: False}), left)
    forms = {linear.method.spec.name: linear.method.form for linear in linears(load(folder))}
    assert forms[DOWN] == "float32" and "MLX" in forms["model.layers.0.self_attn.o_proj"]


def test_the_older_entry_alone(tmp_path):
    """Early versions wrote `quantization` and nothing else."""
    _, folder = checkpoint(tmp_path, FORMATS["mlx 4"](), layers=1)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"], config["quantization"]["mode"]
    path.write_text(json.dumps(config))
    assert any("MLX" in linear.method.form for linear in linears(load(folder)))


WRONG = {
    "bits": ({"bits": 7}, "MLX with 7 bits is not read; nearest: 8"),
    "no group": ({"group_size": 0}, "'group_size' must be a positive whole number, got 0"),
    "mode": ({"mode": "mxfp6"}, "'mode' must be affine or mxfp4 or mxfp8 or nvfp4, got 'mxfp6'"),
    "no mode": ({"mode": ["affine"]}, "'mode' must be affine"),
    "other group": ({"group_size": 32}, r"int4 in groups of 32 .*, but scales is"),
    "bits of a layer": ({DOWN: {"bits": 7}}, f"layer '{DOWN}': MLX with 7 bits"),
    "layer": ({DOWN: False}, f"'{DOWN}' must be an object where the layer has scales, got False"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_entries(wrong, tmp_path):
    said, why = WRONG[wrong]
    _, folder = checkpoint(tmp_path, FORMATS["mlx 4"](), layers=1)
    with pytest.raises(ModelLoadError, match=why):
        load(entries(folder, **said))


@pytest.mark.parametrize("rest", ["scales", "biases"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none(rest, number, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["mlx 4"](), layers=1)
    name = f"{DOWN}.{rest}"
    bad = load_file(folder / "model.safetensors")[name]
    bad[3, 1] = number
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}': must hold finite numbers"):
        load(changed(folder, {name: bad}))


@pytest.mark.parametrize("name", ["mlx mxfp8", "mlx nvfp4"])
def test_codes_that_are_no_numbers(name, tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS[name](), layers=1)
    tensor = f"{DOWN}.{'scales' if name.endswith('nvfp4') else 'weight'}"
    bad = load_file(folder / "model.safetensors")[tensor]
    bad.view(torch.uint8)[0, 5] = 0x7F
    with pytest.raises(ModelLoadError, match=f"'{tensor}': holds codes that are NaN"):
        load(changed(folder, {tensor: bad}))


def test_words_without_scales(tmp_path):
    _, folder = checkpoint(tmp_path, FORMATS["mlx 4"](), layers=1)
    left = {f"{DOWN}.scales": None}
    with pytest.raises(ModelLoadError, match=f"'{DOWN}' is not quantised, but it has no weight"):
        load(changed(folder, left))
