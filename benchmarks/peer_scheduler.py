"""vLLM's own scheduler on the work of `scheduler_cost.py`: no model, no quire.

Run by the interpreter that has vLLM (0.32); reads the work's sizes as one JSON object from
standard input and prints one in the form of `scheduler_cost.py --json`.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MAX_MODEL_LEN = 8192
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""The scheduler wants a model's sizes; nothing is computed."""


def make_scheduler(folder: str, block: int, num_blocks: int, budget: int, seqs: int) -> Scheduler:
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    manager = StructuredOutputManager(config)
    return Scheduler(config, cache, manager, block_size=block, log_stats=True)


def request(name: str, prompt: list[int], hasher: Any) -> Request:
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    return Request(name, prompt, params, None, block_hasher=hasher)


def result(names: list[str]) -> ModelRunnerOutput:
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index=places, sampled_token_ids=[[7] for _ in names]
    )


def step_us(folder: str, hasher: Any, work: dict[str, Any], running: int) -> float:
    prompt, block, steps = work["prompt"], work["block"], work["steps"]
    blocks = running * ((prompt + 4 * steps) // block + 2)
    scheduler = make_scheduler(folder, block, blocks, running * prompt, running)
    names = [f"request-{i}" for i in range(running)]
    for index, name in enumerate(names):
        tokens = [index % 2000, index // 2000, *range(prompt - 2)]
        scheduler.add_request(request(name, tokens, hasher))
    times = []
    for _ in range(steps):
        tokens = result(names)
        start = time.process_time()
        batch = scheduler.schedule()
        scheduler.update_from_output(batch, tokens)
        times.append(time.process_time() - start)
    assert len(scheduler.running) == running
    return statistics.median(times[1:]) * 1e6


def admit_us(folder: str, hasher: Any, work: dict[str, Any]) -> float:
    admitted, length, block, at_once = (
        work[key] for key in ("admitted", "admitted_prompt", "block", "batch")
    )
    blocks = admitted * (length // block) + 200
    scheduler = make_scheduler(folder, block, blocks, at_once * length, admitted)
    randomness = random.Random(0)
    shared = [randomness.randrange(30000) for _ in range(length // 2)]
    prompts = [
        shared + [randomness.randrange(30000) for _ in range(length // 2)] for _ in range(admitted)
    ]
    scheduler.add_request(request("first", [*shared, 1], hasher))
    scheduler.update_from_output(scheduler.schedule(), result(["first"]))
    times = []
    for first in range(0, admitted - 1, at_once):
        chosen = prompts[first : first + at_once]
        start = time.process_time()
        for index, prompt in enumerate(chosen):
            scheduler.add_request(request(f"r{first + index}", prompt, hasher))
        batch = scheduler.schedule()
        times.append((time.process_time() - start) / len(chosen))
        new = batch.scheduled_new_reqs
        assert len(new) == len(chosen)
        assert all(r.num_computed_tokens == length // 2 for r in new)
        names = [r.req_id for r in new]
        ended = list(batch.num_scheduled_tokens)
        scheduler.update_from_output(batch, result(ended))
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    return statistics.median(times) * 1e6


def main() -> None:
    work = json.load(sys.stdin)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(work["block"], sha256)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), "utf-8")
        gc.freeze()
        steps = {str(n): round(step_us(folder, hasher, work, n), 1) for n in work["running"]}
        admission = round(admit_us(folder, hasher, work), 1)
    print(json.dumps({"step_us": steps, "admit_us_per_request": admission}))


if __name__ == "__main__":
    main()
