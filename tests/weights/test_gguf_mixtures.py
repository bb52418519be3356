"""Mixtures and Gemma 2 and 3 as GGUF files, laid out as llama.cpp's converter does, against
transformers' models with the very numbers that the files hold."""

import dataclasses
import random
import re

import gguf
import pytest
import torch

from gguf_files import write_model
from hf_checkpoint import build, hf_logits
from paged_run import serve
from quantised_writers import DEMO
from quire import LLM, SamplingParams
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.models.registry import load_model
from quire.weights.dummy import TINY
from quire.weights.gguf import GGUFCheckpoint
from rows_dense import DENSE
from rows_moe import MOE

ROWS = {row.name: row for row in (*DENSE, *MOE)}
BLOCKS_FIT = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
              "shared_expert_intermediate_size": 32, "head_dim": 16}  # fmt: skip
KINDS = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "granite": ("granite", {}),
    "mixtral": ("llama", {}),
    "qwen2 moe": ("qwen2moe", {"decoder_sparse_step": 1}),
    "qwen3 moe": ("qwen3moe", {}),
    "olmoe": ("olmoe", {}),
    "granite moe": ("granitemoe", {}),
    "glm4 moe norms": ("glm4moe", {}),
    "gpt-oss": ("gpt-oss", {}),
}
"""Row of `rows_*.py` to architecture, and what of the row the files cannot say."""
NAMES = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.pre_feedforward_layernorm\.", ".ffn_norm."),
    (r"\.post_feedforward_layernorm\.", ".post_ffw_norm."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.([qkv])_(proj|norm)\.", r".attn_\1_\2."),
    (r"\.attn_([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.sinks$", ".attn_sinks.weight"),
    (r"\.(mlp|block_sparse_moe)\.(gate|router|router\.layer)\.(weight|bias)$", r".ffn_gate_inp.\3"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".exp_probs_b.bias"),
    (r"\.mlp\.shared_expert_gate\.", ".ffn_gate_inp_shexp."),
    (r"\.mlp\.shared_experts?\.(gate|up|down)_proj\.", r".ffn_\1_shexp."),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
    (r"\.mlp\.experts\.(gate_up|down)_proj_bias$", r".ffn_\1_exps.bias"),
    (r"\.mlp\.experts\.(gate_up|down)_proj$", r".ffn_\1_exps.weight"),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
)


def tensors_of(model, arch):
    """(GGUF's name, the model's own memory as GGUF lays it out) of every tensor."""
    tied = model.config.tie_word_embeddings
    after = ".post_attention_norm." if arch[:5] in ("gemma", "gpt-o", "glm4m") else ".ffn_norm."
    kept = {name for name, _ in model.named_buffers() if name.endswith("correction_bias")}
    kept |= {name for name, _ in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        if name not in kept or (tied and name == "lm_head.weight"):
            continue
        name = re.sub(r"\.post_attention_layernorm\.", after, name)
        for pattern, better in NAMES:
            name = re.sub(pattern, better, name)
        if "_exps" in name and arch == "gpt-oss" and name.endswith("weight"):
            tensor = tensor.transpose(1, 2)
        if "ffn_gate_up_exps" not in name:
            yield name, tensor
            continue
        half = tensor.shape[1] // 2
        in_turns = arch == "gpt-oss"
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if in_turns else tensor.split(half, 1)
        yield name.replace("gate_up", "gate"), gate
        yield name.replace("gate_up", "up"), up


def interleaved(rows, heads):
    """What the converter does to queries and keys of models with rotary positions."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


@torch.no_grad()
def write(model, path, arch, kind):
    """Write a model's numbers, rounded to `kind`; the model has the rounded ones afterwards."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    add_sizes(writer, config, arch)
    plain, wanted = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[kind]
    expected = {}
    for name, tensor in tensors_of(model, arch):
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            writer.add_tensor(name, (tensor + 1).numpy())
            tensor.copy_((tensor + 1) - 1)
            continue
        if tensor.dim() == 1 or "_inp" in name or name.endswith("bias"):
            writer.add_tensor(name, tensor.squeeze().contiguous().numpy())
            continue
        own = wanted if tensor.shape[-1] % 32 == 0 and wanted != plain else plain
        packed = gguf.quants.quantize(tensor.contiguous().numpy(), own)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, own)))
        expected[name] = tensor
        turned = re.search(r"attn_([qk])\.", name)
        if turned and arch in ("llama", "granite", "granitemoe"):
            heads = config.num_attention_heads if turned[1] == "q" else config.num_key_value_heads
            packed = interleaved(packed, heads)
        writer.add_tensor(name, packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_sizes(writer, config, arch):
    """The metadata, as the converter writes it."""
    said = config.to_dict()
    ropes = said.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if said.get("head_dim"):
        writer.add_key_length(config.head_dim)
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for entry, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if said.get(entry):
            add(said[entry])
    experts = [
        said[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if n in said
    ]
    if experts:
        writer.add_expert_count(experts[0])
    if arch == "glm4moe":
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def made(name, kind, folder, **more):
    """transformers' model and the file of it."""
    arch, changes = KINDS[name]
    row = ROWS[name]
    known = {
        k: v for k, v in BLOCKS_FIT.items() if k != "head_dim" or not name.startswith("granite")
    }
    sizes = known if kind != "F32" else {}
    row = dataclasses.replace(row, kwargs={**row.kwargs, **sizes, **changes, **more})
    judge = build(row, folder / "plain", torch.bfloat16)
    return judge, write(judge, folder / "model.gguf", arch, kind)


def our_name(name):
    """Of a matrix in the file under Hugging Face's name, `*` for an expert."""
    for pattern, better in (
        (r"^token_embd\.", "model.embed_tokens."),
        (r"^output\.", "lm_head."),
        (r"^blk\.", "model.layers."),
        (r"\.attn_output\.", ".self_attn.o_proj."),
        (r"\.attn_([qkv])\.", r".self_attn.\1_proj."),
        (r"\.ffn_(gate|up|down)_exps\.", r".mlp.experts.*.\1_proj."),
        (r"\.ffn_(gate|up|down)_shexp\.", r".mlp.shared_expert.\1_proj."),
        (r"\.ffn_(gate|up|down)\.", r".mlp.\1_proj."),
    ):
        name = re.sub(pattern, better, name)
    return name


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, ("Q8_0", "Q4_0", "Q5_1")[i % 3]) for i, name in enumerate(KINDS)),
     *((name, "F32") for name in ("gemma2", "gemma3", "granite moe", "gpt-oss"))],
)  # fmt: skip
def test_logits_are_those_of_transformers(name, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", "0")  # activations as they are
    judge, tensors = made(name, kind, tmp_path)
    path = tmp_path / "model.gguf"
    with GGUFCheckpoint(path) as checkpoint:
        for theirs, tensor in tensors.items():
            ours = our_name(theirs)
            for i, each in enumerate(tensor if "*" in ours else [tensor]):
                read = checkpoint.read(ours.replace("*", str(i)))
                assert torch.equal(read, each), (theirs, i)
    model = load_model(ModelShape.from_folder(path), path, "float32", "cpu")
    rng = random.Random(name)
    ids = [rng.randrange(3, 101) for _ in range(90)]
    got = serve(model, [ids], rng)[0].log_softmax(-1)
    want = hf_logits(judge, ids)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want.log_softmax(-1), atol=1e-4, rtol=0)


def test_what_the_file_does_not_say_of_gemma(tmp_path):
    """The largest Gemma 2 scales scores by another size; a list says which layers have windows."""
    config = {**TINY, "num_hidden_layers": 46, "head_dim": 16, "hidden_size": 96,
              "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 64}  # fmt: skip
    pattern = [i % 3 == 0 for i in range(46)]
    write_model(tmp_path / "m.gguf", config, "gemma2",
                gemma2__attention__sliding_window_pattern=pattern)  # fmt: skip
    raw = ModelShape.from_folder(tmp_path).raw
    assert raw["query_pre_attn_scalar"] == 96 // 4 and raw["sliding_window"] == 4096
    kinds = {True: "sliding_attention", False: "full_attention"}
    assert raw["layer_types"] == [kinds[windowed] for windowed in pattern]


def test_experts_of_several_types_in_the_engine(tmp_path):
    """Same bytes alone and in a crowd, with activations of 8 bits."""
    judge, _ = made("qwen3 moe", "Q4_0", tmp_path, vocab_size=2048)
    path = tmp_path / "model.gguf"
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 2048) for _ in range(n)]} for n in (5, 40, 9)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), tokenizer=str(DEMO), max_model_len=128) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
    ids = [out.outputs[0].token_ids for out in together]
    assert ids == [out.outputs[0].token_ids for out in alone]
    assert len({tuple(each) for each in ids}) == 3


def test_experts_that_cannot_be(tmp_path):
    made("mixtral", "F32", tmp_path)
    raw = (tmp_path / "model.gguf").read_bytes()
    at = raw.index(b"llama.expert_count") + len(b"llama.expert_count") + 4
    assert raw[at] == 6
    (tmp_path / "model.gguf").write_bytes(raw[:at] + b"\x07" + raw[at + 1 :])
    with pytest.raises(ModelLoadError, match=r"blk.0.ffn_\w+_exps.weight' must have 3 dimensions, "
                       r"the first of them expert_count \(7\); it has the shape \[6,"):  # fmt: skip
        GGUFCheckpoint(tmp_path / "model.gguf")
    write_model(tmp_path / "q.gguf", {**TINY, "hidden_size": 64}, "qwen2", qwen2__expert_count=8)
    with pytest.raises(ModelLoadError, match="GGUF files of qwen2 with experts are not read"):
        ModelShape.from_folder(tmp_path / "q.gguf")
