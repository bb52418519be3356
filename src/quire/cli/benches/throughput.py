"""`quire bench throughput`: requests and tokens per second when everything is there at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from quire.bench.offline.options import ThroughputOptions
from quire.cli.benches.flags import (
    add_dataset_flags,
    add_result_flag,
    check_dataset,
    check_writable,
    llm_options,
    write_json,
)
from quire.cli.option_flags import add_option_flags, options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.config.cli import add_engine_flags
from quire.errors import ConfigError
from quire.workload.options import DatasetOptions

if TYPE_CHECKING:
    from quire.workload.request import WorkloadRequest

HELP: Final = {
    "n": "Completions of each request.",
    "prequeue_requests": "Hand all requests over before the clock starts.",
    "disable_detokenize": "Leave the text out: tokens only.",
    "profile": "Record the run with torch's profiler; QUIRE_TORCH_PROFILER_DIR says where to.",
}
_OTHERS: Final = "quire measures itself; install that package and use its own benchmark"
BACKENDS: Final = {"vllm": "", "vllm-chat": "", "hf": _OTHERS, "mii": _OTHERS}
"""Backends of vLLM's benchmark, and what to say about those that do not exist here."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("bench throughput", "Measure requests and tokens per second, all at once.")
    parser.add_argument(
        "--backend", metavar="NAME", default="vllm",
        help="vllm: this engine; vllm-chat: through the model's chat template. Default: vllm.",
    )  # fmt: skip
    parser.add_argument(
        "--async-engine", action="store_true", default=False,
        help="Run the engine in a process of its own, as servers do.",
    )  # fmt: skip
    parser.add_argument(
        "--lora-path", metavar="PATH", default=None,
        help="Refused: give a model folder with the adapter merged into it.",
    )  # fmt: skip
    add_result_flag(parser)
    add_option_flags(parser, ThroughputOptions, "Throughput", help=HELP)
    add_dataset_flags(parser, {"dataset_name": None})
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 1 if requests failed."""
    namespace = build_parser().parse(arguments)
    options = options_from(namespace, ThroughputOptions)
    _check(namespace, options)
    check_writable(namespace.output_json)
    check_dataset(namespace.dataset_path)
    name = namespace.dataset_name or ("sharegpt" if namespace.dataset_path else "random")
    dataset = options_from(namespace, DatasetOptions, dataset_name=name)
    from quire.bench.offline.throughput import throughput_result, throughput_text
    from quire.workload.datasets import make_requests

    run = _run_async if namespace.async_engine else _run_inline
    records, duration = run(namespace, options, lambda codec: make_requests(dataset, codec))
    result = throughput_result(records, duration)
    print(throughput_text(result))
    write_json(namespace.output_json, result)
    return 1 if result["failed"] else 0


Make = Callable[[Any], "list[WorkloadRequest]"]


def _check(namespace: argparse.Namespace, options: ThroughputOptions) -> None:
    if namespace.backend not in BACKENDS:
        raise ConfigError(
            f"--backend must be one of {', '.join(BACKENDS)}, got {namespace.backend!r}"
        )
    if reason := BACKENDS[namespace.backend]:
        raise ConfigError(f"--backend {namespace.backend}: {reason}")
    if namespace.lora_path is not None:
        raise ConfigError(
            f"--lora-path {namespace.lora_path!r}: adapters are not loaded; give a model folder "
            "with the adapter merged into it"
        )
    if namespace.async_engine and options.prequeue_requests:
        raise ConfigError(
            "--prequeue-requests needs the engine in this process: leave --async-engine out"
        )


def _run_inline(
    namespace: argparse.Namespace, options: ThroughputOptions, make: Make
) -> tuple[list[Any], float]:
    from quire.bench.offline.throughput import jobs_of, run_inline
    from quire.engine.llm import LLM

    with LLM(**llm_options(namespace)) as llm, CommandProgress() as progress:
        engine = llm.llm_engine
        jobs = jobs_of(
            _fitting(make(engine.tokenizer), engine.config.model.max_model_len),
            options,
            _renderer(namespace, engine.tokenizer),
        )
        return run_inline(llm, jobs, options, progress.requests)


def _run_async(
    namespace: argparse.Namespace, options: ThroughputOptions, make: Make
) -> tuple[list[Any], float]:
    from quire.bench.offline.throughput import jobs_of, run_async
    from quire.config import EngineConfig
    from quire.config.locate import located
    from quire.engine.frontend.front_end import load_tokenizer

    config = located(EngineConfig.from_options(**llm_options(namespace)))
    shape = config.model.read_shape()
    settled, _ = config.resolve(shape)
    tokenizer = load_tokenizer(config.model, shape)
    requests = _fitting(make(tokenizer), settled.model.max_model_len)
    jobs = jobs_of(requests, options, _renderer(namespace, tokenizer))
    with CommandProgress() as progress:
        return run_async(config, jobs, options, progress.requests)


def _fitting(requests: list[WorkloadRequest], limit: int | None) -> list[WorkloadRequest]:
    from quire.bench.offline.drive import check_context

    for number, request in enumerate(requests, 1):
        check_context(request.prompt_len, request.output_len, limit or 0, f"request {number}")
    return requests


def _renderer(namespace: argparse.Namespace, tokenizer: Any) -> Callable[[str], list[int]] | None:
    if namespace.backend != "vllm-chat":
        return None

    def render(prompt: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    return render
