"""MPT: ALiBi instead of positions, and norms without biases.

Options of the attention are in a nested object of the configuration (`attn_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.config_entries import limit
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.weights.names import NameRules

_ATTENTION: Final[dict[str, tuple[Any, ...]]] = {
    "attn_type": ("multihead_attention", "multiquery_attention", "grouped_query_attention"),
    "attn_logit_softcapping": (),
    "prefix_lm": (False,),
    "qk_gn": (False,),
    "rope": (False,),
    "sliding_window_size": (-1,),
}
"""Entry of `attn_config` to the values it may have, if it is there."""
_MODEL: Final[dict[str, tuple[Any, ...]]] = {
    "block_overrides": (),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}
_MLP: Final[dict[str, tuple[Any, ...]]] = {
    "ffn_type": ("mptmlp",),
    "ffn_act_fn": ({"name": "gelu"}, {"name": "gelu", "approximate": "none"}),
    "ffn_hidden_size": (),
}


class MptForCausalLM(DecoderForCausalLM):
    """Hugging Face's `MptForCausalLM`, and `MPTForCausalLM` of the models' own code, which has
    more options."""

    TIED: ClassVar[bool] = True
    NAME_RULES: ClassVar[NameRules] = NameRules(
        substitutions=(
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.wpe\.", "model.embed_positions."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"^transformer\.blocks\.", "model.layers."),
            (r"\.norm_1\.", ".input_layernorm."),
            (r"\.norm_2\.", ".post_attention_layernorm."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.(q|k)_ln\.", r".self_attn.\1_norm."),
            (r"\.ffn\.", ".mlp."),
        ),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Without ALiBi there are learned positions.

        Raises:
            ModelLoadError: the configuration asks for something that is not computed here.
        """
        raw = shape.raw
        attention = _checked(raw, "attn_config", _ATTENTION)
        _checked(raw, "ffn_config", _MLP)
        _check("", raw, _MODEL)
        bias, alibi = not raw.get("no_bias", True), bool(attention.get("alibi", True))
        learned = not alibi and bool(raw.get("learned_pos_emb", True))
        return DecoderStyle(
            norm="layer" if bias else "layer_no_bias",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            clip_qkv=limit(attention, "clip_qkv"),
            qk_norm="full" if attention.get("qk_ln") else "",
            attention_scale=limit(attention, "softmax_scale") or None,
            alibi=1.0 if alibi else 0.0,
            alibi_bias_max=limit(attention, "alibi_bias_max") or 8.0,
            ropes={},
            learned_positions=shape.max_position_embeddings if learned else 0,
            gated=False,
            activation="gelu",
            mlp_bias=bias,
            logit_scale=_logit_scale(shape),
        )


def _logit_scale(shape: ModelShape) -> float:
    if shape.raw.get("logit_scale") == "inv_sqrt_d_model":
        return float(shape.hidden_size**-0.5)
    return limit(shape.raw, "logit_scale") or 1.0


def _checked(raw: Mapping[str, Any], name: str, known: dict[str, tuple[Any, ...]]) -> Any:
    """An object in the configuration, empty if it is missing or null.

    Raises:
        ModelLoadError: it is no object, or asks for something that is not computed here.
    """
    inner = raw.get(name) or {}
    if not isinstance(inner, dict):
        raise ModelLoadError(f"config.json: {name!r} must be an object, got {inner!r:.60}")
    _check(f"{name}.", inner, known)
    return inner


def _check(place: str, entries: Mapping[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    for name, values in known.items():
        value = entries.get(name)
        if value is not None and value not in values:
            wanted = " or ".join(map(repr, values)) or "null"
            raise ModelLoadError(f"config.json: {place}{name} must be {wanted}, got {value!r:.60}")
