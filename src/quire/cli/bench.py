"""`quire bench`: lists the benchmarks, or runs one. Each is a module of `quire.cli.benches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cli.parser import Parser
from quire.registry import Registry

BENCHMARKS: Registry[Callable[[Sequence[str]], int]] = Registry(
    "benchmark",
    {
        "serve": "quire.cli.benches.serve:main",
        "compare": "quire.cli.benches.compare:main",
        "quick": "quire.cli.benches.quick:main",
        "throughput": "quire.cli.benches.throughput:main",
        "engine": "quire.cli.benches.engine:main",
        "latency": "quire.cli.benches.latency:main",
        "startup": "quire.cli.benches.startup:main",
        "prefix-caching": "quire.cli.benches.repeats:prefix_caching",
        "long-document-qa": "quire.cli.benches.repeats:long_document_qa",
        "prioritization": "quire.cli.benches.prioritization:main",
        "structured-output": "quire.cli.benches.structured_output:main",
        "sweep": "quire.cli.benches.sweep:main",
    },
)
"""Benchmarks by name; each is a command of its own."""
ABOUT = {
    "quick": "one paragraph: how fast a server is, and for how many users",
    "compare": "what differs between two results, and what may be chance",
    "serve": "latencies and throughput of a server of any make, under a load",
    "throughput": "requests and tokens per second when everything is there at once",
    "engine": "tokens per second on this machine, the limit on paper, and peers beside it",
    "latency": "how long one batch takes",
    "startup": "how long the engine takes to start, cold and warm",
    "prefix-caching": "prompts that share a prefix and come again",
    "long-document-qa": "long documents that are asked about again",
    "prioritization": "requests with random priorities",
    "sweep": "a benchmark over a grid of parameters, and plots of it",
    "structured-output": "a server's structured outputs: speed, and how many are correct",
}
"""What each measures, for the list."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("bench", "List the benchmarks, or run one.")
    parser.add_argument("name", nargs="?", default=None, help="Which one; without it, list them.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """List the benchmarks, or hand over to one; returns the exit code."""
    if arguments and not arguments[0].startswith("-"):
        return BENCHMARKS.get(arguments[0])(arguments[1:])
    build_parser().parse(arguments)
    print("\n".join(f"{name:<22}{ABOUT[name]}" for name in BENCHMARKS))
    print("`quire bench NAME --help` tells the flags of one.")
    return 0
