"""`quire bench prefix-caching` and `quire bench long-document-qa`: prompts that come again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from quire.bench.offline.options import LongDocumentOptions, PrefixCachingOptions
from quire.cli.benches.flags import (
    bench_parser,
    check_dataset,
    check_writable,
    llm_options,
    write_json,
)
from quire.cli.option_flags import options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress

if TYPE_CHECKING:
    from quire.bench.offline.drive import Job
    from quire.engine.llm import LLM

_TEXT: Final = "Leave the text out: tokens only."
PREFIX_HELP: Final = {
    "num_prompts": "Different prompts.",
    "repeat_count": "Times that each is asked.",
    "sort": "Ask the shortest first, all of them before any is repeated.",
    "input_length_range": "LOW:HIGH, tokens of a prompt, the prefix included.",
    "prefix_len": "Tokens that all prompts begin with.",
    "output_len": "Tokens of each completion.",
    "dataset_path": "A ShareGPT file of prompts, instead of random ones.",
    "disable_detokenize": _TEXT,
}
DOCUMENT_HELP: Final = {
    "num_documents": "Different documents.",
    "document_length": "Tokens of each; the context must hold them.",
    "output_len": "Tokens of each completion.",
    "repeat_count": "Times that each is asked.",
    "repeat_mode": "tile (1 2 1 2), interleave (1 1 2 2) or random.",
    "shuffle_seed": "Of the documents and of the random order.",
    "disable_detokenize": _TEXT,
}


def prefix_caching_parser() -> Parser:
    """The parser of `quire bench prefix-caching`."""
    return bench_parser(
        "prefix-caching", "Measure prompts that share a prefix and come again.",
        PrefixCachingOptions, PREFIX_HELP,
    )  # fmt: skip


def long_document_qa_parser() -> Parser:
    """The parser of `quire bench long-document-qa`."""
    return bench_parser(
        "long-document-qa", "Measure long documents that are asked about again.",
        LongDocumentOptions, DOCUMENT_HELP,
    )  # fmt: skip


def prefix_caching(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""

    def jobs(llm: LLM, options: PrefixCachingOptions) -> list[Job]:
        from quire.bench.offline.repeats import prefix_jobs
        from quire.workload.datasets import make_requests
        from quire.workload.options import DatasetOptions

        requests = []
        if options.dataset_path is not None:
            dataset = DatasetOptions(
                dataset_name="sharegpt", dataset_path=options.dataset_path, seed=options.seed,
                num_prompts=10 * options.num_prompts, no_oversample=True,
                output_len=options.output_len,
            )  # fmt: skip
            requests = make_requests(dataset, llm.get_tokenizer())
        return prefix_jobs(options, llm.llm_engine.core.info.vocab_size, requests)

    return _measure(prefix_caching_parser(), PrefixCachingOptions, arguments, jobs, "Cost time {}")


def long_document_qa(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""

    def jobs(llm: LLM, options: LongDocumentOptions) -> list[Job]:
        from quire.bench.offline.repeats import document_jobs

        return document_jobs(options, llm.llm_engine.core.info.vocab_size)

    line = "Time to execute all requests: {:.4f} secs"
    return _measure(long_document_qa_parser(), LongDocumentOptions, arguments, jobs, line)


def _measure(
    parser: Parser,
    options_of: type[Any],
    arguments: Sequence[str],
    make: Callable[[LLM, Any], list[Job]],
    first_line: str,
) -> int:
    namespace = parser.parse(arguments)
    options = options_from(namespace, options_of)
    check_writable(namespace.output_json)
    check_dataset(getattr(options, "dataset_path", None))
    from quire.bench.offline.drive import Drive, Job, check_context
    from quire.bench.offline.repeats import cache_result, cache_text
    from quire.engine.llm import LLM

    with LLM(**llm_options(namespace)) as llm, CommandProgress() as progress:
        jobs = make(llm, options)
        limit = llm.llm_engine.config.model.max_model_len or 0
        for number, job in enumerate(jobs, 1):
            check_context(job.prompt_len, options.output_len, limit, f"request {number}")
        Drive(llm.llm_engine, [Job([11, 12, 13], jobs[0].params)]).run()  # warm-up
        outcome = Drive(llm.llm_engine, jobs, seen=progress.requests).run()
    result = cache_result(outcome)
    print(cache_text(result, first_line.format(result["elapsed_time"])))
    write_json(namespace.output_json, result)
    return 1 if result["failed"] else 0
