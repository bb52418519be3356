"""Schemes of weights x types of keys and values x ways to compute: requests together against each
alone, bit for bit. Every pair of values of the table is in some row; a case is one row."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import wishes
from fuzz_kit import cases
from mixed import facts
from pairwise import covering_rows
from plain_text import FOLDER
from quantised_writers import FORMATS, checkpoint
from quire import LLM, SamplingParams
from quire.config.kv_groups import blocks_per_request
from test_mixes import CONTEXT, WINDOWED, Mix, check_beginning

CROWD = 14
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": wishes.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2047,
}
NAMED = {
    "linear": "int4",
    "group_size": 64,
    "ignore": ["re:.*layers.0."],
    "targets": {"re:.*down_proj": "fp8_per_block"},
}
"""Neighbours of different schemes."""
ONLINE: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "named": {"quantization": "online", "quantization_config": NAMED},
    **{
        name: {"quantization": name}
        for name in ("int8", "int4", "int8_weight_only", "fp8_per_channel", "mxfp8", "mxfp4")
    },
}
EXPERTS = {"experts": {"quantization": "nvfp4_per_token"}}
STORED = ("gptq 4 desc_act", "gptq 3", "awq gemm", "ct int8", "ct nvfp4", "ct fp8 block", "bnb nf4")
TABLE: dict[str, tuple[Any, ...]] = {
    "weights": (*ONLINE, *STORED),
    "kv_cache_dtype": ("auto", "float16", "fp8", "fp8_e5m2", "int8_per_token_head"),
    "model": ("demo", "windowed", "mixture"),
    "w4a8": ("1", "0"),
    "memory": ("ample", "recompute", "swap", "auto"),
    "enable_prefix_caching": (True, False),
    "max_num_batched_tokens": (16, 100, 2048),
    "block_size": (8, 16, 32),
    "kv_cache_dtype_skip_layers": (None, ["0"]),
}
ROWS = covering_rows(TABLE, random.Random(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each model and of each quantised checkpoint."""
    found: dict[str, Path] = {}
    for name, config in (("windowed", WINDOWED), ("mixture", MIXTURE)):
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(config), "utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(FOLDER / file, found[name] / file)
    return found


def model_of(row: dict[str, Any], folders: dict[str, Path], make: Any) -> dict[str, Any]:
    """Options that load a row's weights. Stored ones are of the embedded model."""
    weights = row["weights"]
    if weights in STORED:
        if weights not in folders:
            folders[weights] = checkpoint(make.mktemp("stored"), FORMATS[weights](), layers=2)[1]
        return {"model": str(folders[weights])}
    if row["model"] == "demo":
        return dict(ONLINE[weights])
    if row["model"] == "mixture" and weights == "named":
        weights = "experts"
    return {
        "model": str(folders[row["model"]]),
        "load_format": "dummy",
        **(ONLINE | EXPERTS)[weights],
    }


def ways_of(row: dict[str, Any], rng: random.Random, folder: Path) -> dict[str, Any]:
    """How a crowd is computed."""
    budget, size = row["max_num_batched_tokens"], row["block_size"]
    options: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, rng.choice([3, 8, 20])),
        "block_size": size,
        "enable_prefix_caching": row["enable_prefix_caching"],
    }
    if row["memory"] != "ample":
        options["num_gpu_blocks_override"] = 1 + blocks_per_request([None], CONTEXT, budget, size)
        if row["model"] == "windowed" and row["weights"] not in STORED:
            options["disable_hybrid_kv_cache_manager"] = True
        options |= {"swap_space": 0.02, "preemption_mode": row["memory"]}
        if rng.random() < 0.3:
            options["swap_dir"] = str(folder)
    return options


@cases(4)
def test_together_as_alone(
    rng: random.Random,
    fuzz_number: int,
    folders: dict[str, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = ROWS[fuzz_number % len(ROWS)]
    monkeypatch.setenv("QUIRE_CPU_INT4_W4A8", row["w4a8"])
    options = model_of(row, folders, tmp_path_factory) | {
        "max_model_len": CONTEXT,
        "kv_cache_dtype": row["kv_cache_dtype"],
    }
    if row["kv_cache_dtype_skip_layers"] is not None and row["kv_cache_dtype"] != "auto":
        options["kv_cache_dtype_skip_layers"] = row["kv_cache_dtype_skip_layers"]
    ways = ways_of(row, rng, tmp_path)
    with LLM(**options, **ways) as llm:
        mix = Mix(rng, llm)
        mix.count = CROWD
        mix.run()
        scheduler = llm.llm_engine.core.scheduler
        scheduler.check_integrity()
        assert scheduler.kv.usage == 0.0
    with LLM(**options, enable_prefix_caching=False) as llm:
        for request_id, (prompt, wish) in mix.asked.items():
            got, where = mix.last.get(request_id), f"{request_id} of {row} under {ways}: {wish}"
            if got is None:
                assert request_id in mix.aborted, where
                continue
            params = SamplingParams(**(wish | {"seed": got.seed}))
            whole = llm.generate([prompt], params, use_tqdm=False)[0]
            if request_id in mix.aborted:
                check_beginning(got, whole)
            else:
                assert facts(got) == facts(whole), where
