"""`quire timeline`: the last steps of a running server as a Chrome trace, for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.cli.running import add_running_flags, running_client
from quire.errors import ConfigError


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "timeline",
        "Write the last steps of a running server as a Chrome trace.",
        epilog="Open the file in ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=1000, help="How many steps. Default: 1000."
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="quire-timeline.json",
        help="Where to write it; - is stdout. Default: quire-timeline.json.",
    )  # fmt: skip
    add_running_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the trace; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if namespace.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {namespace.steps}")
    body = running_client(namespace).get(f"/v1/timeline?steps={namespace.steps}")
    if namespace.output == "-":
        sys.stdout.write(body.decode() + "\n")
        return 0
    try:
        with open(namespace.output, "wb") as file:
            file.write(body)
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write {namespace.output!r}: {error.strerror}"
        ) from None
    trace = json.loads(body)
    print(
        f"{namespace.output}: {trace['otherData']['steps']} steps, {len(trace['traceEvents'])} "
        "events; open it in ui.perfetto.dev"
    )
    return 0
