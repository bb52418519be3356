"""A few families through the whole engine: prefix hits, chunks and company change nothing."""

import random
import shutil

import pytest

from hf_checkpoint import Row, build, hf_greedy
from quire import LLM, SamplingParams
from quire.config.model import EMBEDDED_FOLDER

DEMO = EMBEDDED_FOLDER / "quire-demo"
SIZES = {"vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2047}
DECODER = {**SIZES, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS = (
    Row("gpt2", "GPT2Config", {**SIZES, "n_embd": 48, "n_layer": 2, "n_head": 4}),
    Row(
        "gemma2",
        "Gemma2Config",
        {
            **DECODER,
            "intermediate_size": 80,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "max_position_embeddings": 256,
        },
    ),
    Row("bloom", "BloomConfig", {**SIZES, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    Row("gpt-bigcode", "GPTBigCodeConfig", {**SIZES, "n_embd": 48, "n_layer": 2, "n_head": 3}),
    Row("gpt-j", "GPTJConfig", {**SIZES, "n_embd": 48, "n_layer": 2, "n_head": 3, "rotary_dim": 8}),
    Row("mpt", "MptConfig", {**SIZES, "d_model": 48, "n_layers": 2, "n_heads": 3}),
    Row(
        "olmo",
        "OlmoConfig",
        {**DECODER, "intermediate_size": 80, "num_key_value_heads": 2, "clip_qkv": 1.0},
    ),
    Row(
        "falcon rw",
        "FalconConfig",
        {**DECODER, "num_attention_heads": 3, "alibi": True, "multi_query": False, "bias": True},
        attention="sdpa",
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_greedy_tokens_are_those_of_transformers(row, tmp_path):
    judge = build(row, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    rng = random.Random(row.name)
    start = [rng.randrange(3, 2000) for _ in range(50)]
    prompts = [start + [rng.randrange(3, 2000) for _ in range(n)] for n in (3, 17, 40)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"max_model_len": 128, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 24}
    with LLM(model=str(tmp_path), **options) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == hf_greedy(judge, prompt, 8)[-8:]
