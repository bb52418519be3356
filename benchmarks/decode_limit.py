"""How near decoding one request is to the speed of memory, where that speed changes all the time.

    python benchmarks/decode_limit.py --model DIR [--formats bf16,int8,int4,fp8,mxfp4] [--samples N]

On a shared machine memory may be twice as fast in one second as in the next, so a whole run beside
a measurement before it says little. Here one engine for each format takes turns with short reads
of memory: 8 steps, with a read before and after. Only samples between reads of about the same
speed count, in groups of like speed. Printed for each group: seconds of a step, the share of
it that reading the weights alone would take at that speed, and how many times as fast as the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.engine.limit import work_of
from quire.bench.engine.options import own_options
from quire.kernels.probe import Probe

STEPS = 8
GROUP = 8.0
"""GB/s: the width of a group."""
LINE = (
    "memory about {:2.0f} GB/s: {:5} {:3} samples, {:.4f} s a step, {:.2f} of the limit, {:.2f} x"
)
SAME = 0.07
"""By how much two reads may differ."""


class Engine:
    """One request that goes on."""

    def __init__(self, model: str, form: str, steps: int) -> None:
        llm = LLM(model, dtype="bfloat16", max_model_len=17 + steps,
                  kv_cache_memory_bytes=256 << 20, **own_options(form))  # fmt: skip
        self._engine = llm.llm_engine
        self.weight_bytes = work_of(self._engine)["weight_bytes"]
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        self._engine.add_request("one", {"prompt_token_ids": list(range(10, 26))}, params)
        self.seconds()

    def seconds(self) -> float:
        """Of a step, the mean of a few."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="bf16,int8,int4,fp8,mxfp4")
    parser.add_argument("--samples", type=int, default=80, help="of each format")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    forms = options.formats.split(",")
    engines = {f: Engine(options.model, f, STEPS * (options.samples + 2)) for f in forms}
    probe = Probe()
    groups: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.samples):
        for form, engine in engines.items():
            before = probe.read_once()
            seconds = engine.seconds()
            after = probe.read_once()
            if abs(before / after - 1) < SAME:
                speed = (before + after) / 2
                share = engine.weight_bytes / speed / seconds
                groups[round(speed / 1e9 / GROUP)][form].append((seconds, share))
    found: list[tuple] = []
    for number, rows in sorted(groups.items()):
        first = None
        for form in forms:
            if len(rows[form]) < 5:
                continue
            seconds, share = (statistics.median(x) for x in zip(*rows[form], strict=True))
            first = first or seconds
            found.append((number * GROUP, form, len(rows[form]), seconds, share, first / seconds))
            print(LINE.format(*found[-1]))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
