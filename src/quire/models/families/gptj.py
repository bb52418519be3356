"""GPT-J: attention and MLP side by side behind one norm, and a head with a bias.

The first part of each head is rotated, in neighbouring pairs.
"""

from __future__ import annotations

from typing import ClassVar

from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.layers.rotary import Rope
from quire.models.config_entries import whole
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.decoder_style import FULL
from quire.weights.names import QKV, NameRules


class GPTJForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GPTJForCausalLM`; checkpoints may lack the prefix `transformer.`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV,),
        substitutions=(
            (r"^(transformer\.)?wte\.", "model.embed_tokens."),
            (r"^(transformer\.)?ln_f\.", "model.norm."),
            (r"^(transformer\.)?h\.", "model.layers."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.", ".self_attn."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        ignore=(r".*\.self_attn\.((masked_)?bias|embed_positions)",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The first `rotary_dim` dimensions of a head are rotated: 64 if nothing is said, all of
        them if it is null."""
        raw = shape.raw
        everything = "rotary_dim" in raw and raw["rotary_dim"] is None
        dim = shape.head_dim if everything else whole(shape, "rotary_dim", 64)
        if dim > shape.head_dim:
            raise ModelLoadError(
                f"config.json: 'rotary_dim' must be at most the head's {shape.head_dim}, got {dim}"
            )
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement="parallel",
            ropes={FULL: Rope.of(shape, dim=dim, interleaved=True)},
            gated=False,
            activation=raw.get("hidden_act", "gelu_new"),
            mlp_bias=True,
            head_bias=True,
        )
