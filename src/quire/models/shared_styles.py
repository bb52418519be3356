"""What several families declare alike: styles, windows, rotated parts and tensor names.

Families do not import each other. What two of them have in common is a function or a table here,
named after the model that had it first; each family states on its own that it uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.rotary import Rope
from quire.models.decoder_style import FULL, DecoderStyle
from quire.weights.names import EXPERT_STACKS, GATE_UP, QKV, NameRules

GPT2_NAMES: Final = (
    (r"^(transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
    (r"^(transformer\.)?h\.", "model.layers."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
"""Substitutions for the tensor names of GPT-2; checkpoints may lack the prefix `transformer.`."""

EXPERT_RULES: Final = NameRules(
    merges=(QKV, GATE_UP), stacks=EXPERT_STACKS, ignore=(r".*\.rotary_emb\.inv_freq",)
)
"""Llama's names, and experts under `mlp.experts`, each by itself or all in one tensor."""


def llama_style(shape: ModelShape) -> DecoderStyle:
    """Llama: `attention_bias` covers all four projections of the attention.

    Raises:
        ModelLoadError: only a part of each head would be rotated, which no such model does.
    """
    partial = shape.raw.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor must be 1 for Llama, got {partial!r}")
    return DecoderStyle(
        qkv_bias=shape.attention_bias,
        out_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
    )


def granite_style(shape: ModelShape) -> DecoderStyle:
    """Granite: Llama with multipliers; logits are divided by `logits_scaling`."""
    raw = shape.raw
    return replace(
        llama_style(shape),
        embedding_scale=raw.get("embedding_multiplier", 1.0),
        residual_scale=raw.get("residual_multiplier", 1.0),
        attention_scale=raw.get("attention_multiplier", 1.0),
        logit_scale=1.0 / raw.get("logits_scaling", 1.0),
    )


def qwen3_style(shape: ModelShape) -> DecoderStyle:
    """Qwen3: norms on heads; `attention_bias` covers all four projections."""
    bias = shape.attention_bias
    return DecoderStyle(qkv_bias=bias, out_bias=bias, qk_norm="head")


def part_rope(shape: ModelShape, default: float) -> dict[str, Rope]:
    """One rotary table for the first part of each head: `partial_rotary_factor` or `default`.

    Newer configurations keep the entry in `rope_parameters`.
    """
    raw = shape.raw
    nested = raw.get("rope_parameters") or {}
    part = raw.get("partial_rotary_factor") or nested.get("partial_rotary_factor") or default
    return {FULL: Rope.of(shape, dim=int(shape.head_dim * part))}


def same_windows(shape: ModelShape) -> tuple[int | None, ...]:
    """`sliding_window` in every layer; without that entry, no layer has a window."""
    return (shape.raw.get("sliding_window"),) * shape.num_layers


def windows_by_type(shape: ModelShape, period: int = 0) -> tuple[int | None, ...]:
    """The configuration's `sliding_window` where `layer_types` says so.

    Without `layer_types`, in all layers but every `period`-th; with a period of 0 in none.

    Raises:
        ModelLoadError: `layer_types` has another number of entries than the model has layers.
    """
    window, count = shape.raw.get("sliding_window"), shape.num_layers
    types = shape.raw.get("layer_types")
    if types is None:
        slides = [period > 0 and (i + 1) % period != 0 for i in range(count)]
    else:
        slides = [kind == "sliding_attention" for kind in types]
    if len(slides) != count:
        raise ModelLoadError(f"layer_types must have {count} entries, got {len(slides)}")
    return tuple(window if slide else None for slide in slides)


def mistral_windows(shape: ModelShape) -> tuple[int | None, ...]:
    """`sliding_window` in every layer, unless `layer_types` names the layers that have it."""
    return windows_by_type(shape) if shape.raw.get("layer_types") else same_windows(shape)


def qwen_windows(shape: ModelShape) -> tuple[int | None, ...]:
    """Windows only if `use_sliding_window`, then from layer `max_window_layers` on."""
    raw, count = shape.raw, shape.num_layers
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return (None,) * count
    if raw.get("layer_types"):
        return windows_by_type(shape)
    full = min(raw.get("max_window_layers", count), count)
    return (None,) * full + (raw["sliding_window"],) * (count - full)
