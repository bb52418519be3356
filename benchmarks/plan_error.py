"""How far `quire plan` is from the engine: its sizes, and what it expects for some users.

    python benchmarks/plan_error.py                 # the embedded model, about 3 minutes
    python benchmarks/plan_error.py --model DIR     # for example of make_model.py
    python benchmarks/plan_error.py --step-times FILE --users 4 16

As many users as given, each with requests of `--context` tokens of which `--output-len` are output,
send their next request when they have the answer to the last: in a simulation, as `quire plan`
does, and to a live engine (a core in its own process, without HTTP). Calibrations run before and
after the live engine, unless `--step-times` names a file of `quire calibrate`, because a machine
that others share is not as fast in one minute as in the next. Prints what was predicted and
measured; exit code 1 if the throughput is more than 15 % off or a size is not the engine's. The
machine should do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from quire.bench.live_trace import timed
from quire.bench.result import RequestRecord, summary
from quire.cli.plan import PlannedLoad, expected
from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM
from quire.engine.calibration import Calibration
from quire.executor.sizing import SizedEngine, size_engine
from quire.sim.sequences import Sequences
from quire.sim.step_time import StepTimeModel
from quire.utils.timing import RealClock

WANTED = 15.0
"""Percent that the throughput may be off."""
FIGURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")


async def live(llm: AsyncLLM, load: PlannedLoad, name: str) -> dict:
    """The load on an engine."""
    coming = enumerate(list(load.requests()))
    sequences = Sequences((), 16, llm.info["vocab_size"])
    clock = RealClock()
    begun = clock.now()
    records: list[RequestRecord] = []

    async def user() -> None:
        for number, traced in coming:
            prompt = sequences.make(traced)[0]
            records.append(await timed(llm, traced, prompt, f"{name}-{number}", begun))

    await asyncio.gather(*(user() for _ in range(load.users)))
    return summary(records, clock.now() - begun)


async def compare(config: EngineConfig, sized: SizedEngine, options: argparse.Namespace) -> bool:
    """Print rows; whether all is as it should be."""
    calibration = Calibration(config, options.seconds, lambda what, share: None)
    calibrated = [] if options.step_times else [await calibration.measure()]
    loads = [
        PlannedLoad(users, options.context, options.output_len, None) for users in options.users
    ]
    llm = await AsyncLLM.start(config)
    try:
        await llm.wait_ready()
        same = llm.info["num_blocks"] == sized.info.num_blocks
        print(f"KV blocks: predicted {sized.info.num_blocks}, engine {llm.info['num_blocks']}")
        lives = []
        for load in loads:
            await llm.reset_prefix_cache()
            lives.append(await live(llm, load, str(load.users)))
    finally:
        await llm.shutdown()
    if options.step_times:
        times = StepTimeModel.read(options.step_times)
    else:
        times = calibration.fitted([*calibrated, await calibration.measure()])
    print(f"{'users':<8}" + "".join(f"{name.removesuffix('_ms'):>26}" for name in FIGURES))
    for load, measured in zip(loads, lives, strict=True):
        made = expected(sized, load, times)
        errors = {name: 100 * (made[name] / measured[name] - 1) for name in FIGURES}
        same &= abs(errors["output_throughput"]) <= WANTED
        cells = (f"{measured[n]:>10.1f} {made[n]:>8.1f} {errors[n]:>+5.0f}%" for n in FIGURES)
        print(f"{load.users:<8}" + "".join(cells))
    print(f"measured, predicted, error; wanted: throughput within {WANTED:g} %")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--step-times", help="use these instead of calibrating")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each calibration")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    options = parser.parse_args()
    config = located(
        EngineConfig.from_options(model=options.model, max_model_len=2048, max_num_seqs=64)
    )
    return 0 if asyncio.run(compare(config, size_engine(config), options)) else 1


if __name__ == "__main__":
    sys.exit(main())
