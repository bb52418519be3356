"""Which model `chat` and `complete` ask: an engine started here, or the one behind `--url`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from quire.cli.parser import First, Parser
from quire.cli.running import is_url
from quire.config import EngineConfig, neutral
from quire.config.cli import add_engine_flags, engine_config, flags
from quire.config.locate import located
from quire.errors import ConfigError

_SAMPLING = ("seed",)
"""Engine flags whose names these commands use for an option of the request."""
_FOR_A_SERVER = ("api_key", "model_name")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, as the flags describe it."""

    url: str
    api_key: str | None
    model: str | None


def add_target_flags(parser: Parser, *, positional: bool) -> None:
    """Add the flags of both targets; `positional` adds the MODEL argument."""
    group = parser.add_argument_group("Running server")
    for flag, action, text in (
        ("--url", "store", "Ask this server and start no engine; engine flags are refused then."),
        ("--api-key", First, "Its key. Default: QUIRE_API_KEY."),
        ("--model-name", "store", "Model at the server. Default: MODEL, else the first it lists."),
    ):
        group.add_argument(
            flag, action=action, metavar="TEXT", default=argparse.SUPPRESS, help=text
        )
    add_engine_flags(parser, positional=positional, without=(*_SAMPLING, "-q"))


def server_target(namespace: argparse.Namespace) -> Server | None:
    """The server to ask, or None for an own engine. A URL given as MODEL is a server, too.

    Raises:
        ConfigError: flags are given that would have no effect on this target.
    """
    from quire import envs

    url, model = getattr(namespace, "url", None), getattr(namespace, "model", None)
    if url is None and is_url(model):
        url, model = model, None
    if url is None:
        unused = [name for name in _FOR_A_SERVER if _typed(namespace, name)]
        if unused:
            raise ConfigError(f"{_flag(unused[0])} is for a running server: give --url too")
        return None
    names = {flag.field for flag in flags(EngineConfig)} | {*neutral.engine_rows()}
    names -= {"model", *_SAMPLING}
    unused = sorted(name for name in names if _typed(namespace, name))
    if unused:
        raise ConfigError(
            f"{_flag(unused[0])} is for an engine started here: leave it out, or --url"
        )
    model = getattr(namespace, "model_name", None) or model
    return Server(url, getattr(namespace, "api_key", None) or envs.API_KEY, model)


def _typed(namespace: argparse.Namespace, name: str) -> bool:
    """Whether an option was given on the command line. A file does not count, because it holds
    options of all commands."""
    return hasattr(namespace, name) and name not in getattr(namespace, "from_file", ())


def engine_target(namespace: argparse.Namespace) -> EngineConfig:
    """The engine to start. A missing model folder is reported here, before anything heavy is
    loaded.

    Raises:
        StartupError: a flag is wrong, or the model folder is missing or incomplete.
    """
    config = located(engine_config(namespace))
    config.resolve(config.model.read_shape())
    return config


def quiet_logs() -> None:
    """Log only warnings, in this process and those it starts, unless a variable sets the level.

    The output of these commands is for people to read.

    Raises:
        ConfigError: an environment variable has a bad value.
    """
    import os

    from quire import envs
    from quire.logger import setup_logging

    envs.ensure_valid()
    if envs.source("LOGGING_LEVEL") is None:
        os.environ["QUIRE_LOGGING_LEVEL"] = "WARNING"
    setup_logging("Main")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
