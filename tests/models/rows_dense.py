"""Dense families and their variants, for `test_families.py`."""

import mpt_variants
from hf_checkpoint import Row
from other_names import olmo_of_its_own

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What most configuration classes call their sizes."""

WIDE = {**SIZES, "hidden_size": 64}
"""Heads of which a quarter is an even number."""

GPT2 = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BLOOM = {
    "vocab_size": 101,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MPT = {
    "vocab_size": 101,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def row(name, config, sizes=SIZES, without=(), **changes):
    """A row that starts from `sizes`."""
    names = ("convert", "patch", "exact", "bf16", "lengths", "prepare", "architecture", "attention")
    own = {k: changes.pop(k) for k in names if k in changes}
    kwargs = {k: v for k, v in {**sizes, **changes}.items() if k not in without}
    return Row(name, config, kwargs, **own)


def rope(kind, theta=10000.0, **entries):
    """`rope_parameters` as transformers 5 spells them."""
    return {"rope_type": kind, "rope_theta": theta, **entries}


LLAMA3 = rope(
    "llama3",
    500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LONG = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SHORT = [1.0, 1.0, 1.1, 1.2, 1.3, 1.5]


def longrope(**entries):
    return rope("longrope", long_factor=LONG, short_factor=SHORT, **entries)


def opt(name, **changes):
    sizes = {**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 48}
    gone = ("intermediate_size", "num_key_value_heads")
    return row(name, "OPTConfig", sizes, gone, **changes)


def falcon(name, **changes):
    sizes = {**SIZES, "ffn_hidden_size": 96}
    gone = ("intermediate_size", "num_key_value_heads")
    return row(name, "FalconConfig", sizes, gone, **changes)


OLD_FALCON = {
    "architectures": ["RWForCausalLM"],
    "model_type": "RefinedWebModel",
    "new_decoder_architecture": None,
    "num_hidden_layers": None,
    "n_layer": 2,
}


def neox(name, **changes):
    return row(name, "GPTNeoXConfig", WIDE, without=("num_key_value_heads",), **changes)


def bigcode(name, **changes):
    return row(name, "GPTBigCodeConfig", GPT2, **changes)


def mpt(name, attention=None, config=None, **changes):
    """`attention` and `config` are entries that transformers ignores or refuses."""
    own = {**(config or {}), "attn_config": {"alibi": True, **(attention or {})}}
    own = own if attention or config else {}
    return row(
        name, "MptConfig", MPT, patch={"architectures": ["MPTForCausalLM"], **own}, **changes
    )


def rw(name, **changes):
    """Judged by sdpa because the eager one adds the biases twice."""
    own = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    return falcon(name, **{**own, **changes}, attention="sdpa")


DENSE: tuple[Row, ...] = (
    row("llama", "LlamaConfig"),
    row("llama tied, one KV head", "LlamaConfig", tie_word_embeddings=True, num_key_value_heads=1),
    row("llama biases", "LlamaConfig", attention_bias=True, mlp_bias=True),
    row("llama head of 40", "LlamaConfig", head_dim=40),
    row(
        "llama head of 80", "LlamaConfig", head_dim=80, num_attention_heads=3, num_key_value_heads=3
    ),
    row(
        "llama head of 96", "LlamaConfig", head_dim=96, num_attention_heads=2, num_key_value_heads=1
    ),
    row("llama linear", "LlamaConfig", rope_parameters=rope("linear", factor=4.0)),
    row("llama dynamic", "LlamaConfig", rope_parameters=rope("dynamic", factor=4.0)),
    row("llama 3.1", "LlamaConfig", rope_parameters=LLAMA3),
    row("llama yarn", "LlamaConfig", rope_parameters=YARN),
    row(
        "llama yarn, other numbers",
        "LlamaConfig",
        rope_parameters={**YARN, "beta_fast": 20, "beta_slow": 2, "attention_factor": 1.1},
    ),
    row(
        "llama, older spelling",
        "LlamaConfig",
        rope_parameters=LLAMA3,
        patch={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    ),
    row("mistral", "MistralConfig", sliding_window=24),
    row("mistral without window", "MistralConfig", sliding_window=None, head_dim=20),
    row("qwen2", "Qwen2Config"),
    row("qwen2 tied", "Qwen2Config", tie_word_embeddings=True),
    row(
        "qwen2 windows",
        "Qwen2Config",
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    ),
    row("qwen3", "Qwen3Config", head_dim=16),
    row("qwen3 biases", "Qwen3Config", head_dim=16, attention_bias=True),
    row("gpt2", "GPT2Config", GPT2),
    row("gpt2 wide", "GPT2Config", GPT2, n_inner=72, activation_function="relu"),
    row(
        "gpt2 scales",
        "GPT2Config",
        GPT2,
        scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
    bigcode("gpt-bigcode"),
    bigcode("gpt-bigcode, head by head", multi_query=False, n_inner=72),
    bigcode(
        "gpt-bigcode unscaled",
        n_head=6,
        activation_function="gelu",
        scale_attn_weights=False,
        attention_softmax_in_fp32=False,
        tie_word_embeddings=False,
    ),
    row("gpt-j", "GPTJConfig", GPT2, rotary_dim=8),
    row("gpt-j of three heads", "GPTJConfig", GPT2, n_head=3, rotary_dim=16, n_inner=72),
    row("gpt-j tied", "GPTJConfig", GPT2, rotary_dim=4, tie_word_embeddings=True),
    mpt("mpt"),
    mpt("mpt of six heads", n_heads=6, attn_config={"clip_qkv": 0.5}),
    mpt(
        "mpt steep",
        {"alibi_bias_max": 16, "clip_qkv": 0.5},
        n_heads=5,
        d_model=40,
        attn_config={"clip_qkv": 0.5},
        prepare=mpt_variants.slopes_of_16,
    ),
    mpt(
        "mpt, other scale", n_heads=3, attn_config={"softmax_scale": 0.2}, tie_word_embeddings=False
    ),
    mpt("mpt biases", config={"no_bias": False}, prepare=mpt_variants.biases),
    mpt("mpt positions", {"alibi": False}, prepare=mpt_variants.learned_positions),
    mpt("mpt norms", {"qk_ln": True}, prepare=mpt_variants.normed_queries),
    mpt("mpt groups", {"kv_n_heads": 2}, prepare=mpt_variants.two_key_heads),
    mpt(
        "mpt one key head", {"attn_type": "multiquery_attention"}, prepare=mpt_variants.one_key_head
    ),
    mpt("mpt narrow", config={"expansion_ratio": 2}, prepare=mpt_variants.wide_mlp),
    mpt(
        "mpt scaled", config={"logit_scale": "inv_sqrt_d_model"}, prepare=mpt_variants.scaled_logits
    ),
    neox("gpt-neox"),
    neox("gpt-neox in turn", use_parallel_residual=False, attention_bias=False),
    neox("gpt-neox, older spelling", patch={"rope_parameters": None, "rotary_pct": 0.25}),
    neox("gpt-neox half rotated", rope_parameters=rope("default", partial_rotary_factor=0.5)),
    opt("opt"),
    opt("opt 350m", do_layer_norm_before=False, word_embed_proj_dim=32),
    opt("opt projected, norms first", word_embed_proj_dim=32),
    opt("opt without final norm", _remove_final_layer_norm=True),
    opt("opt without biases", enable_bias=False, layer_norm_elementwise_affine=False),
    row("bloom", "BloomConfig", BLOOM),
    row("bloom of six heads", "BloomConfig", BLOOM, n_head=6),
    row(
        "bloom stream from norms",
        "BloomConfig",
        BLOOM,
        apply_residual_connection_post_layernorm=True,
    ),
    falcon("falcon 7b"),
    falcon("falcon 40b", new_decoder_architecture=True, num_kv_heads=2),
    falcon("falcon 7b, older spelling", patch=OLD_FALCON),
    falcon(
        "falcon 40b, older spelling",
        new_decoder_architecture=True,
        num_kv_heads=2,
        patch={**OLD_FALCON, "model_type": "RefinedWeb", "num_kv_heads": None, "n_head_kv": 2},
    ),
    falcon(
        "falcon 11b",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    rw("falcon rw"),
    # Slopes and positions that bfloat16 cannot hold.
    rw(
        "falcon rw at length",
        num_attention_heads=6,
        lengths=(5, 400, 290),
        max_position_embeddings=512,
    ),
    rw(
        "falcon rw, groups of three",
        num_attention_heads=6,
        max_position_embeddings=512,
        new_decoder_architecture=True,
        parallel_attn=True,
        num_kv_heads=2,
        lengths=(5, 300, 33),
    ),
    falcon("falcon one by one", parallel_attn=False),
    row("phi", "PhiConfig", num_key_value_heads=4),
    row("phi norms on heads", "PhiConfig", num_key_value_heads=4, qk_layernorm=True),
    row("phi3", "Phi3Config"),
    row("phi3 window", "Phi3Config", sliding_window=24),
    row(
        "phi3 long",
        "Phi3Config",
        original_max_position_embeddings=64,
        rope_parameters=longrope(),
        lengths=(70, 90),
    ),
    row(
        "phi3 short",
        "Phi3Config",
        original_max_position_embeddings=256,
        rope_parameters=longrope(),
    ),
    row(
        "phi3, older spelling",
        "Phi3Config",
        original_max_position_embeddings=64,
        rope_parameters=longrope(),
        lengths=(70, 90),
        patch={
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "long_factor": LONG, "short_factor": SHORT},
        },
    ),
    row(
        "phi4 mini",
        "Phi3Config",
        head_dim=16,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters=rope("default", partial_rotary_factor=0.75),
    ),
    row("gemma", "GemmaConfig", head_dim=20, num_key_value_heads=1),
    row(
        "gemma2",
        "Gemma2Config",
        head_dim=16,
        num_hidden_layers=3,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
    ),
    row(
        "gemma2 without caps",
        "Gemma2Config",
        head_dim=16,
        sliding_window=20,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    row(
        "gemma3",
        "Gemma3TextConfig",
        head_dim=16,
        num_hidden_layers=6,
        sliding_window=20,
        rope_parameters={
            "full_attention": rope("linear", 1e6, factor=8.0),
            "sliding_attention": rope("default", 1e4),
        },
    ),
    row(
        "gemma3, older spelling",
        "Gemma3TextConfig",
        head_dim=16,
        num_hidden_layers=6,
        sliding_window=20,
        rope_parameters={
            "full_attention": rope("linear", 1e6, factor=8.0),
            "sliding_attention": rope("default", 1e4),
        },
        patch={
            "rope_parameters": None,
            "layer_types": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    row("stablelm", "StableLmConfig", WIDE, num_key_value_heads=4),
    row("stablelm 2", "StableLmConfig", WIDE, use_qkv_bias=True),
    row("stablelm 2 12b", "StableLmConfig", WIDE, qk_layernorm=True, use_parallel_residual=True),
    row("starcoder2", "Starcoder2Config", sliding_window=24),
    row("starcoder2 untied", "Starcoder2Config", use_bias=False, tie_word_embeddings=False),
    row("olmo", "OlmoConfig"),
    row("olmo clipped", "OlmoConfig", clip_qkv=0.5, attention_bias=True, tie_word_embeddings=True),
    row("olmo, names of its own", "OlmoConfig", num_key_value_heads=4, convert=olmo_of_its_own),
    row("olmo2", "Olmo2Config"),
    row("olmo2 biases", "Olmo2Config", attention_bias=True, num_key_value_heads=4),
    row(
        "granite",
        "GraniteConfig",
        embedding_multiplier=12.0,
        logits_scaling=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    row("cohere", "CohereConfig", logit_scale=0.5),
    row(
        "cohere norms on heads",
        "CohereConfig",
        logit_scale=1.0,
        use_qk_norm=True,
        attention_bias=True,
    ),
    row("cohere2", "Cohere2Config", num_hidden_layers=4, sliding_window=24, logit_scale=0.25),
    row("smollm3", "SmolLM3Config", num_hidden_layers=4),
    row(
        "smollm3 windows",
        "SmolLM3Config",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=16,
    ),
)
