"""A Llama in the plainest form, for comparison: dense, one request, no cache, any float type.

Written from Hugging Face's formulas; shares no code with quire but the file reader's format.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


def read(folder: Path):
    """Configuration and weights, from one file or several."""
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return config, weights


def frequencies(config):
    dim, base = config["head_dim"], config["rope_theta"]
    freqs = [base ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        freqs = [f / scaling["factor"] for f in freqs]
    if kind == "llama3":
        freqs = [llama3(f, scaling) for f in freqs]
    return torch.tensor(freqs, dtype=torch.float64)


def llama3(freq, scaling):
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / freq
    if wavelength < context / high:
        return freq
    if wavelength > context / low:
        return freq / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def logits(folder: Path, ids, dtype=torch.float64):
    """Logits `[len(ids), vocab]` of one request."""
    config, weights = read(folder)
    w = {name: tensor.to(dtype) for name, tensor in weights.items()}
    heads, kv, dim = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    length = len(ids)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(config))
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def norm(x, name):
        variance = x.pow(2).mean(-1, keepdim=True)
        return w[name] * x * torch.rsqrt(variance + config["rms_norm_eps"])

    def project(x, name):
        return torch.nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turn(x):
        half = dim // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def attend(x, name):
        q, k, v = (
            project(x, f"{name}.{p}_proj").view(length, n, dim).transpose(0, 1)
            for p, n in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k = turn(q), turn(k)
        k, v = k.repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        scores = scores + torch.full((length, length), -torch.inf, dtype=dtype).triu(1)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, heads * dim)
        return project(out, f"{name}.o_proj")

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        x = x + attend(norm(x, f"{layer}.input_layernorm.weight"), f"{layer}.self_attn")
        y = norm(x, f"{layer}.post_attention_layernorm.weight")
        gated = torch.nn.functional.silu(project(y, f"{layer}.mlp.gate_proj"))
        x = x + project(gated * project(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    x = norm(x, "model.norm.weight")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return project(x, head)
