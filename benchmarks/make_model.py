"""A model of a real shape with random weights, for timings: no download, no meaning.

    python benchmarks/make_model.py qwen2.5-0.5b OUT_DIR
    python benchmarks/make_model.py qwen2.5-1.5b OUT_DIR
    python benchmarks/make_model.py llama-3.2-1b OUT_DIR

Writes bf16 safetensors under Hugging Face's names, the configuration, and the tokenizer of the
embedded model (ids beyond its vocabulary have no text; the benchmarks use ids).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import quire

SHAPES = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-1.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
}
COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def weights(config: dict) -> dict[str, torch.Tensor]:
    """Random parameters by Hugging Face's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = hidden // config["num_attention_heads"]
    keys = dim * config["num_key_value_heads"]
    rows = {"q": hidden, "k": keys, "v": keys}
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, size in rows.items():
            found[f"{layer}.self_attn.{name}_proj.weight"] = (size, hidden)
            if config["model_type"] == "qwen2":
                found[f"{layer}.self_attn.{name}_proj.bias"] = (size,)
        found[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        found[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        found[f"{layer}.input_layernorm.weight"] = (hidden,)
        found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    return {name: _random(name, shape) for name, shape in found.items()}


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02)


def make(shape: str, folder: Path) -> Path:
    """Write the model unless it is there; returns its folder."""
    target = folder / f"{shape}-random"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = COMMON | SHAPES[shape]
    save_file(weights(config), target / "model.safetensors", {"format": "pt"})
    demo = Path(quire.__file__).parent / "assets" / "quire-demo"
    for name in TOKENIZER:
        if (demo / name).exists():
            shutil.copy(demo / name, target / name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(make(options.shape, options.folder))


if __name__ == "__main__":
    main()
