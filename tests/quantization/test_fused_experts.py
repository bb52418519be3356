"""Experts in fp8 that are one tensor, as transformers keeps them: the same as separate ones, or
refused. transformers' own operations write the codes and read them back.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from hf_checkpoint import build
from quire.errors import ModelLoadError
from quire.quantization.fp8 import Fp8Checkpoint
from quire.quantization.scheme import LayerData
from quire.quantization.schemes import Fp8
from quire.weights.bundles import StoredPart, StoredTensor
from rows_moe import SINKS, row
from test_quantised_families import ROWS, WIDE, logits

EXPERTS, HIDDEN = 6, 64
AT = "model.layers.0.mlp.experts"


def quantised(name, tensor, block):
    """Codes and scales by transformers, under its names."""
    said = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    return Fp8Quantize(SimpleNamespace(quantization_config=said)).convert({name: tensor})


def floats(codes, scales):
    """What transformers takes them for."""
    return Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)


def write(folder, tensors, plain, block):
    said = json.loads((plain / "config.json").read_text())
    said["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": block, "modules_to_not_convert": ["self_attn"],
    }  # fmt: skip
    if block == "plain":
        del said["quantization_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def experts_of(folder, inner):
    """A mixture's folder, its tensors without experts, and each layer's experts as one tensor."""
    made = {**ROWS["mixture"].kwargs, "moe_intermediate_size": inner, "num_hidden_layers": 2}
    build(row("q", "Qwen3MoeConfig", **made), folder)
    rest = {}
    for path in folder.glob("*.safetensors"):
        rest |= load_file(path)
    fused = {}
    for layer in range(2):
        head = f"model.layers.{layer}.mlp.experts"

        def of(name, head=head):
            return torch.stack([rest.pop(f"{head}.{i}.{name}.weight") for i in range(EXPERTS)])

        gates, ups = of("gate_proj"), of("up_proj")
        fused[f"{head}.gate_up_proj"] = torch.cat((gates, ups), 1)
        fused[f"{head}.down_proj"] = of("down_proj")
    return folder, rest, fused


def apart(fused, inner):
    """The same codes and scales, a tensor for each layer of each expert."""
    found = {}
    for name, tensor in fused.items():
        head, layer = name.rsplit(".", 1)
        layer, scale, _ = layer.partition("_scale_inv")
        end = "weight_scale_inv" if scale else "weight"
        for i, one in enumerate(tensor):
            if layer == "down_proj":
                found[f"{head}.{i}.{layer}.{end}"] = one
                continue
            gate, up = one.chunk(2) if len(one) > 1 else (one, one)
            found |= {f"{head}.{i}.gate_proj.{end}": gate, f"{head}.{i}.up_proj.{end}": up}
    return found


def halves(name, tensor, block):
    """Gates and ups quantised before they become one tensor."""
    both = [quantised(name, half, block) for half in tensor.chunk(2, 1)]
    return {key: torch.cat([half[key] for half in both], 1) for key in both[0]}


@pytest.mark.parametrize("first", [quantised, halves])
@pytest.mark.parametrize(("block", "inner"), [([32, 32], 32), ([16, 32], 64), (None, 32)])
def test_they_are_what_separate_ones_are(block, inner, first, tmp_path):
    plain, rest, weights = experts_of(tmp_path / "made", inner)
    fused = {}
    for name, tensor in weights.items():
        fused |= (quantised if name.endswith("down_proj") else first)(name, tensor, block)
    assert fused[f"{AT}.gate_up_proj_scale_inv"].dim() == 3
    one = write(tmp_path / "fused", rest | fused, plain, block)
    each = write(tmp_path / "apart", rest | apart(fused, inner), plain, block)
    got = logits(one)
    assert torch.equal(got, logits(each))
    decoded = {name: floats(fused[name], fused[f"{name}_scale_inv"]) for name in weights}
    want = logits(write(tmp_path / "decoded", rest | decoded, plain, "plain"))
    assert torch.allclose(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("shape", [(EXPERTS,), (EXPERTS, 1), (EXPERTS, 1, 1)])
@pytest.mark.parametrize(
    ("name", "unused"), [("scale_inv", "activation_scale"), ("weight_scale", "input_scale")]
)
def test_a_scale_for_each_expert_in_any_shape(name, unused, shape, tmp_path):
    plain, rest, weights = experts_of(tmp_path / "made", 32)
    fused, other = {}, {}
    for key, tensor in weights.items():
        made = quantised(key, tensor, None)
        fused |= made
        other |= {key: made[key], f"{key}_{name}": made[f"{key}_scale_inv"].reshape(shape)}
        other[f"{key}_{unused}"] = torch.full((EXPERTS,), 7.0)
    want = logits(write(tmp_path / "a", rest | fused, plain, None))
    assert torch.equal(logits(write(tmp_path / "b", rest | other, plain, None)), want)


def decoded(scheme, codes, scales):
    rows, columns = codes.shape
    name, kind = "m.experts.0.gate_up_proj", "F8_E4M3"
    of_scales = StoredTensor(f"{name}_scale_inv", tuple(scales.shape), "F32")
    headers = {"weight": StoredTensor(name, (rows, columns), kind), scheme.scale: of_scales}
    part = StoredPart(name, rows, headers)
    assert tuple(scales.shape) in scheme.tensors(rows, columns)[scheme.scale].shapes
    return scheme.decode(LayerData(part, columns, {"weight": codes, scheme.scale: scales}))


HALVES = [
    (None, 3, 2, 1),
    ((4, 4), 2, 2, 2),
    ((4, 4), 9, 6, 2),
    ((4, 4), 9, 5, 2),
    ((4, 4), 2, 1, 2),
]
"""Block, rows of each half, and the shape of the scales."""


@pytest.mark.parametrize(("block", "half", "of_rows", "of_columns"), HALVES)
def test_scales_of_two_halves(block, half, of_rows, of_columns):
    """Those that begin anew in the second half, and those that go on; number by number."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(2 * half, 8, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(of_rows, of_columns, generator=generator) + 0.5
    got = decoded(Fp8("weight_scale_inv", block, stacked=2), codes, scales).dequantise()
    anew = of_rows % 2 == 0
    for r in range(2 * half):
        in_half, of_half = (r % half, r // half) if anew else (r, 0)
        each = of_rows // 2 if anew else 0
        line = of_half * each + (in_half // block[0] if block else 0)
        for c in range(8):
            scale = scales[line, c // block[1] if block else 0]
            assert got[r, c] == codes[r, c].float() * scale


def test_halves_that_may_be_either_are_refused():
    """11 rows in blocks of 4 are 3 blocks, and 22 are 6; 9 are 3, and 18 are 5."""
    format_ = Fp8Checkpoint({"weight_block_size": [4, 4]})

    def part(name, rows):
        header = StoredTensor(f"{name}_scale_inv", (6, 2), "F32")
        return StoredPart(name, rows, {"weight_scale_inv": header})

    experts, dense = "m.mlp.experts.0.gate_up_proj", "m.mlp.gate_up_proj"
    with pytest.raises(ModelLoadError, match=rf"'{experts}' .*_scale_inv': blocks may .* 11 rows"):
        format_.scheme(part(experts, 22), 8)
    assert format_.scheme(part(experts, 18), 8).stacked == 2
    assert format_.scheme(part(experts, 24), 8).stacked == 2
    assert format_.scheme(part(dense, 22), 8).stacked == 1, "one layer, quantised as one"


REFUSED = [
    ("gate_up_proj_scale_inv", None, r"'{}\.0\.gate_up_proj' is fp8 .*, but weight_scale_inv miss"),
    (
        "gate_up_proj_scale_inv",
        lambda t: t[:5],
        r"'{}\.5\.gate_up_proj' is .*weight_scale_inv miss",
    ),
    ("down_proj_scale_inv", lambda t: t[:, :1], r"'{}\.0\.down_proj' is .*weight_scale_inv is \["),
    (
        "gate_up_proj",
        lambda t: t.transpose(1, 2)[:, :32],
        r"gate_up_proj' is .*weight is \[32, 64\]",
    ),
    ("down_proj", lambda t: t.view(torch.int8), r"down_proj' is .*weight is I8, not F8_E4M3"),
    ("down_proj", lambda t: t.float(), r"'{}\.0\.down_proj' is fp8 .*weight is F32, not F8_E4M3"),
]
"""A tensor, what becomes of it, and what is said then."""


@pytest.mark.parametrize(("tensor", "change", "why"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(tensor, change, why, tmp_path):
    plain, rest, weights = experts_of(tmp_path / "made", 32)
    fused = {}
    for name, weight in weights.items():
        fused |= quantised(name, weight, [32, 32])
    old = fused.pop(f"{AT}.{tensor}")
    if change is not None:
        fused[f"{AT}.{tensor}"] = change(old)
    with pytest.raises(ModelLoadError, match=why.format(AT.replace(".", r"\."))):
        logits(write(tmp_path / "fused", rest | fused, plain, [32, 32]))


def test_gates_and_ups_in_turns_are_refused(tmp_path):
    """gpt-oss has its experts the other way round; where scales belong then is not said."""
    made = row("g", "GptOssConfig", **{**SINKS, **WIDE, "num_local_experts": 4})
    build(made, tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        tensors |= quantised(name, tensors[name].float(), [32, 32])
    folder = write(tmp_path / "fp8", tensors, tmp_path / "made", [32, 32])
    with pytest.raises(ModelLoadError, match=r"experts\.0\.gate_up_proj' is fp8 .*_inv missing"):
        logits(folder)
