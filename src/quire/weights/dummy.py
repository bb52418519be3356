"""Tiny random checkpoints in Hugging Face's layout, for tests and experiments.

Writes Llama-shaped models: the layout is spelled out here on its own, so that a test that loads
it checks the loader against a second source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels.dtypes import torch_dtype
from quire.weights.files import INDEX, SINGLE, write_safetensors

TINY: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What `random_checkpoint` starts from."""


def random_checkpoint(
    folder: Path, config: dict[str, Any] | None = None, seed: int = 0, shards: int = 1
) -> Path:
    """Write `config.json` (`TINY` with `config` over it) and random weights; returns `folder`.

    With `shards` > 1 the weights are spread over as many files with an index.
    """
    full = {**TINY, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(full, indent=2), "utf-8")
    tensors = random_tensors(full, seed)
    if shards == 1:
        write_safetensors(tensors, folder / SINGLE)
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        write_safetensors({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), "utf-8")
    return folder


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights by checkpoint name; scaled so that activations neither vanish nor explode."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(config["torch_dtype"])

    def normal(shape: tuple[int, ...], mean: float, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).to(dtype)

    tensors = {}
    for name, shape in checkpoint_shapes(config).items():
        if "norm" in name:
            tensors[name] = normal(shape, 1.0, 0.2)
        elif name.endswith("bias"):
            tensors[name] = normal(shape, 0.0, 0.3)
        else:
            tensors[name] = normal(shape, 0.0, shape[1] ** -0.5 * 1.5)
    return tensors


def checkpoint_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a Llama checkpoint, by its Hugging Face name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    blocks = (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias"))
    for block, layers, bias in blocks:
        for name, shape in layers.items():
            shapes[f"{block}.{name}_proj.weight"] = shape
            if config[bias]:
                shapes[f"{block}.{name}_proj.bias"] = shape[:1]
    return shapes
