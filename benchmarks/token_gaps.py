"""How soon and how evenly tokens come: the gaps between those of one request after the other.

    python benchmarks/token_gaps.py                      # the embedded model
    python benchmarks/token_gaps.py --model DIR --requests 40
    python benchmarks/token_gaps.py --beside 4 --prompt 8 --pause 0.03

Requests come one at a time to an engine in its own process, without HTTP, as clients of a machine
with little to do would send them, or beside some that decode all the while. Prints the time to the
first token and the gaps between tokens, those before the last token of a request by themselves,
since much ends with it, and how many were late: by 3 ms or more than half are. Kernels use all
cores, so whoever brings a token on its way has to be given one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time

from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM
from quire.params import RequestOutputKind, SamplingParams

LATE = 3.0
"""Milliseconds."""


async def gaps_of(llm: AsyncLLM, name: str, prompt: int, output: int) -> list[float]:
    """Milliseconds to the first token of one request, and from each to the next."""
    rng = random.Random(name)
    ids = [rng.randrange(10, llm.info["vocab_size"]) for _ in range(prompt)]
    params = SamplingParams(
        max_tokens=output, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
    )
    times = [time.perf_counter()]
    stream = await llm.submit({"prompt_token_ids": ids}, params, name)
    times += [time.perf_counter() async for _ in stream]
    return [1e3 * (after - before) for before, after in zip(times, times[1:], strict=False)]


async def decode_on(llm: AsyncLLM, name: str) -> None:
    """Be one of those that decode all the while."""
    for number in itertools.count():
        await gaps_of(llm, f"{name}-{number}", 8, 1500)


async def measure(options: argparse.Namespace) -> None:
    config = located(EngineConfig.from_options(model=options.model, max_model_len=2048))
    llm = await AsyncLLM.start(config)
    try:
        await llm.wait_ready()
        await gaps_of(llm, "warm-up", options.prompt, options.output)
        others = [asyncio.create_task(decode_on(llm, f"other-{i}")) for i in range(options.beside)]
        found = []
        for number in range(options.requests):
            found.append(await gaps_of(llm, f"request-{number}", options.prompt, options.output))
            await asyncio.sleep(options.pause)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    finally:
        await llm.shutdown()
    tell("first tokens", [gaps[0] for gaps in found])
    tell("last tokens", [gaps[-1] for gaps in found])
    tell("all others", [gap for gaps in found for gap in gaps[1:-1]])


def tell(what: str, gaps: list[float]) -> None:
    ordered, median = sorted(gaps), statistics.median(gaps)
    late = sum(gap > median + LATE for gap in gaps)
    marks = ", ".join(
        f"{name} {ordered[int(share * (len(ordered) - 1))]:.2f}"
        for name, share in (("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999))
    )
    print(
        f"{what:<12} {len(gaps):>6}: median {median:.2f} ms, mean {statistics.fmean(gaps):.2f}, "
        f"{marks}; {late} late ({late / len(gaps):.2%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=600, help="tokens")
    parser.add_argument("--output", type=int, default=25, help="tokens")
    parser.add_argument("--beside", type=int, default=0, help="requests that decode all the while")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between requests")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
