"""A model with windows through the whole engine: giving blocks back changes no byte, and saves
memory."""

import random
import shutil

import pytest

from hf_checkpoint import Row, build
from quire import LLM, SamplingParams
from quire.config.model import EMBEDDED_FOLDER

GEMMA = Row(
    "gemma3",
    "Gemma3TextConfig",
    {
        "vocab_size": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2047,
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "sliding_window": 24,
        "max_position_embeddings": 512,
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma3")
    build(GEMMA, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / "quire-demo" / name, path / name)
    return path


def run(folder, prompts, **options):
    """Tokens and log-probabilities of each prompt; most blocks of one request; bytes per block."""
    options = {"max_model_len": 320, "max_num_batched_tokens": 48, "max_num_seqs": 4, **options}
    with LLM(model=str(folder), **options) as llm:
        core = llm.llm_engine.core
        held = []
        step = core.step_into

        def watched(take):
            result = step(take)
            held.extend(core.kv.num_blocks_of(i) for i in core.scheduler.requests)
            return result

        core.step_into = watched
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
        answers = []
        for _ in range(2):  # the second time out of the prefix cache
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
            answers += [
                (
                    list(o.token_ids),
                    [{t: v.logprob for t, v in entry.items()} for entry in o.logprobs],
                )
                for o in (output.outputs[0] for output in outputs)
            ]
        core.scheduler.check_integrity()
        return answers, max(held), core.info.kv_cache_bytes / core.info.num_blocks, core.info


def test_groups_change_no_byte_and_save_memory(folder):
    rng = random.Random(4)
    shared = [rng.randrange(3, 2000) for _ in range(150)]
    prompts = [shared + [rng.randrange(3, 2000) for _ in range(n)] for n in (5, 40, 90, 120)]
    hybrid, blocks, size, info = run(folder, prompts)
    assert info.kv_windows == (None, 24, 24, 24, 24, 24)
    whole, all_blocks, whole_size, one = run(folder, prompts, disable_hybrid_kv_cache_manager=True)
    assert one.kv_windows == (None,)
    assert hybrid == whole
    assert blocks * size < 0.55 * all_blocks * whole_size
    crowded, _, _, _ = run(folder, prompts, num_gpu_blocks_override=56)
    assert crowded == whole
