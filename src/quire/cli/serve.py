"""`quire serve [MODEL]`: starts the server that the flags describe. The server itself is
`quire.serving`."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cli.parser import Parser
from quire.config.cli import (
    add_engine_flags,
    add_server_flags,
    engine_config,
    server_config,
    taken_line,
)
from quire.utils.process import ends_when_told

EPILOG = (
    "Example: quire serve ./my-model --port 9000 --max-model-len 8k. A file given with --config "
    "holds the same flags as YAML."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("serve", "Start the OpenAI-compatible HTTP server.", epilog=EPILOG)
    parser.add_config_flag()
    add_engine_flags(parser)
    add_server_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Serve until stopped; returns the exit code."""
    with ends_when_told():  # until the server has its own handlers
        return _serve(arguments)


def _serve(arguments: Sequence[str]) -> int:
    namespace = build_parser().parse(arguments)
    engine, server = engine_config(namespace), server_config(namespace)

    from quire import envs
    from quire.config.locate import located
    from quire.logger import get_logger, setup_logging

    envs.ensure_valid()
    setup_logging("APIServer", detached=True)
    for sentence in envs.without_effect():
        get_logger(__name__).warning(sentence)
    if line := taken_line(namespace):
        get_logger(__name__).info(line)
    # A wrong path is told at once, not after a process was started for it.
    engine = located(engine)
    engine.resolve(engine.model.read_shape())

    from quire.serving.server import run_server

    return run_server(engine, server)
