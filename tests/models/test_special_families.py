"""What the shared runner does not see: ChatGLM's options, layers that are skipped, what latent
attention keeps, and what is refused."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import dense_chatglm
from hf_checkpoint import build
from paged_run import load, serve
from quire import LLM, SamplingParams
from quire.attention.kv_cache import kv_cache_bytes
from quire.config.model import EMBEDDED_FOLDER
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.models.registry import MODELS, kv_layers
from rows_moe import DEEPSEEK, GRANITE, MOE, ROUTED, SIZES, row

CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "num_layers": 2,
    "padded_vocab_size": 67,
    "vocab_size": 60,
    "hidden_size": 40,
    "ffn_hidden_size": 36,
    "kv_channels": 12,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 256,
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "torch_dtype": "float32",
}
OPTIONS = {
    "ChatGLM3": {},
    "ChatGLM3-32k": {"rope_ratio": 50},
    "all biases": {"add_bias_linear": True},
    "no biases": {"add_qkv_bias": False},
    "layer norm": {"rmsnorm": False},
    "residual of the norm": {"apply_residual_connection_post_layernorm": True},
    "no last norm": {"post_layer_norm": False},
    "head by head": {"multi_query_attention": False},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_chatglm_equals_its_formulas(tmp_path, option):
    config = {**CHATGLM, **OPTIONS[option]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = dense_chatglm.random_tensors(config)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    rng = random.Random(0)
    ids = [rng.randrange(67) for _ in range(70)]
    got = serve(load(tmp_path), [ids], rng, chunk=lambda: 23)[0]
    want = dense_chatglm.logits(config, tensors, ids)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.3


def shape_of(architecture, **entries):
    return ModelShape.from_hf_json({**SIZES, "architectures": [architecture], **entries})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding_2d": True}, "use ChatGLM2, ChatGLM3 or GLM-4"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection must be false"),
        ({"pre_seq_len": 128}, "pre_seq_len .* must be null, got 128"),
        ({"rope_ratio": "50"}, "'rope_ratio' must be a number, got '50'"),
    ],
)
def test_chatglm_refuses(changes, message):
    shape = ModelShape.from_hf_json({**CHATGLM, **changes})
    with pytest.raises(ModelLoadError, match=message):
        MODELS.get(shape.architecture).style(shape)


MPT = "MptForCausalLM"
MPT_ATTENTION = (
    ({"prefix_lm": True}, "attn_config.prefix_lm must be False, got True"),
    ({"rope": True}, "attn_config.rope must be False"),
    ({"qk_gn": True}, "attn_config.qk_gn must be False"),
    ({"sliding_window_size": 512}, "attn_config.sliding_window_size must be -1, got 512"),
    ({"attn_type": "other"}, "attn_config.attn_type must be 'multihead_attention' or"),
    ({"clip_qkv": "6"}, "'clip_qkv' must be a number above 0, got '6'"),
    ({"alibi_bias_max": 0}, "'alibi_bias_max' must be a number above 0, got 0"),
)
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (V3, {"topk_method": "greedy"}, "'topk_method' must be 'noaux_tc' .*, got 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid'"),
        (V2, {"norm_topk_prob": True}, "'norm_topk_prob' must be False"),
        (V2, {"topk_method": "noaux_tc"}, "must be 'greedy' or 'group_limited_greedy'"),
        (V3, {"n_group": 3}, r"8 experts must be a multiple of n_group \(3\)"),
        (V3, {"topk_group": 5}, r"topk_group \(5\) at most n_group"),
        (V3, {"n_group": 8}, "8 groups of 8 experts hold fewer than 2"),
        (V3, {"num_experts_per_tok": 5}, "must be at most 4, the experts .* got 5"),
        (V3, {"num_experts_per_tok": 0}, "must be an integer of at least 1, got 0"),
        (V3, {"kv_lora_rank": None}, "'kv_lora_rank' must be an integer of at least 1, got None"),
        (V3, {"routed_scaling_factor": "2"}, "'routed_scaling_factor' must be a number"),
        (V3, {"hidden_act": "sliu"}, "got 'sliu'; did you mean 'silu'"),
        ("OlmoeForCausalLM", {**ROUTED, "clip_qkv": 8.0}, "clip_qkv must be null, got 8.0"),
        *((MPT, {"attn_config": entries}, message) for entries, message in MPT_ATTENTION),
        (MPT, {"attn_config": 1}, "'attn_config' must be an object, got 1"),
        (MPT, {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config.ffn_type must be 'mptmlp'"),
        (MPT, {"norm_type": "rmsnorm"}, "norm_type must be 'low_precision_layernorm' or"),
        (MPT, {"logit_scale": "much"}, "'logit_scale' must be a number above 0, got 'much'"),
        (MPT, {"block_overrides": {"order": []}}, "block_overrides must be null"),
        ("GPTJForCausalLM", {"rotary_dim": 64}, "'rotary_dim' must be at most the head's 12"),
        ("GPTJForCausalLM", {"rotary_dim": "all"}, "'rotary_dim' must be an integer"),
        ("GPTJForCausalLM", {"rotary_dim": 3}, "must be even for rotary positions, got 3"),
        ("GPTBigCodeForCausalLM", {"add_cross_attention": True}, "add_cross_attention must be"),
        ("OlmoForCausalLM", {"clip_qkv": -1}, "'clip_qkv' must be a number above 0, got -1"),
        ("OLMoForCausalLM", {"rope": False}, "rope must be True, got False"),
        ("OLMoForCausalLM", {"layer_norm_with_affine": True}, "layer_norm_with_affine must be"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 2}, "'num_local_experts' must be"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "must be at most 2",
        ),
        ("Qwen3MoeForCausalLM", {**ROUTED, "mlp_only_layers": 1}, "must be a list of integers"),
    ],
)
def test_senseless_entries_are_refused(architecture, changes, message):
    start = DEEPSEEK if architecture in (V2, V3) else {}
    shape = shape_of(architecture, **{**start, **changes})
    with pytest.raises(ModelLoadError, match=message):
        MODELS.get(architecture).style(shape)


def test_a_latent_cache_is_as_small_as_it_can_be():
    """DeepSeek-V3 keeps 512 + 64 numbers per token and layer, not 128 * (192 + 128)."""
    entries = {**DEEPSEEK, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    shape = shape_of(V3, **entries)
    assert kv_layers(shape) == (LayerKV(1, 576, 0),) * 61
    assert kv_cache_bytes(kv_layers(shape), 1, 1, "bfloat16") == 61 * 576 * 2
    assert MODELS.get(V3).attention_features(shape) == {"latent"}


def test_queries_that_share_one_key_keep_little():
    """StarCoder 1 keeps one head of 128 keys and values per layer, not 48."""
    entries = {"n_embd": 6144, "n_head": 48, "n_layer": 40, "model_type": "gpt_bigcode"}
    gone = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    base = {k: v for k, v in SIZES.items() if k not in gone}
    for said, heads in (({}, 1), ({"multi_query": True}, 1), ({"multi_query": False}, 48)):
        config = {**base, **entries, **said, "architectures": ["GPTBigCodeForCausalLM"]}
        layers = kv_layers(ModelShape.from_hf_json(config))
        assert layers == (LayerKV(heads, 128, 128),) * 40
        assert kv_cache_bytes(layers, 1, 1, "bfloat16") == 40 * heads * 256 * 2


def test_biases_in_the_keys_are_reckoned():
    """Falcon-RW-1b: keys of 64 dimensions, one for the bias and one for pairs."""
    shape = shape_of(
        "FalconForCausalLM", alibi=True, num_attention_heads=32, num_key_value_heads=32,
        hidden_size=2048, head_dim=64,
    )  # fmt: skip
    assert kv_layers(shape) == (LayerKV(32, 66, 64),) * 3
    assert MODELS.get("FalconForCausalLM").attention_features(shape) == {"value_dim"}


def test_windows_and_sinks_are_announced():
    shape = shape_of(
        "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=7
    )
    assert [layer.window for layer in kv_layers(shape)] == [7, None, 7]
    assert MODELS.get("GptOssForCausalLM").attention_features(shape) == {"window", "sinks"}


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    deepseek = row("extra", "DeepseekV3Config", **DEEPSEEK, num_nextn_predict_layers=1)
    build(deepseek, tmp_path)
    ids = [[5, 6, 7, 8]]
    before = serve(load(tmp_path), ids, random.Random(0))[0]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 2)
    tensors["model.layers.3.mlp.experts.0.gate_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(serve(load(tmp_path), ids, random.Random(0))[0], before)
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load(tmp_path)


def test_granite_moe_under_older_and_newer_names(tmp_path):
    """Hub checkpoints, and what newer libraries have in memory."""
    build(row("granite", "GraniteMoeConfig", **GRANITE), tmp_path)
    ids = [[5, 6, 7, 8]]
    before = serve(load(tmp_path), ids, random.Random(0))[0]
    path = tmp_path / "model.safetensors"
    older = load_file(path)
    assert any("input_linear" in name for name in older)
    renames = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    newer = {}
    for name, tensor in older.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        newer[name] = tensor
    assert newer.keys() != older.keys()
    save_file(newer, path, {"format": "pt"})
    assert torch.equal(serve(load(tmp_path), ids, random.Random(0))[0], before)


def test_latents_are_served_shared_and_preempted(tmp_path):
    """Through the engine: prefixes shared and copied, a pool that does not hold all requests."""
    family = next(r for r in MOE if r.name == "deepseek v3")
    build(row("served", family.config, **{**family.kwargs, "vocab_size": 2048}), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, tmp_path / name)
    llm = LLM(
        model=str(tmp_path),
        max_model_len=64,
        num_gpu_blocks_override=12,
        block_size=8,
        max_num_batched_tokens=16,
    )
    params = SamplingParams(max_tokens=24, temperature=0)
    start = "The capital of France is Paris and the capital of"
    prompts = [start + end for end in (" Spain is", " Italy", "", " Norway is not")]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 4
