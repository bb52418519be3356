"""`quire bench prioritization`: requests with random priorities, all at once.

As in the script of vLLM, every request is urgent (0) or not (1) by chance, with the policy
`priority`; the throughput of the whole is told. Beside it, how long both kinds waited.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from quire.bench.offline.options import ThroughputOptions
from quire.cli.benches.flags import (
    add_dataset_flags,
    add_result_flag,
    check_dataset,
    check_writable,
    llm_options,
    seed_of,
    write_json,
)
from quire.cli.option_flags import add_option_flags, options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.config.cli import add_engine_flags
from quire.errors import ConfigError
from quire.workload.options import DatasetOptions

HELP: Final = {
    "n": "Completions of each request.",
    "disable_detokenize": "Leave the text out: tokens only.",
}


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("bench prioritization", "Measure requests with random priorities.")
    parser.add_argument("--backend", metavar="NAME", default="vllm", help="Only vllm: this engine.")
    add_result_flag(parser)
    add_option_flags(parser, ThroughputOptions, "Prioritization", help=HELP)
    add_dataset_flags(parser, {"dataset_name": None, "num_prompts": 200})
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 1 if requests failed."""
    namespace = build_parser().parse(arguments)
    if namespace.backend != "vllm":
        raise ConfigError(f"--backend must be vllm (this engine), got {namespace.backend!r}")
    check_writable(namespace.output_json)
    check_dataset(namespace.dataset_path)
    options = options_from(namespace, ThroughputOptions)
    name = namespace.dataset_name or ("sharegpt" if namespace.dataset_path else "random")
    dataset = options_from(namespace, DatasetOptions, dataset_name=name)
    from quire.bench.offline.drive import check_context
    from quire.bench.offline.throughput import jobs_of, run_inline, throughput_result
    from quire.engine.llm import LLM
    from quire.workload.datasets import make_requests

    given = llm_options(namespace, scheduling_policy="priority")
    with LLM(**given) as llm, CommandProgress() as progress:
        requests = make_requests(dataset, llm.get_tokenizer())
        limit = llm.llm_engine.config.model.max_model_len or 0
        numbers = random.Random(seed_of(namespace))
        for number, request in enumerate(requests, 1):
            check_context(request.prompt_len, request.output_len, limit, f"request {number}")
            request.priority = numbers.randrange(2)
        jobs = jobs_of(requests, options)
        records, duration = run_inline(llm, jobs, options, progress.requests)
    for job, record in zip(jobs, records, strict=True):
        record.priority = job.priority
    result = throughput_result(records, duration)
    result["mean_ttft_ms_by_priority"] = waits(records)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} tokens/s"
    )
    for priority, wait in result["mean_ttft_ms_by_priority"].items():
        print(f"Mean TTFT at priority {priority}: {wait:.2f} ms")
    write_json(namespace.output_json, result)
    return 1 if result["failed"] else 0


def waits(records: Sequence[Any]) -> dict[str, float]:
    """Mean TTFT in milliseconds by priority, of requests that did not fail."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.ok:
            found.setdefault(record.priority, []).append(1000 * record.ttft)
    return {str(priority): sum(v) / len(v) for priority, v in sorted(found.items())}
