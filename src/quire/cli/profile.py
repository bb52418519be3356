"""`quire profile`: run a workload and print the top kernels of prefill and of decode."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.config.cli import add_engine_flags, engine_config
from quire.errors import ConfigError

WIDTH = 120
"""Columns the table needs."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("profile", "Run a workload and print the top kernels of prefill and of decode.")
    add_engine_flags(parser)
    for flag, default, text in (
        ("--num-prompts", 4, "Requests that run together."),
        ("--input-len", 128, "Tokens of each prompt."),
        ("--output-len", 32, "Tokens of each answer."),
        ("--top", 12, "Kernels of each phase to show."),
    ):
        parser.add_argument(
            flag, type=int, metavar="N", default=default, help=f"{text} Default: {default}."
        )
    parser.add_config_flag()
    return parser


def main(arguments: Sequence[str]) -> int:
    """Profile, print; returns the exit code."""
    options = build_parser().parse(arguments)
    for name in ("num_prompts", "input_len", "output_len", "top"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1, got {getattr(options, name)}")
    from rich.console import Console
    from rich.table import Table

    from quire.engine.llm_engine import LLMEngine
    from quire.params import SamplingParams
    from quire.profiler.phases import PhaseProfiler, side_by_side

    engine = LLMEngine(engine_config(options))
    room = engine.config.model.max_model_len or 0
    if options.input_len + options.output_len > room:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} are more than "
            f"the context of {room} tokens"
        )
    vocabulary = engine.core.info.vocab_size
    params = SamplingParams(max_tokens=options.output_len, temperature=0, ignore_eos=True)

    def add(name: str, seed: int) -> None:
        # Prompts differ from their first token, so that none finds another's prefix.
        ids = [(seed * 7919 + 31 * i) % vocabulary for i in range(options.input_len)]
        engine.add_request(name, ids, params)

    add("warm-up", 1)
    while engine.has_unfinished_requests:
        engine.step()
    for index in range(options.num_prompts):
        add(str(index), index + 2)
    profiler = PhaseProfiler(engine)
    found = profiler.run()
    engine.shutdown()
    steps = profiler.steps
    table = Table(
        title=f"prefill: {steps['prefill']} steps; decode: {steps['decode']} steps", box=None
    )
    for phase in ("prefill", "decode"):
        table.add_column(phase, no_wrap=True)
        for name in ("ms", "share", "calls"):
            table.add_column(name, justify="right", no_wrap=True)
    for row in side_by_side(found, options.top):
        table.add_row(*row)
    console = Console(highlight=False)
    # A narrow terminal wraps lines rather than losing figures.
    console.width = max(console.width, WIDTH)
    console.print(table)
    return 0
