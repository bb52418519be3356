"""Quantised checkpoints of families whose layers are no plain stack: mixtures, latent attention."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_checkpoint import build
from paged_run import load, serve
from quantised_writers import E2M1, FORMATS, halves, mxfp, nearest
from rows_moe import DEEPSEEK, ROUTED, SINKS, SIZES, row

PROMPT = [1, 40, 7, 90, 35, 20, 77, 3, 3, 8]
WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 64}
ROWS = {
    "mixture": row("q", "Qwen3MoeConfig", **{**WIDE, **ROUTED, "moe_intermediate_size": 32}),
    "latent": row("d", "DeepseekV3Config", **{
        **WIDE, **DEEPSEEK, "moe_intermediate_size": 32, "kv_lora_rank": 64, "q_lora_rank": 32,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    }),
}  # fmt: skip


def logits(folder):
    """After the prompt."""
    import random

    return serve(load(folder, dtype="float32"), [PROMPT], random.Random(0))[0]


def twins(folder, made, quantise):
    """The row's checkpoint quantised, and one with the weights that this stands for."""
    build(made, folder / "plain")
    plain = {}
    for path in (folder / "plain").glob("*.safetensors"):
        plain |= load_file(path)
        path.unlink()
    quantised, config = quantise(plain)
    said = json.loads((folder / "plain" / "config.json").read_text())
    said |= {} if "quant_method" in config else {"quantization": config}
    (folder / "quantised").mkdir()
    (folder / "quantised" / "config.json").write_text(
        json.dumps({**said, "quantization_config": config})
    )
    for name, tensors in (("plain", plain), ("quantised", quantised)):
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    return folder / "plain", folder / "quantised"


def linears(format_):
    """All projections, the experts' too; routers stay as they are."""

    def quantise(plain):
        config, write = FORMATS[format_]()
        found = {}
        for name, tensor in list(plain.items()):
            if not re.search(r"_proj(_with_mqa)?\.weight$", name) or tensor.dim() != 2:
                found[name] = tensor
                continue
            tensors, plain[name] = write(tensor.float())
            found |= {name.removesuffix("weight") + rest: t for rest, t in tensors.items()}
        return found, config

    return quantise


@pytest.mark.parametrize("format_", ["fp8 block", "ct int4 g32", "ct mxfp4"])
@pytest.mark.parametrize("kind", ROWS)
def test_mixtures_and_latent_attention(kind, format_, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")
    plain, quantised = twins(tmp_path, ROWS[kind], linears(format_))
    want, got = logits(plain), logits(quantised)
    assert torch.allclose(want, got, rtol=0, atol=1e-4 * float(want.abs().max()))
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "1")
    rounded = logits(quantised)
    assert float((rounded - want).norm() / want.norm()) < 0.3  # a token may change experts


def mxfp4_experts(plain):
    """As gpt-oss has them: blocks and scales of all experts, gates and ups in turns."""
    found = dict(plain)
    for name in [
        name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts = found.pop(name).transpose(1, 2)
        blocks, scales, values = [], [], []
        for weight in experts:
            parts, exponents, factors = mxfp(weight.float(), 2)
            codes = nearest(parts / factors[..., None], E2M1)
            blocks.append(halves(codes))
            scales.append(exponents)
            values.append((E2M1[codes.long()] * factors[..., None]).flatten(1).t())
        found |= {f"{name}_blocks": torch.stack(blocks), f"{name}_scales": torch.stack(scales)}
        plain[name] = torch.stack(values)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return found, config


@pytest.mark.parametrize("spelled", ["mxfp4", "gpt_oss_mxfp4"])
def test_gpt_oss(spelled, tmp_path):
    made = row("g", "GptOssConfig", **{**SINKS, **WIDE, "num_local_experts": 4})
    plain, quantised = twins(tmp_path, made, mxfp4_experts)
    path = quantised / "config.json"
    path.write_text(path.read_text().replace('"mxfp4"', f'"{spelled}"'))
    assert f'"{spelled}"' in path.read_text()
    names = load_file(quantised / "model.safetensors")
    blocks = names["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (4, 128, 2, 16) and blocks.dtype == torch.uint8
    assert torch.equal(logits(plain), logits(quantised))
