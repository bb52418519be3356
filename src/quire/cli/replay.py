"""`quire replay FILE`: runs a recording again, step by step, and compares every decision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.cli.parser import Parser
from quire.cli.progress import CommandProgress
from quire.core.facts import FactKind, Wait, unpack
from quire.errors import ConfigError
from quire.sim.lockstep import Decided, Driven, Lockstep, Replayed, SimulatedEngine
from quire.sim.scenario import pool_of, recorded_config
from quire.workload.trace import Trace, read_trace

SHOWN = 3
"""Steps with other decisions that are shown."""
EPILOG = (
    "Requests come before the same step as they did, get as many tokens, and the clock goes by the "
    "recording. The exit code is 0 if every decision is the same."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("replay", "Run a recording again, and compare every decision.", epilog=EPILOG)
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default=None, help="Of `quire serve --record`."
    )
    parser.add_argument(
        "--on", choices=("simulator", "engine"), default="simulator",
        help="The scheduler alone, or an engine with the recorded model. Default: simulator.",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", default=None,
        help="With --on engine: another place of the model than the recorded one.",
    )  # fmt: skip
    return parser


@dataclass(slots=True)
class Comparison:
    """How the decisions compare."""

    num_steps: int = 0
    num_same: int = 0
    num_decisions: int = 0
    different: list[Replayed] = field(default_factory=list)
    """The first of them."""

    def add(self, step: Replayed) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_decisions += len(step.expected)
        if step.is_same:
            self.num_same += 1
        elif len(self.different) < SHOWN:
            self.different.append(step)


def main(arguments: Sequence[str]) -> int:
    """Replay, print; returns 0 if every decision is the same, else 1."""
    namespace = build_parser().parse(arguments)
    if namespace.file is None:
        raise ConfigError("name a FILE that `quire serve --record FILE` wrote")
    trace = read_trace(namespace.file)
    if not trace.header.config:
        raise ConfigError(f"{namespace.file} is no recording: it has no configuration and no steps")
    if namespace.on == "engine":
        _check_structured(trace)
        compared, said = _on_engine(trace, namespace.model)
    else:
        config = recorded_config(trace.header.config)
        engine = SimulatedEngine(trace, config, pool_of(trace.header.info))
        compared, said = compare(trace, engine), ""
    print(
        f"{compared.num_same} of {compared.num_steps} steps with the recorded decisions "
        f"({compared.num_decisions} decisions){said}"
    )
    for step in compared.different:
        print(told(step), file=sys.stderr)
    return 0 if compared.num_same == compared.num_steps else 1


def _check_structured(trace: Trace) -> None:
    """Tell before a model is loaded that an engine could not run this.

    Raises:
        ConfigError: a request waited for its grammar, which no recording has.
    """
    for step in trace.steps:
        try:
            facts = list(unpack(step.facts))
        except ValueError:
            return  # told with its step when that is run
        if any(fact.kind == FactKind.WAITS and fact.reason == Wait.GRAMMAR for fact in facts):
            raise ConfigError(
                "the recording has structured outputs, and their grammars are not in it: replay it "
                "on the simulator"
            )


def compare(trace: Trace, engine: Driven) -> Comparison:
    """Run all of a recording."""
    compared = Comparison()
    with CommandProgress(patience=1.0) as progress:
        for step in progress.through("steps", Lockstep(trace, engine), len(trace.steps)):
            compared.add(step)
    return compared


def _on_engine(trace: Trace, model: str | None) -> tuple[Comparison, str]:
    from dataclasses import replace

    from quire.config.locate import located
    from quire.engine.replay import RealEngine

    config = recorded_config(trace.header.config)
    if model is not None:
        config = replace(config, model=replace(config.model, model=model))
    # As many blocks as there were, whatever is free now.
    cache = replace(config.cache, num_gpu_blocks_override=trace.header.info["num_blocks"])
    engine = RealEngine(trace, located(replace(config, cache=cache)))
    try:
        compared = compare(trace, engine)
    finally:
        engine.shutdown()
    then = sum(step.seconds for step in trace.steps)
    return compared, f"; steps took {engine.seconds:.2f} s, {then:.2f} s when it was recorded"


def told(step: Replayed) -> str:
    """The decisions of a step that differ, for people."""
    lines = [f"step {step.recorded.step}:"]
    for what, some, others in (
        ("recorded", step.expected, step.decided),
        ("now", step.decided, step.expected),
    ):
        lines += [f"  {what:<9}{_decision(one)}" for one in some if one not in others]
    return "\n".join(lines)


def _decision(one: Decided) -> str:
    numbers = f"a={one.a} b={one.b} c={one.c} d={one.d}"
    return f"{FactKind(one.kind).name} request {one.request} reason {one.reason} {numbers}"
