"""Mixture-of-experts, latent-attention and GLM families, for `test_families.py`.

bf16 tolerances are wide here: rounding may send a token to another expert, which changes its
logits as a whole; the float32 test says whether the family is right.
"""

import torch

from hf_checkpoint import Row
from other_names import chatglm, chatglm_head_by_head, stacked_experts

DENSE = 0.05
FLIPS = 0.4
"""Relative error of a prompt's bf16 logits where some tokens change experts."""
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}


def row(name, config, **changes):
    """A row that starts from `SIZES`."""
    names = ("patch", "prepare", "convert", "exact", "bf16", "lengths")
    own = {k: changes.pop(k) for k in names if k in changes}
    return Row(name, config, {**SIZES, **changes}, **{"bf16": FLIPS, **own})


def correct(model):
    """Correction biases that matter, in numbers that bf16 has."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randint(-8, 9, buffer.shape, generator=generator) / 32)


GLM = {"attention_bias": True, "head_dim": 12, "pad_token_id": 0}
GLM_MOE = {
    "head_dim": 16,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
SINKS = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}
GRANITE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}

MOE: tuple[Row, ...] = (
    row("mixtral", "MixtralConfig", num_local_experts=6, num_experts_per_tok=2),
    row(
        "mixtral window tied",
        "MixtralConfig",
        num_local_experts=5,
        num_experts_per_tok=1,
        sliding_window=7,
        tie_word_embeddings=True,
    ),
    row(
        "mixtral stacked",
        "MixtralConfig",
        num_local_experts=6,
        num_experts_per_tok=2,
        convert=stacked_experts,
    ),
    row(
        "qwen2 moe",
        "Qwen2MoeConfig",
        **ROUTED,
        shared_expert_intermediate_size=36,
        decoder_sparse_step=2,
    ),
    row(
        "qwen2 moe normalised",
        "Qwen2MoeConfig",
        **ROUTED,
        shared_expert_intermediate_size=36,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    row("qwen3 moe", "Qwen3MoeConfig", **ROUTED, head_dim=16, norm_topk_prob=True),
    row("qwen3 moe plain", "Qwen3MoeConfig", **ROUTED, head_dim=16, mlp_only_layers=[0]),
    row("deepseek v2", "DeepseekV2Config", **DEEPSEEK, topk_method="group_limited_greedy"),
    row(
        "deepseek v2 lite",
        "DeepseekV2Config",
        **{**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        topk_method="greedy",
    ),
    row("deepseek v2 yarn", "DeepseekV2Config", **DEEPSEEK, rope_parameters=DEEPSEEK_YARN),
    row("deepseek v3", "DeepseekV3Config", **DEEPSEEK, prepare=correct),
    row(
        "deepseek v3 variant",
        "DeepseekV3Config",
        **{**DEEPSEEK, "q_lora_rank": None},
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        prepare=correct,
    ),
    row(
        "deepseek v3 yarn",
        "DeepseekV3Config",
        **DEEPSEEK,
        rope_parameters=DEEPSEEK_YARN,
        prepare=correct,
    ),
    row("glm4 moe", "Glm4MoeConfig", **GLM_MOE, prepare=correct),
    row("glm4 moe norms", "Glm4MoeConfig", **GLM_MOE, use_qk_norm=True, prepare=correct),
    row("olmoe", "OlmoeConfig", num_experts=6, num_experts_per_tok=3),
    row("granite moe", "GraniteMoeConfig", **GRANITE, tie_word_embeddings=True),
    row("gpt-oss", "GptOssConfig", **SINKS),
    row(
        "gpt-oss one kind",
        "GptOssConfig",
        **SINKS,
        layer_types=["full_attention"] * 3,
        attention_bias=False,
        swiglu_limit=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    row("glm", "GlmConfig", **GLM, bf16=DENSE),
    row("glm4", "Glm4Config", **GLM, bf16=DENSE),
    row("glm4 no bias", "Glm4Config", **{**GLM, "attention_bias": False}, bf16=DENSE),
    row("chatglm", "GlmConfig", **GLM, convert=chatglm, bf16=DENSE),
    row("chatglm tied", "GlmConfig", **GLM, convert=chatglm, bf16=DENSE, tie_word_embeddings=True),
    row(
        "chatglm longer",
        "GlmConfig",
        **GLM,
        convert=chatglm,
        bf16=DENSE,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    row(
        "chatglm head by head",
        "GlmConfig",
        **{**GLM, "num_key_value_heads": 4},
        convert=chatglm_head_by_head,
        bf16=DENSE,
    ),
)
