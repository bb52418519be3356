"""GGUF files for tests, written by the reference package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from quire.checkpoint.gguf_header import TYPES
from quire.checkpoint.gguf_model import _BLOCK, _SINGLE
from quire.weights.dummy import random_tensors

TYPE_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
TO_GGUF = {ours: theirs for theirs, ours in {**_SINGLE, **_BLOCK}.items()}


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k: within a head, row (j, i) goes to (i, j)."""
    rows = weight.shape[0] // heads
    order = [h * rows + j * (rows // 2) + i
             for h in range(heads) for i in range(rows // 2) for j in range(2)]  # fmt: skip
    return weight[order]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{TO_GGUF[part]}.{kind}"
    return f"{TO_GGUF[stem]}.{kind}"


def write_model(
    path: Path,
    config: dict[str, Any],
    arch: str = "llama",
    dtype: str | dict[str, str] = "F32",
    tensors: dict[str, torch.Tensor] | None = None,
    **meta: Any,
) -> dict[str, torch.Tensor]:
    """`tensors`, or the tiny random model of `config`, as a GGUF file.

    `dtype` is of all matrices, or by name. Returns what a reader must find.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for name, value in meta.items():
        name = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    found = {}
    random = random_tensors({**config, "torch_dtype": "float32"}, 0) if tensors is None else {}
    for name, tensor in (tensors or random).items():
        data = tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = name.split(".")[-2]
        stored = permuted(data, config[heads[part]]) if part in heads and arch == "llama" else data
        if arch == "gemma" and name.endswith("norm.weight"):
            stored = stored + np.float32(1)
        wanted = dtype if isinstance(dtype, str) else dtype[name]
        kind = gguf.GGMLQuantizationType[wanted if data.ndim > 1 else "F32"]
        packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        values = gguf.quants.dequantize(packed, kind).astype(np.float32)
        if part in heads and arch == "llama":
            back = np.argsort(permuted(np.arange(len(data))[:, None], config[heads[part]])[:, 0])
            values = values[back]
        if arch == "gemma" and name.endswith("norm.weight"):
            values = values - np.float32(1)
        found[name] = torch.from_numpy(values.reshape(data.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
