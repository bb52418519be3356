"""`quire bench engine`: how fast the engine is on this machine, alone and beside its peers."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quire.bench.engine.options import CASES, FORMATS, EngineBenchOptions
from quire.cli.benches.flags import add_result_flag, check_writable, write_json
from quire.cli.option_flags import add_option_flags, options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.utils.host import available_memory

HELP: Final = {
    "cases": "Of " + ", ".join(CASES) + ", separated by commas: prompts x tokens in _ tokens out. "
    "Default: all that the model's context holds.",
    "formats": "How weights are kept: of " + ", ".join(FORMATS) + ", separated by commas. Each "
    "engine that knows it has its own kind of each; vLLM gets a rounded copy of the model.",
    "settings": "Of a peer that are tried: all, or the first alone, which takes less memory and "
    "time.",
    "rounds": "In which each engine runs each case once.",
    "pause": "Seconds before each run, in which threads of the engine before it stop spinning.",
    "peer_vllm": "Python that can import vllm (CPU); run as it is out of the box, and with all "
    "cores and its own OpenMP.",
    "peer_openvino": "Python that can import openvino_genai and optimum.",
    "peer_llama": "Python that can import llama_cpp and gguf; run with split and with unified KV.",
    "verbose": "Show what the engines log.",
}
LEAST_FREE: Final = 2 << 30
"""Bytes of memory below which mapped files do not stay in it for long."""
EPILOG: Final = (
    "Every engine loads the model once, in a process of its own; then all take turns, so that what "
    "else the machine does falls on all. Prompts are random ids without a shared prefix, greedy, "
    "computed in bf16. The best of a peer's settings counts."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "bench engine", "Measure the engine on this machine, beside peers.", epilog=EPILOG
    )
    parser.add_argument("--model", metavar="MODEL", default="quire-demo", help="Which to run.")
    add_result_flag(parser)
    add_option_flags(parser, EngineBenchOptions, "Benchmark", help=HELP)
    parser.add_config_flag()
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    check_writable(namespace.output_json)
    options = options_from(namespace, EngineBenchOptions)
    report = _measured(namespace.model, options)
    from quire.bench.engine.text import engine_text

    print(engine_text(report))
    write_json(namespace.output_json, report)
    if report["interrupted"]:
        why = report["ended"] or "interrupted"
        print(f"these are the cases that were done before this: {why}", file=sys.stderr)
        return 1 if report["ended"] else 130
    return 0


def scarce(free: int) -> str | None:
    """What to say of so many bytes of memory that all engines leave, if they are few."""
    if free >= LEAST_FREE:
        return None
    return (
        f"warning: with all engines in memory {free / 2**30:.1f} GiB are left, so that an engine "
        "whose weights are mapped may read them from the disk: compare fewer --formats, or "
        "--settings first"
    )


def _measured(model: str, options: EngineBenchOptions) -> dict[str, Any]:
    from quire.bench.engine.measure import MachinePaper, measure, warm_up
    from quire.bench.engine.workers import Contest, start_own, start_peers
    from quire.config import EngineConfig
    from quire.config.locate import located
    from quire.version import __version__

    config = located(EngineConfig.from_options(model=model)).model
    shape, place = config.read_shape(), Path(config.folder)
    cases = options.chosen(shape.max_position_embeddings)
    context = max(case.context for case in cases.values())
    tokens = max(case.held for case in cases.values())
    contest = Contest(place, shape.vocab_size, context, tokens, options.verbose, options.settings)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))
        stack.callback(contest.close)
        start_own(contest, options.kept)
        start_peers(contest, options.peers, options.kept, Path(folder))
        warm_up(contest.workers, cases)
        if (warning := scarce(available_memory())) is not None:
            print(warning, file=sys.stderr)
        progress = stack.enter_context(CommandProgress())
        report = measure(
            contest.workers, cases, options.rounds, MachinePaper(), pause=options.pause,
            seen=progress.seen,
        )  # fmt: skip
    about = {"model": place.name, "version": __version__, "rounds": options.rounds,
             "interrupted": len(report["results"]) < len(cases)}  # fmt: skip
    return {**about, **report}
