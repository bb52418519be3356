"""`quire bench structured-output`: a server's structured outputs, their speed and correctness.

The load, the block and the JSON are those of `bench serve`; requests and checks are in
`quire.workload.structured`. The correctness rate counts, of the requests that asked for structure
and were answered, those whose text is what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.options import ServeOptions
from quire.bench.saved import now
from quire.bench.text_block import heading, row
from quire.cli.benches.flags import check_writable, write_json
from quire.cli.benches.serve import check_places, measured, save, show
from quire.cli.option_flags import add_option_flags, options_from
from quire.cli.parser import Parser
from quire.workload.options import DatasetOptions
from quire.workload.structured import KINDS, structured_requests


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "bench structured-output",
        "Load a server with requests for structured outputs, and check the replies. Exit code 1: a "
        "request failed.",
    )
    parser.add_argument(
        "--dataset", metavar="NAME", default="json",
        help=f"What to ask for: {', '.join(KINDS)}. Default: json.",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", metavar="N", type=int, default=1000, help="Requests. Default: 1000."
    )
    parser.add_argument(
        "--output-len", metavar="N", type=int, default=128,
        help="Tokens of each reply at most. Default: 128.",
    )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="Of everything random. Default: 0."
    )
    parser.add_argument(
        "--structured-output-ratio", metavar="X", type=float, default=1.0,
        help="Share of the requests that ask for structure. Default: 1.0.",
    )  # fmt: skip
    parser.add_argument(
        "--output-json", metavar="PATH", default=None, help="File to write the result to."
    )
    add_option_flags(parser, ServeOptions)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    options = options_from(namespace, ServeOptions)
    begun = now()
    check_writable(namespace.output_json)
    check_places(options, begun)
    dataset = DatasetOptions(
        dataset_name="structured", num_prompts=namespace.num_prompts,
        output_len=namespace.output_len, seed=namespace.seed,
    )  # fmt: skip
    requests, checkers = structured_requests(
        namespace.dataset, dataset.num_prompts, namespace.output_len,
        namespace.structured_output_ratio, namespace.seed,
    )  # fmt: skip
    run = measured(options, dataset, requests)
    rate = correctness([r.text if r.ok else None for r in run.outcome.records], checkers)
    result = {"date": begun.strftime("%Y%m%d-%H%M%S"), **run.result, **rate}
    show(run, result)
    print(heading("Structured Outputs"))
    print(row("Checked replies:", result["checked"]))
    print(row("Correct replies:", result["correct"]))
    shown = "none" if result["correct_rate"] is None else float(result["correct_rate"])
    print(row("Correct rate(%):", shown))
    write_json(namespace.output_json, result)
    save(options, run, result, begun)
    return run.exit_code


def correctness(texts: Sequence[str | None], checkers: Sequence[Any]) -> dict[str, Any]:
    """How many of the texts are right.

    Args:
        texts: Replies; None: there was none.
        checkers: For each, what says so; None: nothing was asked for.

    Returns:
        `checked`, `correct`, and `correct_rate` in percent, None if nothing was checked.
    """
    pairs = zip(texts, checkers, strict=True)
    verdicts = [bool(c(t)) for t, c in pairs if t is not None and c is not None]
    rate = 100.0 * sum(verdicts) / len(verdicts) if verdicts else None
    return {"checked": len(verdicts), "correct": sum(verdicts), "correct_rate": rate}
