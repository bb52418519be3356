"""How much longer a step takes that comes to new pages of the KV cache.

    python benchmarks/first_pages.py                 # the embedded model, half a minute
    python benchmarks/first_pages.py --model DIR     # for example of make_model.py

The system provides a page of memory when it is first written to, and all layers come to the end of
theirs in the same step. A thread asks for the next pages before (`worker/pages_ahead.py`). In
turns, each in a process of its own, an engine with that thread and one without run requests that
come together twice; the longest steps without prompts are printed, as recorded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.sim.lockstep import Lockstep, SimulatedEngine
from quire.sim.scenario import pool_of
from quire.worker import pages_ahead
from quire.workload.trace import read_trace

SHOWN = 6


def steps(options: argparse.Namespace, ahead: bool, results: multiprocessing.Queue) -> None:
    """Put the milliseconds of the steps without prompts into `results`."""
    if not ahead:
        pages_ahead.provide_pages = lambda address, size: False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        llm = LLM(
            options.model,
            quantization=options.quantization,
            max_model_len=2048,
            max_num_seqs=options.requests,
            record=str(path),
        )
        rng = random.Random(0)
        params = SamplingParams(max_tokens=600, ignore_eos=True, detokenize=False, seed=0)
        for _ in range(2):
            prompts = [
                {"prompt_token_ids": [rng.randrange(200) for _ in range(128)]}
                for _ in range(options.requests)
            ]
            llm.generate(prompts, params, use_tqdm=False)
        time.sleep(1)  # the recorder writes
        del llm
        trace = read_trace(path)
        config = EngineConfig.from_dict(trace.header.config)
        again = Lockstep(trace, SimulatedEngine(trace, config, pool_of(trace.header.info)))
        decodes = [s.recorded for s in again if s.shape.tokens and not s.shape.prefills]
        results.put(sorted((1e3 * each.seconds for each in decodes), reverse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--quantization", help="for example int8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for _ in range(options.runs):
        for ahead in (False, True):
            results = context.Queue()
            process = context.Process(target=steps, args=(options, ahead, results))
            process.start()
            taken = results.get()
            process.join()
            longest = ", ".join(f"{each:.0f}" for each in taken[:SHOWN])
            print(
                f"{'asked for ahead' if ahead else 'when written to':<16} median "
                f"{statistics.median(taken):.1f} ms, longest {longest} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
