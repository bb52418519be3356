"""`quire plan MODEL --users 32 --context 8k`: how many users a model can serve on this machine, and
how fast, without loading it."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from quire.bench.result import summary
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.cli.simulate import records_of_run
from quire.cli.times import WHERE, add_times_flags, step_times
from quire.config import EngineConfig
from quire.config.cli import add_engine_flags, engine_config
from quire.errors import ConfigError, NotEnoughMemory, StartupError
from quire.observability.explain.wording import plural
from quire.sim.capacity import KVCapacity
from quire.sim.scenario import pool_of
from quire.sim.sequences import Sequences
from quire.sim.simulator import Simulator
from quire.sim.step_time import StepTimeModel
from quire.utils.math import cdiv, human_bytes, parse_size
from quire.workload.trace import TraceRequest

if TYPE_CHECKING:
    from quire.executor.sizing import SizedEngine

ROUNDS: Final = 3
"""Requests that each user sends in the simulation behind the expected figures."""
EPILOG = (
    "The flags are those of `quire serve`: what is told is what it would print at its start. The "
    "exit code is 0 if the users fit with the buffer, else 1. Expected figures are simulated: "
    "every user sends a request, reads the answer and sends the next. " + WHERE
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("plan", "Tell how many users a model can serve, and how fast.", epilog=EPILOG)
    parser.add_argument(
        "--users", metavar="N", type=int, default=1, help="Requests at the same time. Default: 1."
    )
    parser.add_argument(
        "--context", metavar="N", default=None,
        help="Tokens of a request, prompt and output together, such as 8k. Default: the longest.",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", metavar="N", type=int, default=None,
        help="Those that are generated. Default: a quarter, at most 256.",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", default=None,
        help="Free memory to go by, such as 16GiB. Default: what is free now.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=False, help="As JSON.")
    add_times_flags(parser)
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the plan; returns 0 if the users fit, else 1."""
    namespace = build_parser().parse(arguments)
    if namespace.users < 1:
        raise ConfigError(f"--users must be at least 1, got {namespace.users}")
    from quire.config.locate import located

    config = located(engine_config(namespace))
    report = make_plan(namespace, config)
    print(json.dumps(report, indent=2) if namespace.json else as_text(report))
    return 0 if report["fits"] else 1


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What is asked of an engine."""

    users: int
    context: int
    output_len: int
    memory: int | None

    def requests(self) -> Iterator[TraceRequest]:
        """Some rounds of all users. Outputs differ in length, so that users do not stay in step."""
        rng = random.Random(0)
        for _ in range(ROUNDS * self.users):
            output = max(1, round(self.output_len * rng.uniform(0.5, 1.5)))
            output = min(output, self.context - 1)
            yield TraceRequest(0.0, max(1, self.context - output), output)


def make_plan(namespace: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """The plan, as plain data.

    Raises:
        StartupError: an engine could not start with the configuration, whatever the memory.
    """
    from quire.executor.sizing import size_engine

    memory = None if namespace.memory is None else read_memory(namespace.memory)
    resolved, _ = config.resolve(config.model.read_shape())
    longest = resolved.model.max_model_len
    assert longest is not None, "resolve() settles it"
    load = _load(namespace, longest, memory)
    base: dict[str, Any] = {
        "model": config.model.model,
        "users": load.users,
        "context": load.context,
        "output_len": load.output_len,
        "memory": memory,
    }
    try:
        sized = size_engine(config, memory)
    except NotEnoughMemory as error:
        tried = alternatives(config, load, None)
        return base | {"fits": False, "problem": error.message, "alternatives": tried}
    if not sized.info.kv_cache_bytes:
        raise ConfigError(
            f"{config.model.model} keeps nothing per token, so there is no KV cache to plan: its "
            "concurrency is --max-num-seqs, and `quire inspect` tells its size"
        )
    fits, problem = judge(sized, load)
    report = base | figures(sized, load) | {"fits": fits, "problem": problem}
    report["alternatives"] = [] if fits else alternatives(config, load, sized)
    times = step_times(namespace, config, sized=sized)
    # What does not fit would be simulated queueing, for as long as there are users.
    report["expected"] = expected(sized, load, times) if fits and times is not None else None
    return report


def read_memory(text: str) -> int:
    """Read a size such as `16GiB`, `16G` or a number of bytes.

    Raises:
        ConfigError: it is none.
    """
    try:
        size = parse_size(text.strip().removesuffix("iB").removesuffix("B").strip())
    except ConfigError:
        size = 0
    if size < 1:
        raise ConfigError(f"--memory must be a size such as 16GiB, got {text!r}")
    return size


def _load(namespace: argparse.Namespace, longest: int, memory: int | None) -> PlannedLoad:
    context = longest
    if namespace.context is not None:
        try:
            context = parse_size(namespace.context)
        except ConfigError:
            raise ConfigError(
                f"--context must be a number of tokens, got {namespace.context!r}"
            ) from None
    if not 2 <= context <= longest:
        raise ConfigError(
            f"--context must be 2 to {longest}, the longest request of this engine "
            f"(--max-model-len), got {context}"
        )
    output = namespace.output_len
    if output is None:
        output = max(1, min(256, context // 4))
    if not 1 <= output < context:
        raise ConfigError(f"--output-len must be 1 to {context - 1}, got {output}")
    return PlannedLoad(namespace.users, context, output, memory)


def judge(sized: SizedEngine, load: PlannedLoad) -> tuple[bool, str]:
    """Whether the users fit with the buffer, and if not, why not."""
    capacity = KVCapacity(sized.kv_tokens, load.context)
    seats = sized.config.scheduler.max_num_seqs
    if load.users > seats:
        return False, f"{load.users} users are more than --max-num-seqs {seats}"
    if load.users > capacity.maximum:
        held = plural(capacity.maximum, "request")
        return False, f"the KV cache holds {held} of {load.context:,} tokens"
    if load.users > capacity.recommended:
        return False, f"{load.users} users fit only without the buffer ({capacity.recommended})"
    return True, ""


def figures(sized: SizedEngine, load: PlannedLoad) -> dict[str, Any]:
    """Sizes of an engine, and what they mean for a load."""
    info, capacity = sized.info, KVCapacity(sized.kv_tokens, load.context)
    return {
        "device": info.place,
        "dtype": info.dtype,
        "weight_bytes": info.weight_bytes,
        "kv_bytes_per_token": sized.kv_bytes_per_token,
        "kv_cache_bytes": info.kv_cache_bytes,
        "kv_tokens": sized.kv_tokens,
        "num_blocks": info.num_blocks,
        "max_model_len": info.max_model_len,
        "max_num_seqs": sized.config.scheduler.max_num_seqs,
        "start_up": sized.lines,
        "maximum_concurrency": capacity.maximum,
        "recommended_concurrency": capacity.recommended,
        "formula": capacity.formula(),
    }


def expected(sized: SizedEngine, load: PlannedLoad, times: StepTimeModel) -> dict[str, Any]:
    """What a simulation of the users gives."""
    simulator = Simulator(sized.config, pool_of(sized.info.to_dict()), times)
    with CommandProgress(patience=1.0) as progress:
        requests = progress.through("requests", load.requests(), ROUNDS * load.users)
        run = simulator.run_closed(requests, load.users, Sequences((), 16))
    found = summary(records_of_run(run), run.duration, metrics=("ttft", "tpot"))
    names = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
    return {name: found[name] for name in names} | {
        "preemptions": run.num_preemptions,
        "step_times": times.about,
    }


def _changes(
    config: EngineConfig, load: PlannedLoad, sized: SizedEngine | None
) -> Iterator[tuple[str, EngineConfig, PlannedLoad]]:
    """What could help, not yet verified."""
    wider = config
    if load.users > config.scheduler.max_num_seqs:
        scheduler = replace(config.scheduler, max_num_seqs=load.users)
        wider = replace(config, scheduler=scheduler)
        yield f"--max-num-seqs {load.users}", wider, load
    extra = "" if wider is config else f"--max-num-seqs {load.users} "
    if sized is not None:
        needed = KVCapacity(1, load.context).tokens_needed(load.users)
        size = sized.info.block_size
        # Whole blocks, and the null block.
        wanted = math.ceil((cdiv(needed, size) + 1) * size * sized.kv_bytes_per_token)
        cache = replace(wider.cache, kv_cache_memory_bytes=wanted, num_gpu_blocks_override=None)
        yield f"{extra}--kv-cache-memory-bytes {wanted}", replace(wider, cache=cache), load
    if config.cache.kv_cache_dtype == "auto":
        cache = replace(wider.cache, kv_cache_dtype="fp8")
        yield f"{extra}--kv-cache-dtype fp8", replace(wider, cache=cache), load
    if sized is None or sized.info.weight_bytes > sized.info.kv_cache_bytes:
        yield from _smaller_weights(wider, load, extra)
    if sized is not None:
        fewer = KVCapacity(sized.kv_tokens, load.context).recommended
        fewer = min(fewer, config.scheduler.max_num_seqs)
        if fewer:
            text = f"{plural(fewer, 'user')} instead of {load.users}"
            yield text, config, replace(load, users=fewer)
        context = KVCapacity(sized.kv_tokens, load.users).recommended
        if 2 <= context < load.context:
            shorter = replace(load, context=context, output_len=min(load.output_len, context - 1))
            yield f"{extra}and requests of {context:,} tokens".removeprefix("and "), wider, shorter
    else:
        for length in (load.context, load.context // 2, load.context // 4):
            if length < 2:
                continue  # no room for a prompt and a token
            model = replace(config.model, max_model_len=length)
            output = min(load.output_len, length - 1)
            shorter = replace(load, context=length, output_len=output)
            yield f"--max-model-len {length}", replace(config, model=model), shorter


def _smaller_weights(
    config: EngineConfig, load: PlannedLoad, extra: str
) -> Iterator[tuple[str, EngineConfig, PlannedLoad]]:
    """Formats for a checkpoint that has none; others refuse them."""
    if config.model.quantization is not None or config.model.quantization_config:
        return
    for scheme in ("int8", "int4"):
        model = replace(config.model, quantization=scheme)
        yield f"{extra}--quantization {scheme}", replace(config, model=model), load


def alternatives(config: EngineConfig, load: PlannedLoad, sized: SizedEngine | None) -> list[str]:
    """Changes with which the users fit: each was sized like the engine itself."""
    from quire.executor.sizing import size_engine

    found = []
    for text, changed, asked in _changes(config, load, sized):
        try:
            if judge(size_engine(changed, load.memory), asked)[0]:
                found.append(text)
        except StartupError:
            continue
    return found


def as_text(report: dict[str, Any]) -> str:
    """The plan for a reader."""
    lines = [(name, text) for name, text in _sizes(report) if text]
    asked, fit = f"{report['users']} users of {report['context']:,} tokens each", "they fit"
    if report["users"] == 1:
        asked, fit = f"1 user of {report['context']:,} tokens", "fits"
    lines.append(("verdict", f"{asked}: {fit if report['fits'] else report['problem']}"))
    lines += [("instead", text) for text in report["alternatives"]]
    if not report["fits"] and not report["alternatives"]:
        lines.append(("instead", "nothing that was tried helps: more memory, or a smaller model"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _sizes(report: dict[str, Any]) -> list[tuple[str, str]]:
    if "kv_tokens" not in report:
        return [("model", report["model"])]
    lines = [
        ("model", f"{report['model']} in {report['dtype']} on {report['device']}"),
        ("weights", human_bytes(report["weight_bytes"])),
        ("KV cache", f"{human_bytes(report['kv_bytes_per_token'])} per token, "
         f"{human_bytes(report['kv_cache_bytes'])} in all"),
        *(("start-up", line) for line in report["start_up"]),
        ("concurrency", report["formula"]),
    ]  # fmt: skip
    said = report["expected"]
    if not report["fits"]:
        return lines
    if said is None:
        return [*lines, ("expected", "not known: run `quire calibrate`, or give --memory-gb-s and "
                         "--gflops")]  # fmt: skip
    return [
        *lines,
        ("expected", f"{said['output_throughput']:,.0f} tok/s, TTFT {said['mean_ttft_ms']:,.0f} ms "
         f"(p99 {said['p99_ttft_ms']:,.0f}), TPOT {said['mean_tpot_ms']:,.1f} ms "
         f"(p99 {said['p99_tpot_ms']:,.1f}), by {said['step_times'].get('source', 'a file')}"),
    ]  # fmt: skip
