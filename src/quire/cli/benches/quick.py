"""`quire bench quick`: one paragraph about how fast a server is, or one started for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quire.bench.backends import backend_named
from quire.bench.own_server import own_server
from quire.bench.quick import climb, paragraph
from quire.cli.parser import Parser
from quire.errors import ConfigError


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "bench quick",
        "Say in one paragraph how fast a server is, and for how many users at the same moment. "
        "Without --base-url, a server is started for it.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=None,
        help="Model to start, or of the server. Default: the embedded one; the server's first.",
    )  # fmt: skip
    parser.add_argument("--base-url", metavar="TEXT", default=None, help="A server that runs.")
    parser.add_argument("--api-key", metavar="TEXT", default=None, help="Its key.")
    parser.add_argument(
        "--backend", metavar="TEXT", default="openai-chat",
        help="openai-chat, openai, or another that streams. Default: openai-chat.",
    )  # fmt: skip
    for name, default, what in (
        ("input", 64, "Prompt"), ("output", 64, "Reply")
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}-len", metavar="N", type=int, default=default,
            help=f"{what} tokens. Default: {default}.",
        )  # fmt: skip
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=60.0,
        help="After which no further number of users is tried. Default: 60.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=False, help="Print every figure.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    namespace = build_parser().parse(arguments)
    for name, least in (("input_len", 1), ("output_len", 2)):
        if (value := getattr(namespace, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not namespace.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {namespace.seconds:g}")
    if not backend_named(namespace.backend).streams:
        raise ConfigError(f"--backend {namespace.backend} does not stream: there is no first word")
    how = {name: getattr(namespace, name) for name in ("input_len", "output_len", "seconds")}
    how |= {"backend": namespace.backend, "api_key": namespace.api_key, "told": _told}
    if namespace.base_url is not None:
        url = namespace.base_url
        steps = climb(url, model=namespace.model, **how)
    else:
        _told("starting a server")
        with own_server([namespace.model] if namespace.model else []) as url:
            steps = climb(url, **how)
    if namespace.json:
        print(json.dumps([{"users": step.users, **step.result} for step in steps], indent=1))
    else:
        print(paragraph(steps, url, namespace.input_len, namespace.output_len))
    return int(any(step.result["failed"] for step in steps))


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
