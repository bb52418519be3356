"""`quire chaos URL`: attacks a server from outside while a canary watches its answers.

Works against any OpenAI-compatible server. It is meant for one's own: a server on another machine
is attacked only with `--yes`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from quire.chaos.canary import Canary
from quire.chaos.faults import SIZES, faults
from quire.chaos.run import HOLDS, Result, known_answer, report, run, table
from quire.chaos.target import HttpTarget
from quire.cli.parser import Parser
from quire.cli.running import add_running_flags, key_for, running_client
from quire.errors import ConfigError
from quire.spelling import did_you_mean
from quire.utils.process import raise_descriptor_limit


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "chaos",
        "Attack a running server from outside, and tell what held: clients that vanish or never "
        "read, malformed HTTP and JSON, hostile ids and limits, overload. A canary asks the same "
        "greedy request throughout, and its answer must stay the same. Exit code 1: something did "
        "not hold.",
    )
    parser.add_argument(
        "--fault", metavar="NAME", nargs="+", default=None,
        help="Only these; --fault list tells their names.",
    )  # fmt: skip
    parser.add_argument(
        "--size",
        metavar="SIZE",
        default="usual",
        help="How much of everything: small (a minute), usual (minutes), large (an hour). "
        "Default: usual.",
    )
    parser.add_argument(
        "--model-name", metavar="TEXT", default=None,
        help="Model at the server. Default: the first it lists.",
    )  # fmt: skip
    parser.add_argument(
        "--yes", action="store_true", default=False,
        help="Attack a server on another machine, too. Only with its owner's consent.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    add_running_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Attack and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    rows = faults()
    if namespace.fault == ["list"]:
        print("\n".join(f"{name:<24}{row.injected}" for name, row in rows.items()))
        return 0
    if namespace.size not in SIZES:
        raise ConfigError(f"--size must be one of {', '.join(SIZES)}, got {namespace.size!r}")
    chosen = namespace.fault or list(rows)
    if unknown := [name for name in chosen if name not in rows]:
        raise ConfigError(f"--fault: there is no {unknown[0]!r}{did_you_mean(unknown[0], rows)}")
    client = running_client(namespace)
    url = client.url if "://" in client.url else f"http://{client.url}"
    if not HttpTarget(url, "").is_local and not namespace.yes:
        raise ConfigError(
            f"{url} is not on this machine: attacks disturb whoever uses it. Give --yes if it is "
            "yours"
        )
    key = key_for(namespace)
    model = namespace.model_name or client.model()

    def told(result: Result) -> None:
        print(f"{result.fault}: {result.state}", file=sys.stderr, flush=True)

    async def attack() -> tuple[Canary, list[Result]]:
        known = await known_answer(url, model, key)
        return known, await run(known, chosen, SIZES[namespace.size], told)

    raise_descriptor_limit()
    known, results = asyncio.run(attack())
    print(json.dumps(report(known, results), indent=1) if namespace.json else table(results))
    return int(any(result.state != HOLDS for result in results))
