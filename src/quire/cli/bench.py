"""`quire bench`: lists the benchmarks that exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cli.parser import Parser
from quire.registry import Registry

BENCHMARKS: Registry[Callable[[Sequence[str]], int]] = Registry("benchmark")
"""Benchmarks by name; each is a command of its own."""


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
    if BENCHMARKS:
        print("\n".join(BENCHMARKS))
    else:
        print("There is no benchmark of models or servers yet. A source checkout has `make bench`.")
    return 0
