"""GPT-NeoX and Pythia: attention and MLP side by side, partly rotated heads, fused q, k, v."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import part_rope
from quire.weights.names import Layout, NameRules, grouped_qkv


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """Hugging Face's `GPTNeoXForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A quarter of each head is rotated unless the configuration says otherwise."""
        raw = shape.raw
        bias = bool(raw.get("attention_bias", True))
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement="parallel_two" if raw.get("use_parallel_residual", True) else "pre",
            qkv_bias=bias,
            out_bias=bias,
            ropes=part_rope(shape, 0.25),
            gated=False,
            activation=raw.get("hidden_act", "gelu"),
            mlp_bias=True,
        )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Rows are ordered by head: its query, its key, its value."""
        return NameRules(
            substitutions=(
                (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
                (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
                (r"^gpt_neox\.", "model."),
                (r"^embed_out\.", "lm_head."),
                (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
                (r"\.attention\.dense\.", ".self_attn.o_proj."),
                (r"\.dense_h_to_4h\.", ".up_proj."),
                (r"\.dense_4h_to_h\.", ".down_proj."),
            ),
            layouts=(Layout(r".*\.qkv_proj\..*", grouped_qkv(shape.num_heads, 1)),),
            ignore=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
        )
