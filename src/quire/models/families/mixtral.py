"""Mixtral: Mistral whose MLP is a mixture; the softmax is over the chosen experts only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from quire.config.shape import ModelShape
from quire.models.decoder import DecoderForCausalLM
from quire.models.decoder_style import DecoderStyle
from quire.models.mixture import mixture, routing
from quire.models.shared_styles import llama_style, mistral_windows
from quire.weights.names import EXPERT_STACKS, GATE_UP, QKV, NameRules


class MixtralForCausalLM(DecoderForCausalLM):
    """Hugging Face's `MixtralForCausalLM`."""

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP),
        substitutions=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.w1\.", ".gate_proj."),
            (r"\.w2\.", ".down_proj."),
            (r"\.w3\.", ".up_proj."),
        ),
        stacks=EXPERT_STACKS,
        ignore=(r".*\.rotary_emb\.inv_freq",),
    )

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """Every layer has a mixture."""
        mlp = mixture(shape, routing(shape, normalise=True), shape.intermediate_size)
        return dataclasses.replace(llama_style(shape), mlp=mlp)

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Mistral's."""
        return mistral_windows(shape)
