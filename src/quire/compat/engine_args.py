"""`EngineArgs` and `AsyncEngineArgs`: the options of an engine as one record, and as flags.

The fields are derived from the settings of `EngineConfig` and the rows of `quire.config.neutral`,
so a new setting appears here by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from quire.config import EngineConfig, neutral
from quire.config.cli import add_engine_flags, flags

_LEFT_OPEN: Final = ("max_num_batched_tokens", "max_num_seqs", "disable_log_stats")
"""Settings whose default depends on what runs the engine; `None` leaves the choice to that."""


def _default(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(value)(value))
    return dataclasses.field(default=value)


def _fields() -> list[tuple[str, type, Any]]:
    found = {
        flag.field: None if flag.field in _LEFT_OPEN else flag.default
        for flag in flags(EngineConfig)
    }
    for row in neutral.engine_rows().values():
        found[row.name] = None if row.kind is neutral.JSON else row.default
    # Positional arguments are rare, but the first one is the model.
    order = sorted(found, key=lambda name: name != "model")
    return [(name, object, _default(found[name])) for name in order]


_Options: Any = dataclasses.make_dataclass("EngineArgs", _fields())


class EngineArgs(_Options):  # type: ignore[misc]
    """Options of an engine, named like `LLM`'s. They are checked when an engine is made from
    them."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field, with its default."""
        add_engine_flags(parser, positional=False)
        # Those of the parser win: a script may have set its own model.
        own = {
            f.name: f.default if f.default is not dataclasses.MISSING else None
            for f in dataclasses.fields(_Options)
        }
        parser.set_defaults(**own)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Options from the namespace of such a parser; other attributes are ignored."""
        names = [f.name for f in dataclasses.fields(_Options)]
        given = {name: getattr(args, name, None) for name in names}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def create_engine_config(self, *_: Any, **__: Any) -> EngineConfig:
        """The configuration.

        Raises:
            ConfigError: an option has a bad value, or asks for something that quire does not do.
        """
        return EngineConfig.from_options(**vars(self))


class AsyncEngineArgs(EngineArgs):
    """The same options, for `AsyncLLMEngine`."""

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Like `EngineArgs.add_cli_args`; the asynchronous engine has no further flags."""
        return parser if async_args_only else EngineArgs.add_cli_args(parser)
