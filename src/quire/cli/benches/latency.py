"""`quire bench latency`: how long one batch takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.bench.offline.options import LatencyOptions
from quire.cli.benches.flags import bench_parser, check_writable, llm_options, write_json
from quire.cli.option_flags import options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress

HELP: Final = {
    "input_len": "Tokens of each prompt.",
    "output_len": "Tokens of each completion.",
    "batch_size": "Prompts that are submitted together.",
    "n": "Completions of each prompt; with beam search, beams.",
    "use_beam_search": "Search with beams instead of sampling.",
    "num_iters_warmup": "Repetitions that do not count.",
    "num_iters": "Repetitions that count.",
    "disable_detokenize": "Leave the text out: tokens only.",
    "profile": "Record one repetition with torch's profiler (QUIRE_TORCH_PROFILER_DIR says where) "
    "instead of timing.",
}


def build_parser() -> Parser:
    """The parser of this command."""
    about = "Measure how long one batch takes, from submission to its last token."
    return bench_parser("latency", about, LatencyOptions, HELP)


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    options = options_from(namespace, LatencyOptions)
    check_writable(namespace.output_json)
    from quire.bench.offline.latency import latency_text, measure_latency
    from quire.engine.llm import LLM

    with (
        LLM(**llm_options(namespace, enable_prefix_caching=False)) as llm,
        CommandProgress() as progress,
    ):
        result = measure_latency(llm, options, progress.seen)
    if result:
        print(latency_text(result))
        write_json(namespace.output_json, result)
    return 0
