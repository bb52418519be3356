"""Architectures of llama.cpp: a row each, and the entries of `config.json` that only some have.

What llama.cpp keeps in its code and not in the file is here, too, as its loaders have it
(https://github.com/ggml-org/llama.cpp/tree/master/src/models). Reads no tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quire.checkpoint.gguf_header import GGUFHeader

_GEMMA_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AFTER_ATTENTION: Final = {"post_attention_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """What llama.cpp's converter does to a family's tensors, and has to be undone."""

    architecture: str
    """Hugging Face's name of the class."""
    model_type: str
    permuted: bool = False
    """Rows of q and k are interleaved for rotary pairs (2i, 2i+1)."""
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of config.json."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that other families have under another name, or have not."""


ARCHITECTURES: Final[dict[str, GGUFLayout]] = {
    "llama": GGUFLayout("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": GGUFLayout("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFLayout("Qwen3ForCausalLM", "qwen3"),
    "gemma": GGUFLayout(
        "GemmaForCausalLM", "gemma", norm_offset=1.0, config={"hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma2": GGUFLayout(
        "Gemma2ForCausalLM", "gemma2", norm_offset=1.0, names=_GEMMA_NORMS,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma3": GGUFLayout(
        "Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0, names=_GEMMA_NORMS,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "mpt": GGUFLayout("MptForCausalLM", "mpt"),
    "olmo": GGUFLayout("OlmoForCausalLM", "olmo", permuted=True),
    "starcoder": GGUFLayout("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "granite": GGUFLayout("GraniteForCausalLM", "granite", permuted=True),
    "qwen2moe": GGUFLayout("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": GGUFLayout("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": GGUFLayout("OlmoeForCausalLM", "olmoe"),
    "granitemoe": GGUFLayout("GraniteMoeForCausalLM", "granitemoe", permuted=True),
    "glm4moe": GGUFLayout("Glm4MoeForCausalLM", "glm4_moe", names=_AFTER_ATTENTION),
    "gpt-oss": GGUFLayout("GptOssForCausalLM", "gpt_oss", names=_AFTER_ATTENTION),
}  # fmt: skip
MIXTURES: Final[dict[str, GGUFLayout]] = {
    "llama": GGUFLayout("MixtralForCausalLM", "mixtral", permuted=True),
}
"""Architectures that are another family if they have experts."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Entries of an architecture by their short names."""

    data: Mapping[str, Any]
    architecture: str

    def __call__(self, name: str) -> Any:
        """The entry, or `None`."""
        return self.data.get(f"{self.architecture}.{name}")


Options = Callable[[GGUFHeader, Metadata], dict[str, Any]]


def no_options(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    """Nothing."""
    return {}


def _mpt(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    steepest = get("attention.max_alibi_bias") or None
    attention = {
        "alibi": steepest is not None,
        "alibi_bias_max": steepest,
        "clip_qkv": get("attention.clamp_kqv") or None,
        "qk_ln": "blk.0.attn_q_norm.weight" in header.tensors,
    }
    return {"attn_config": attention, "no_bias": "blk.0.attn_qkv.bias" not in header.tensors}


def _olmo(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return {"clip_qkv": get("attention.clamp_kqv") or None}


def _gpt_bigcode(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return {"multi_query": get("attention.head_count_kv") == 1}


def _gemma2(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _gemma(get, largest=46) | {
        "sliding_window": get("attention.sliding_window") or 4096,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
    }


def _gemma3(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _gemma(get, largest=62) | {
        "sliding_window": get("attention.sliding_window"),
        "rope_theta": get("rope.freq_base") or 1e6,
        "rope_local_base_freq": get("rope.freq_base_swa") or 1e4,
    }


def _gemma(get: Metadata, largest: int) -> dict[str, Any]:
    """The largest model's scores are scaled by another size than that of its heads; the file says
    nothing of it, and llama.cpp knows that model by its number of layers."""
    scalar = get("attention.key_length")
    sizes = get("embedding_length"), get("attention.head_count")
    if get("block_count") == largest and all(isinstance(size, int) and size for size in sizes):
        scalar = sizes[0] // sizes[1]
    return {
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": get("final_logit_softcapping"),
        "layer_types": _layer_types(get),
    }


def _layer_types(get: Metadata) -> list[str] | None:
    """Which layers have a window, if the file says so; else the family knows."""
    pattern, count = get("attention.sliding_window_pattern"), get("block_count")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and isinstance(count, int):
        pattern = [pattern > 0 and (i + 1) % pattern != 0 for i in range(min(count, 1 << 14))]
    if not isinstance(pattern, list):
        return None
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _granite(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": get("attention.scale"),
        "embedding_multiplier": get("embedding_scale"),
        "residual_multiplier": get("residual_scale"),
        "logits_scaling": get("logit_scale"),
    }


# ---- mixtures ------------------------------------------------------------------------------------


def _mixture(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    down = _first(header, r"blk\.\d+\.ffn_down_exps\.weight")
    size = down[2] if len(down) == 3 else get("expert_feed_forward_length")
    return {
        "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": size,
        "intermediate_size": get("feed_forward_length") or size,
    }


def _first(header: GGUFHeader, pattern: str) -> tuple[int, ...]:
    """The shape of the first such tensor, or nothing."""
    names = (name for name in header.tensors if re.fullmatch(pattern, name))
    name = next(names, None)
    return () if name is None else header.tensors[name].shape


def _said(get: Metadata, name: str, otherwise: Any) -> Any:
    value = get(name)
    return otherwise if value is None else value


def _qwen2_moe(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    shared = _first(header, r"blk\.\d+\.ffn_up_shexp\.weight")
    return _mixture(header, get) | {
        "shared_expert_intermediate_size": shared[0] if shared else None,
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "norm_topk_prob": _said(get, "expert_weights_norm", False),
        "mlp_only_layers": _dense_layers(header, get),
    }


def _qwen3_moe(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _mixture(header, get) | {
        "norm_topk_prob": _said(get, "expert_weights_norm", True),
        "mlp_only_layers": _dense_layers(header, get),
    }


def _dense_layers(header: GGUFHeader, get: Metadata) -> list[int]:
    count = get("block_count")
    some = range(min(count, 1 << 14) if isinstance(count, int) else 0)
    return [i for i in some if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors]


def _olmoe(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _mixture(header, get) | {"norm_topk_prob": _said(get, "expert_weights_norm", False)}


def _granite_moe(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _mixture(header, get) | _granite(header, get)


def _glm4_moe(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    turned, head = get("rope.dimension_count"), get("attention.key_length")
    part = turned / head if isinstance(turned, int) and isinstance(head, int) and head else None
    return _mixture(header, get) | {
        "num_hidden_layers": layers_of(get),
        "n_shared_experts": get("expert_shared_count"),
        "first_k_dense_replace": get("leading_dense_block_count"),
        "routed_scaling_factor": get("expert_weights_scale"),
        "norm_topk_prob": _said(get, "expert_weights_norm", True),
        "n_group": get("expert_group_count"),
        "topk_group": get("expert_group_used_count"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "partial_rotary_factor": part,
    }


def layers_of(get: Metadata) -> Any:
    """Layers without those behind the last, which predict further tokens."""
    count, extra = get("block_count"), get("nextn_predict_layers")
    return count - extra if isinstance(count, int) and isinstance(extra, int) else count


def _gpt_oss(header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    return _mixture(header, get) | {
        "sliding_window": get("attention.sliding_window"),
        "layer_types": _layer_types(get),
    }


OPTIONS: Final[dict[str, Options]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "mixtral": _mixture,
    "mpt": _mpt,
    "olmo": _olmo,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""By model type, the entries that only its configuration has."""
EXPERTS: Final = frozenset(
    {"glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
)
"""Model types that are mixtures."""
