"""How long one batch takes from its submission to its last token: `quire bench latency`.

Text and JSON are those of `vllm bench latency`. Prefix caching is off unless it is asked for, so
that every repetition computes its prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from quire.bench.offline.drive import Drive, Job, check_context, random_prompts
from quire.bench.offline.options import LatencyOptions
from quire.engine.llm import LLM
from quire.params import SamplingParams

PERCENTAGES: Final = (10, 25, 50, 75, 90, 99)


def measure_latency(
    llm: LLM, options: LatencyOptions, seen: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Repeat the batch.

    Args:
        llm: The engine.
        options: What to run.
        seen: Called with (what, done, total) after each repetition.

    Returns:
        `avg_latency` and `latencies` in seconds, and `percentiles` of them by their number as
        text; with `profile`, none of these, but the trace's folder is told in the log.

    Raises:
        ConfigError: the lengths do not fit the model's context, or no profiler folder is set.
    """
    engine = llm.llm_engine
    limit = engine.config.model.max_model_len
    assert limit is not None, "resolve() settles it"
    check_context(options.input_len, options.output_len, limit, "a prompt of the batch")
    rng = np.random.default_rng(options.seed)
    vocab = engine.core.info.vocab_size
    prompts = random_prompts(options.batch_size, options.input_len, vocab, rng)
    once = (
        _beam_once(llm, prompts, options)
        if options.use_beam_search
        else _once(llm, prompts, options)
    )
    seen("Warm-up iterations", 0, options.num_iters_warmup)
    for number in range(options.num_iters_warmup):
        once()
        seen("Warm-up iterations", number + 1, options.num_iters_warmup)
    if options.profile:
        llm.start_profile()
        once()
        llm.stop_profile()
        return {}
    latencies = []
    seen("Profiling iterations", 0, options.num_iters)
    for number in range(options.num_iters):
        latencies.append(once())
        seen("Profiling iterations", number + 1, options.num_iters)
    return latency_result(latencies)


def _once(llm: LLM, prompts: Sequence[list[int]], options: LatencyOptions) -> Callable[[], float]:
    params = SamplingParams(
        n=options.n, temperature=1.0, top_p=1.0, ignore_eos=True, seed=options.seed,
        max_tokens=options.output_len, detokenize=not options.disable_detokenize,
    )  # fmt: skip
    jobs = [Job(prompt, params) for prompt in prompts]
    return lambda: Drive(llm.llm_engine, jobs).run().duration


def _beam_once(
    llm: LLM, prompts: Sequence[list[int]], options: LatencyOptions
) -> Callable[[], float]:
    from quire.engine.frontend.beam_params import BeamSearchParams

    params = BeamSearchParams(beam_width=options.n, max_tokens=options.output_len, ignore_eos=True)
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]

    def once() -> float:
        start = time.perf_counter()
        llm.beam_search(given, params)
        return time.perf_counter() - start

    return once


def latency_result(latencies: Sequence[float]) -> dict[str, Any]:
    """The JSON of these latencies, in seconds. Percentiles interpolate linearly."""
    values = np.asarray(latencies, dtype=np.float64)
    found = np.percentile(values, PERCENTAGES)
    return {
        "avg_latency": float(np.mean(values)),
        "latencies": [float(value) for value in values],
        "percentiles": {str(p): float(v) for p, v in zip(PERCENTAGES, found, strict=True)},
    }


def latency_text(result: dict[str, Any]) -> str:
    """The lines of `vllm bench latency`."""
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    lines += [f"{p}% percentile latency: {v} seconds" for p, v in result["percentiles"].items()]
    return "\n".join(lines)
