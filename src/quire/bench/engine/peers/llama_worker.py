"""llama.cpp in a process: loads a GGUF file, then runs each case it is sent.

    python llama_worker.py MODEL.gguf split|unified

`unified`: all sequences share one buffer of keys and values; `split`: each has its own. Uses the
library's own calls, without its Python classes, so that nothing but llama.cpp is measured: prompts
in batches of up to 512 tokens, then one step per token for all sequences, greedy by its own
sampler. Keys and values are f16, which is its default and was faster than bf16.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import llama_cpp as lib

BATCH = 512


class Runner:
    """A model, and a context for each case."""

    def __init__(self, path: str, setting: str) -> None:
        self._is_unified = setting == "unified"
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        self._greedy = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[tuple[int, int], Any] = {}

    def run(self, job: dict[str, int]) -> float:
        """Seconds for a case; making its context is not counted."""
        sequences, length = job["prompts"], job["in"] + job["out"]
        context = self._contexts.get((sequences, length))
        if context is None:
            context = self._contexts[sequences, length] = self._open(sequences, length)
            self._generate(context, _prompts(job), 2)  # touches the memory
        prompts = _prompts(job)
        start = time.perf_counter()
        self._generate(context, prompts, job["out"])
        return time.perf_counter() - start

    def _open(self, sequences: int, length: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = -(-sequences * length // 256) * 256
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.kv_unified = self._is_unified
        cores = len(os.sched_getaffinity(0))
        params.n_threads = params.n_threads_batch = cores
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return lib.llama_init_from_model(self._model, params)

    def _generate(self, context: Any, prompts: list[list[int]], outputs: int) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        last: list[int] = []
        entries = [
            (token, place, row, place == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for first in range(0, len(entries), BATCH):
            last += self._step(context, entries[first : first + BATCH])
        for place in range(len(prompts[0]), len(prompts[0]) + outputs - 1):
            last = self._step(context, [(t, place, row, True) for row, t in enumerate(last)])

    def _step(self, context: Any, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run tokens of (id, position, sequence, is the next one wanted); returns the next ones."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, place, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if lib.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        return [
            lib.llama_sampler_sample(self._greedy, context, i)
            for i, entry in enumerate(entries)
            if entry[3]
        ]


def _prompts(job: dict[str, int]) -> list[list[int]]:
    numbers = random.Random(job["seed"])
    low, high = min(10, job["vocab"] // 2), min(8000, job["vocab"])
    return [[numbers.randrange(low, high) for _ in range(job["in"])] for _ in range(job["prompts"])]


def main() -> None:
    """Say what runs, then run what is asked."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    path, setting = sys.argv[1:]
    runner = Runner(path, setting)
    about = {
        "llama_cpp": lib.__version__,
        "build": lib.llama_print_system_info().decode(),
        "python": sys.version.split()[0],
        "settings": f"kv_unified={setting == 'unified'} threads={len(os.sched_getaffinity(0))} "
        f"batch={BATCH} flash_attn=on keys and values f16",
    }
    answers.write(json.dumps(about) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps({"seconds": runner.run(json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
