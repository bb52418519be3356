"""StableLM: layer norms, partly rotated heads; StableLM 2 12B with norms of each head."""

from __future__ import annotations

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM, DecoderStyle
from quire.models.shared_styles import part_rope
from quire.weights.names import GATE_UP, QKV, Layout, Merge, NameRules, as_row


class StableLmForCausalLM(DecoderForCausalLM):
    """Hugging Face's `StableLmForCausalLM`."""

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """A quarter of each head is rotated unless the configuration says otherwise."""
        raw = shape.raw
        return DecoderStyle(
            norm="layer",
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            placement="parallel" if raw.get("use_parallel_residual") else "pre",
            qkv_bias=bool(raw.get("use_qkv_bias")),
            qk_norm="per_head" if raw.get("qk_layernorm") else "",
            qk_norm_kind="layer_no_bias",
            ropes=part_rope(shape, 0.25),
        )

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """Checkpoints keep the norm of each head in a tensor of its own."""
        heads = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
        norms = [
            Merge(name, tuple(f"{name}.norms.{i}" for i in range(count)))
            for name, count in heads.items()
        ]
        return NameRules(
            merges=(QKV, GATE_UP, *norms),
            substitutions=((r"\.(q|k)_layernorm\.", r".\1_norm."),),
            layouts=(Layout(r".*\.norms\.\d+\.weight", as_row),),
            ignore=(r".*\.rotary_emb\.inv_freq",),
        )
