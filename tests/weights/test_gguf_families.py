"""GGUF files of families that are not Llama, written as llama.cpp's converter does."""

import json
import random
import re

import gguf
import pytest
import torch
from safetensors.torch import load_file

from hf_checkpoint import build
from paged_run import load, serve
from quire.config.shape import ModelShape
from quire.models.registry import load_model
from quire.weights.files import SINGLE
from rows_dense import DENSE

NAMES = (
    (r"^transformer\.(wte|wpe|ln_f|norm_f)\.", r"\1."),
    (r"^(transformer|model)\.(h|blocks|layers)\.", "blk."),
    (r"^(wte|model\.embed_tokens)\.", "token_embd."),
    (r"^wpe\.", "position_embd."),
    (r"^(ln_f|norm_f)\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"\.(ln_1|norm_1)\.", ".attn_norm."),
    (r"\.(ln_2|norm_2)\.", ".ffn_norm."),
    (r"\.attn\.(c_attn|Wqkv)\.", ".attn_qkv."),
    (r"\.attn\.(q|k)_ln\.", r".attn_\1_norm."),
    (r"\.attn\.(c_proj|out_proj)\.", ".attn_output."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.mlp\.c_fc\.", ".ffn_up."),
    (r"\.mlp\.c_proj\.", ".ffn_down."),
    (r"\.(ffn|mlp)\.(gate|up|down)_proj\.", r".ffn_\2."),
)
KINDS = {
    "mpt": "mpt",
    "mpt steep": "mpt",
    "mpt biases": "mpt",
    "mpt positions": "mpt",
    "mpt norms": "mpt",
    "mpt groups": "mpt",
    "olmo": "olmo",
    "olmo clipped": "olmo",
    "gpt-bigcode": "starcoder",
    "gpt-bigcode, head by head": "starcoder",
}
"""Row of `rows_dense.py` to architecture."""


def interleaved(rows, heads):
    """What the converter does to queries and keys of models with rotary positions."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write(folder, path, arch, shape):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_eps(1e-5)
    attention = shape.raw.get("attn_config") or shape.raw
    if attention.get("clip_qkv"):
        writer.add_clamp_kqv(attention["clip_qkv"])
    if arch == "mpt":
        writer.add_max_alibi_bias(attention["alibi_bias_max"] if attention["alibi"] else 0.0)
    for name, tensor in load_file(folder / SINGLE).items():
        for pattern, better in NAMES:
            name = re.sub(pattern, better, name)
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        turned = re.search(r"attn_([qk])\.", name) if arch == "olmo" else None
        tensor = interleaved(tensor, heads[turned[1]]) if turned else tensor
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_model_from_gguf_is_the_model_from_safetensors(name, tmp_path):
    row = next(row for row in DENSE if row.name == name)
    build(row, tmp_path / "plain", torch.bfloat16)
    entries = json.loads((tmp_path / "plain/config.json").read_text()).get("attn_config")
    if entries:  # what rows patch in stands alone
        rest = {"alibi": True, "alibi_bias_max": 8}
        config = {**json.loads((tmp_path / "plain/config.json").read_text())}
        config["attn_config"] = {**rest, **entries}
        (tmp_path / "plain/config.json").write_text(json.dumps(config))
    shape = ModelShape.from_folder(tmp_path / "plain")
    path = tmp_path / "model.gguf"
    write(tmp_path / "plain", path, KINDS[name], shape)
    read = ModelShape.from_folder(path)
    assert read.num_kv_heads == shape.num_kv_heads
    rng = random.Random(0)
    ids = [[rng.randrange(3, 101) for _ in range(70)]]
    ours = serve(load_model(read, path, "float32", "cpu"), ids, random.Random(0))[0]
    want = serve(load(tmp_path / "plain", "float32"), ids, random.Random(0))[0]
    assert torch.equal(ours, want)
