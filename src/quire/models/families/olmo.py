"""OLMo 1: Llama whose norms have no weights; some models clip queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.config_entries import limit
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.weights.names import Layout, NameRules

_ONLY: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "activation_type": ("swiglu", ()),
    "alibi": (False, ()),
    "attention_layer_norm": (False, ()),
    "block_type": ("sequential", ()),
    "include_bias": (False, ()),
    "layer_norm_type": ("default", ("low_precision",)),
    "layer_norm_with_affine": (False, ()),
    "rope": (True, ()),
    "scale_logits": (False, ()),
}
"""Entry to the value it must have, or the others that mean the same here."""


def _exchanged(rows: Tensor) -> Tensor:
    """Up and gate as gate and up."""
    return torch.cat(rows.chunk(2)[::-1])


class OlmoForCausalLM(DecoderForCausalLM):
    """Hugging Face's `OlmoForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """`attention_bias` covers all four projections."""
        return DecoderStyle(
            norm="layer_bare",
            norm_eps=1e-5,
            qkv_bias=shape.attention_bias,
            out_bias=shape.attention_bias,
            clip_qkv=limit(shape.raw, "clip_qkv"),
        )


class OLMoForCausalLM(OlmoForCausalLM):
    """The same model under the names of its own code (`hf_olmo`)."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        substitutions=(
            (r"^model\.transformer\.wte\.", "model.embed_tokens."),
            (r"^model\.transformer\.ff_out\.", "lm_head."),
            (r"^model\.transformer\.blocks\.", "model.layers."),
            (r"\.att_proj\.", ".self_attn.qkv_proj."),
            (r"\.attn_out\.", ".self_attn.o_proj."),
            (r"\.ff_proj\.", ".mlp.gate_up_proj."),
            (r"\.ff_out\.", ".mlp.down_proj."),
        ),
        layouts=(Layout(r".*\.gate_up_proj\.weight", _exchanged),),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """OLMo 1 as it was released; the code can do more.

        Raises:
            ModelLoadError: the configuration asks for another kind of model.
        """
        raw = shape.raw
        for name, (usual, others) in _ONLY.items():
            value = raw.get(name, usual)
            if value not in (usual, *others):
                raise ModelLoadError(f"config.json: {name} must be {usual!r}, got {value!r:.60}")
        return super().style(shape)
