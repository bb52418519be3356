"""How near decode steps are to the limit on paper, where the machine's speed changes all the time.

    python benchmarks/decode_limit.py --model DIR [--formats bf16,int8,int4,fp8,mxfp4] [--samples N]
    python benchmarks/decode_limit.py --model DIR --requests 8 --prompt 128

On a shared machine memory may be twice as fast in one second as in the next, so a whole run beside
a measurement before it says little. Here one engine for each format takes turns with short
measurements of memory and arithmetic: 8 steps, with one before and after. Only samples between
measurements that about agree count, in groups of like memory. Printed for each group: seconds of a
step, the share of it that the limit on paper is at the speeds of that moment (`quire bench
engine`), and how many times as fast as the first format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.engine.limit import decode_limit, work_of
from quire.bench.engine.options import own_options
from quire.kernels.probe import Probe, Rates

STEPS = 8
PROBE = 0.04
"""Seconds of a measurement."""
GROUP = 8.0
"""GB/s: the width of a group."""
LINE = (
    "memory about {:2.0f} GB/s: {:8} {:3} samples, {:.4f} s a step, {:.2f} of the limit, {:.2f} x"
)
SAME = 0.07
"""By how much what two measurements say of a step may differ."""


class Engine:
    """Requests that go on, a token each a step."""

    def __init__(self, form: str, options: argparse.Namespace) -> None:
        steps = STEPS * (options.samples + 2)
        tokens = options.prompt + steps + 1
        budget = max(2048, options.requests * options.prompt)
        llm = LLM(options.model, dtype="bfloat16", max_model_len=tokens,
                  max_num_batched_tokens=budget, max_num_seqs=options.requests,
                  kv_cache_memory_bytes=options.kv_mib << 20, **own_options(form))  # fmt: skip
        self._engine = llm.llm_engine
        self._work = work_of(self._engine)
        self._requests, self._seen = options.requests, options.prompt
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        for number in range(options.requests):
            # No two begin alike: none is found in the prefix cache.
            prompt = [number + 10, *range(100, 99 + options.prompt)]
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        self.seconds()

    def seconds(self) -> float:
        """Of a step, the mean of a few."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        self._seen += STEPS
        return (time.perf_counter() - start) / STEPS

    def limit(self, rates: Rates) -> float:
        """Seconds on paper of each of the last few steps."""
        return decode_limit(self._requests, self._seen - STEPS // 2, self._work, rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--formats", default="bf16,int8,int4,fp8,mxfp4")
    parser.add_argument("--samples", type=int, default=80, help="of each format")
    parser.add_argument("--requests", type=int, default=1, help="at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each")
    parser.add_argument("--kv-mib", type=int, default=256, help="of keys and values")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    forms = options.formats.split(",")
    engines = {form: Engine(form, options) for form in forms}
    probe = Probe()
    groups: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.samples):
        for form, engine in engines.items():
            before = probe.measure(PROBE)
            seconds = engine.seconds()
            after = probe.measure(PROBE)
            if abs(engine.limit(before) / engine.limit(after) - 1) < SAME:
                rates = before.mean(after)
                share = engine.limit(rates) / seconds
                groups[round(rates.read / 1e9 / GROUP)][form].append((seconds, share))
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
