"""The vocabulary of `config.json`: what families call the same thing, as one table.

`canonical()` flattens nested configurations (the text model of a multimodal one) and adds
Hugging Face's most common name for each entry that a family spells differently. Nothing is removed.
Knows names, not what they mean for a computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from quire.errors import ModelLoadError

NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Entries that hold the configuration of the text model inside a larger one."""

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim", "dim"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", "hidden_dim"),
    "num_hidden_layers": (
        "n_layer",
        "n_layers",
        "num_layers",
        "num_transformer_layers",
        "num_decoder_layers",
    ),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_key_value_heads": (
        "n_head_kv",
        "n_kv_heads",
        "num_kv_heads",
        "multi_query_group_num",
        "num_query_groups",
    ),
    "head_dim": ("kv_channels", "attention_head_size"),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
        "max_seq_length",
    ),
    "rms_norm_eps": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base"),
    "partial_rotary_factor": ("rotary_pct", "rope_pct", "rotary_percent"),
    "hidden_act": ("activation_function", "hidden_activation", "activation"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_top_k", "num_experts_per_token"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "dtype": ("torch_dtype",),
    "tie_word_embeddings": ("tie_embeddings", "use_tied_embeddings", "weight_tying"),
}
"""Hugging Face's common name to other spellings; the first that is given counts.

The common name itself comes first, except in `PREFERRED`.
"""

PREFERRED: Final[dict[str, str]] = {"vocab_size": "padded_vocab_size"}
"""Spellings that win over the common name: the embedding has the padded number of rows."""

FOUR_TIMES_HIDDEN: Final = frozenset(
    {
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "falcon",
        "RefinedWeb",
        "RefinedWebModel",
        "bloom",
        "codegen",
        "mpt",
    }
)
"""Model types whose MLP is four times as wide as the model if nothing is said."""

OLMO: Final = ("olmo", "hf_olmo")
"""Model types of OLMo 1, whose own code has names and a padded vocabulary of its own."""

ONE_KV_HEAD: Final = ("multi_query", "use_multi_query")
"""Switches that mean one key/value head for all query heads."""


def canonical(data: Mapping[str, Any], source: str = "config.json") -> dict[str, Any]:
    """The configuration of the text model, flat, with the common names filled in.

    Entries of a nested text configuration win over the outer ones; the architecture stays the
    outer one. Entries that are null count as not given.

    Raises:
        ModelLoadError: a nested configuration is not an object.
    """
    flat = _flattened(dict(data), source)
    for name, others in ALIASES.items():
        preferred = PREFERRED.get(name, name)
        given = (flat[key] for key in (preferred, name, *others) if flat.get(key) is not None)
        value = next(given, None)
        if value is not None:
            flat[name] = value
    if flat.get("model_type") in OLMO and flat.get("embedding_size") is not None:
        flat["vocab_size"] = flat["embedding_size"]
    _fill_kv_heads(flat)
    if flat.get("intermediate_size") is None:
        flat["intermediate_size"] = _inner_size(flat)
    return flat


def _flattened(data: dict[str, Any], source: str) -> dict[str, Any]:
    for name in NESTED:
        inner = data.get(name)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise ModelLoadError(f"{source}: {name!r} must be an object, got {inner!r:.60}")
        kept = {k: v for k, v in inner.items() if v is not None and k != "architectures"}
        inner_names = {"architectures": inner.get("architectures"), **data}
        return _flattened({**inner_names, name: None, **kept}, source)
    return data


def _inner_size(flat: dict[str, Any]) -> Any:
    """Width of the MLP, where it follows from the model's; what is no number is refused later."""
    hidden, kind = flat.get("hidden_size"), flat.get("model_type")
    if not isinstance(hidden, int):
        return None
    if kind in OLMO:  # its MLP's width is that of gate and up together
        both = flat.get("mlp_hidden_size")
        both = _times(hidden, flat.get("mlp_ratio")) if both is None else both
        return both // 2 if isinstance(both, int) else both
    if flat.get("expansion_ratio") is not None:  # MPT
        return _times(hidden, flat["expansion_ratio"])
    return 4 * hidden if str(kind) in FOUR_TIMES_HIDDEN else None


def _times(hidden: int, ratio: Any) -> Any:
    number = isinstance(ratio, (int, float)) and abs(ratio) < math.inf
    return int(hidden * ratio) if number else ratio


def _fill_kv_heads(flat: dict[str, Any]) -> None:
    """Older families say with switches how many key/value heads there are."""
    _fill_from_attn_config(flat)
    if flat.get("model_type") == "RefinedWeb":  # Falcon 40B, before it was called Falcon
        flat["new_decoder_architecture"] = True
    if flat.get("model_type") == "gpt_bigcode" and flat.get("multi_query") is None:
        flat["multi_query"] = True
    if flat.get("new_decoder_architecture"):
        return  # Falcon 40B and later: num_kv_heads counts, whatever multi_query says
    if flat.get("model_type") in ("falcon", "RefinedWebModel") and flat.get("multi_query"):
        flat["num_key_value_heads"] = 1
    elif flat.get("multi_query_attention") is False:
        flat["num_key_value_heads"] = flat.get("num_attention_heads")
    elif flat.get("num_key_value_heads") is None and any(flat.get(key) for key in ONE_KV_HEAD):
        flat["num_key_value_heads"] = 1


def _fill_from_attn_config(flat: dict[str, Any]) -> None:
    """MPT says in `attn_config` what attention is like."""
    inner = flat.get("attn_config")
    if not isinstance(inner, dict) or flat.get("num_key_value_heads") is not None:
        return
    if inner.get("attn_type") == "multiquery_attention":
        flat["num_key_value_heads"] = 1
    elif inner.get("kv_n_heads") is not None:
        flat["num_key_value_heads"] = inner["kv_n_heads"]


def merged(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with `overrides` over it; objects are merged entry by entry."""
    result = dict(data)
    for key, value in overrides.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both and isinstance(old, dict) else value
    return result
