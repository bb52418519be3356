"""Rewrites a checkpoint to another naming of the same weights: as the libraries and the original
code of families keep them."""

import json
import re

import torch
from safetensors.torch import load_file, save_file


def _rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path, {"format": "pt"})


def stacked_experts(folder):
    """All experts of a layer in one tensor, gate before up (transformers 5 in memory)."""

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.*)\.block_sparse_moe\.(.*)", name)
            if match is None:
                found[name] = tensor
            elif "experts" not in name:
                found[f"{match[1]}.mlp.{match[2]}"] = tensor
            elif name.endswith("experts.0.w1.weight"):
                head = name.removesuffix("0.w1.weight")
                count = sum(n.startswith(head) and n.endswith("w1.weight") for n in tensors)

                def expert(i, w, head=head):
                    return tensors[f"{head}{i}.{w}.weight"]

                gate_up = [torch.cat([expert(i, "w1"), expert(i, "w3")]) for i in range(count)]
                down = [expert(i, "w2") for i in range(count)]
                found[f"{match[1]}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
                found[f"{match[1]}.mlp.experts.down_proj"] = torch.stack(down)
        return found

    _rewrite(folder, change)


CHATGLM_NAMES = (
    (r"model\.embed_tokens\.", "transformer.embedding.word_embeddings."),
    (r"model\.norm\.", "transformer.encoder.final_layernorm."),
    (r"model\.layers\.", "transformer.encoder.layers."),
    (r"lm_head\.", "transformer.output_layer."),
    (r"\.self_attn\.o_proj\.", ".self_attention.dense."),
    (r"\.mlp\.gate_up_proj\.", ".mlp.dense_h_to_4h."),
    (r"\.mlp\.down_proj\.", ".mlp.dense_4h_to_h."),
)


def _chatglm_config(folder, grouped):
    """The entries of ChatGLM's own configuration, and none of Hugging Face's names."""
    path = folder / "config.json"
    old = json.loads(path.read_text())
    theta = old["rope_parameters"]["rope_theta"]
    new = {
        "architectures": ["ChatGLMModel" if grouped else "ChatGLMForConditionalGeneration"],
        "model_type": "chatglm",
        "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "num_layers": old["num_hidden_layers"],
        "padded_vocab_size": old["vocab_size"],
        "vocab_size": old["vocab_size"],
        "hidden_size": old["hidden_size"],
        "ffn_hidden_size": old["intermediate_size"],
        "kv_channels": old["head_dim"],
        "num_attention_heads": old["num_attention_heads"],
        "multi_query_attention": grouped,
        "multi_query_group_num": old["num_key_value_heads"] if grouped else 1,
        "seq_length": old["max_position_embeddings"],
        "layernorm_epsilon": old["rms_norm_eps"],
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "tie_word_embeddings": old["tie_word_embeddings"],
        "rope_ratio": theta / 10000,
        "torch_dtype": old["dtype"],
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    path.write_text(json.dumps(new))
    return old


def _chatglm(folder, grouped):
    old = _chatglm_config(folder, grouped)
    dim = old["head_dim"]

    def fused(parts):
        if grouped:
            return torch.cat(parts)
        heads = [part.unflatten(0, (-1, dim)) for part in parts]
        return torch.stack(heads, 1).flatten(0, 2)

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.*)\.self_attn\.([qkv])_proj\.(weight|bias)", name)
            if match is None:
                found[name] = tensor
            elif match[2] == "q":
                parts = [tensors[f"{match[1]}.self_attn.{x}_proj.{match[3]}"] for x in "qkv"]
                found[f"{match[1]}.self_attention.query_key_value.{match[3]}"] = fused(parts)
        for pattern, new in CHATGLM_NAMES:
            found = {re.sub(pattern, new, name): tensor for name, tensor in found.items()}
        found["transformer.rotary_pos_emb.inv_freq"] = torch.ones(dim // 4)
        return found

    _rewrite(folder, change)


def chatglm(folder):
    """ChatGLM2's, ChatGLM3's and GLM-4's own names, from transformers' GLM."""
    _chatglm(folder, grouped=True)


def chatglm_head_by_head(folder):
    """As without grouped queries: the rows of each head's query, key and value together."""
    _chatglm(folder, grouped=False)


OLMO_NAMES = (
    (r"^model\.embed_tokens\.", "model.transformer.wte."),
    (r"^model\.layers\.", "model.transformer.blocks."),
    (r"^lm_head\.", "model.transformer.ff_out."),
    (r"\.self_attn\.o_proj\.", ".attn_out."),
    (r"\.mlp\.down_proj\.", ".ff_out."),
)


def olmo_of_its_own(folder):
    """OLMo 1 as its own code (`hf_olmo`) names it: merged weights, up before gate."""
    path = folder / "config.json"
    old = json.loads(path.read_text())
    new = {
        "architectures": ["OLMoForCausalLM"],
        "model_type": "hf_olmo",
        "d_model": old["hidden_size"],
        "n_heads": old["num_attention_heads"],
        "n_layers": old["num_hidden_layers"],
        "mlp_hidden_size": 2 * old["intermediate_size"],
        "mlp_ratio": 4,
        "vocab_size": old["vocab_size"] - 3,
        "embedding_size": old["vocab_size"],
        "max_sequence_length": old["max_position_embeddings"],
        "weight_tying": False,
        "multi_query_attention": False,
        "activation_type": "swiglu",
        "block_type": "sequential",
        "layer_norm_type": "default",
        "layer_norm_with_affine": False,
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "clip_qkv": None,
        "torch_dtype": old["dtype"],
        "eos_token_id": 2,
    }
    path.write_text(json.dumps(new))

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)_proj\.weight", name)
            kind = match[3] if match else ""
            parts = {"q": "qkv", "gate": ("up", "gate")}.get(kind)
            if parts:
                head = f"model.layers.{match[1]}."
                merged = torch.cat([tensors[f"{head}{match[2]}.{p}_proj.weight"] for p in parts])
                found[head + ("att_proj" if kind == "q" else "ff_proj") + ".weight"] = merged
            elif kind not in ("k", "v", "up"):
                found[name] = tensor
        for pattern, better in OLMO_NAMES:
            found = {re.sub(pattern, better, name): tensor for name, tensor in found.items()}
        return found

    _rewrite(folder, change)
