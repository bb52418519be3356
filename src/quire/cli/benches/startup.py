"""`quire bench startup`: how long the engine takes to start, cold and warm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quire.bench.offline.options import StartupOptions
from quire.cli.benches.flags import bench_parser, check_writable, llm_options, write_json
from quire.cli.option_flags import options_from
from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress

HELP: Final = {
    "num_iters_cold": "Starts for which the model's files are dropped from memory.",
    "num_iters_warmup": "Starts after them that do not count.",
    "num_iters_warm": "Starts with the files in memory.",
    "start_timeout": "Seconds that one start may take.",
}


def build_parser() -> Parser:
    """The parser of this command."""
    about = "Measure how long the engine takes to start, each time in a new process."
    return bench_parser("startup", about, StartupOptions, HELP)


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    options = options_from(namespace, StartupOptions)
    check_writable(namespace.output_json)
    from quire.bench.offline.startup import measure_startup, startup_text
    from quire.config import EngineConfig
    from quire.config.locate import located

    given = llm_options(namespace)
    config = located(EngineConfig.from_options(**given))  # a wrong option is told at once
    with CommandProgress() as progress:
        result = measure_startup(given, Path(config.model.model), options, progress.seen)
    print(startup_text(result))
    write_json(namespace.output_json, result)
    return 0
