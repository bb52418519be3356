"""`quire complete "The capital of France is"`: prints the completion, and nothing else on stdout.

Greedy by default (temperature 0), so that the same prompt prints the same text; `--temperature`
changes that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from quire.cli import sampling_flags
from quire.cli.form_flags import add_form_flags, form_of
from quire.cli.parser import Parser
from quire.cli.target import (
    Server,
    add_target_flags,
    engine_target,
    quiet_logs,
    server_target,
)
from quire.config import EngineConfig
from quire.config.cli import given_options
from quire.errors import ConfigError, EngineError

DEFAULTS: Final = {"max_tokens": 16, "temperature": 0.0}
FORMED_TOKENS: Final = 256
"""The default of `--max-tokens` for an output with a form, which must not be cut off."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("complete", "Print the completion of a prompt, and nothing else on stdout.")
    parser.add_argument("prompt", nargs="?", default=None, help="Default: read from stdin.")
    parser.add_argument("-q", "--quick", metavar="TEXT", default=None, help="The prompt.")
    parser.add_argument("--stats", action="store_true", default=False, help="Print the timing.")
    parser.add_config_flag()
    sampling_flags.add_sampling_flags(parser, **DEFAULTS)
    add_form_flags(parser)
    add_target_flags(parser, positional=False)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Complete one prompt; returns the exit code."""
    namespace = build_parser().parse(arguments)
    prompt = _prompt(namespace)
    form = form_of(namespace)
    more = {"max_tokens": FORMED_TOKENS} if form else {}
    options = {**DEFAULTS, **more, **sampling_flags.given(namespace), **form}
    server = server_target(namespace)
    if server is not None:
        pieces = _remote(server, prompt, options)
    else:
        pieces = _local(namespace, prompt, options)
    started = time.monotonic()
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    if namespace.stats:
        print(f"[{time.monotonic() - started:.2f} s]", file=sys.stderr)
    return 0


def _prompt(namespace: argparse.Namespace) -> str:
    given = [text for text in (namespace.prompt, namespace.quick) if text is not None]
    if len(given) > 1:
        raise ConfigError("two prompts are given: PROMPT and -q. Give one")
    if given:
        return str(given[0])
    if sys.stdin.isatty():
        raise ConfigError('no prompt is given. Try: quire complete "The capital of France is"')
    return sys.stdin.read().removesuffix("\n")


def _remote(server: Server, prompt: str, options: dict[str, Any]) -> Iterator[str]:
    from quire.cli.http import Client

    client = Client(server.url, server.api_key)
    body = {"model": server.model or client.model(), "prompt": prompt, "stream": True}
    for event in client.stream("/v1/completions", {**body, **options}):
        for choice in event.get("choices", ()):
            yield choice.get("text", "")


def _local(namespace: argparse.Namespace, prompt: str, options: dict[str, Any]) -> Iterator[str]:
    quiet_logs()
    engine_target(namespace)  # tells a wrong path before torch is loaded

    from quire import LLM

    with LLM(**given_options(namespace, EngineConfig)) as llm:
        params = llm.get_default_sampling_params().replace(**options)
        output = llm.generate([prompt], params, use_tqdm=False)[0]
    if output.error:
        raise EngineError(output.error)
    yield output.outputs[0].text
