"""Flags that several benchmarks share: their own numbers, the dataset's, the result's file, and the
engine's for `LLM`, which are those of `quire serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cli.option_flags import add_option_flags
from quire.cli.parser import Parser
from quire.config import EngineConfig, neutral
from quire.config.cli import add_engine_flags, given_neutral, given_options
from quire.errors import ConfigError
from quire.workload.options import DatasetOptions


def bench_parser(name: str, about: str, options: type[Any], help: Mapping[str, str]) -> Parser:
    """The parser of a benchmark that starts an engine: a flag for each field of `options` that
    `help` names, the result's file, and the engine's flags."""
    parser = Parser(f"bench {name}", about)
    add_result_flag(parser)
    add_option_flags(parser, options, "Benchmark", help=help)
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def add_result_flag(parser: Parser) -> None:
    """Add `--output-json`."""
    parser.add_argument(
        "--output-json", metavar="PATH", default=None, help="File to write the result to."
    )


def add_dataset_flags(parser: Parser, defaults: Mapping[str, Any]) -> None:
    """Flags for all fields of `DatasetOptions` but `seed`, with other defaults where given."""
    fields = dataclasses.fields(DatasetOptions)
    help = {field.name: field.metadata["help"] for field in fields if field.name != "seed"}
    add_option_flags(
        parser, DatasetOptions, "Dataset", help=help,
        defaults={"dataset_path": None, **defaults}, also={"dataset_path": "--dataset"},
    )  # fmt: skip


def llm_options(namespace: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The arguments of `LLM` that the flags mean: its own defaults, then `defaults`, then what was
    given."""
    given = given_options(namespace, EngineConfig)
    return {**defaults, **given, **given_neutral(namespace, neutral.engine_rows())}


def seed_of(namespace: argparse.Namespace) -> int:
    """`--seed`, or 0."""
    return int(getattr(namespace, "seed", None) or 0)


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a result, if a file was named.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=4) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json: cannot write {path!r}: {error.strerror}") from None


def check_dataset(path: str | None) -> None:
    """Tell before a model is loaded whether a dataset's file can be read.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"--dataset-path: cannot read {path!r}: {error.strerror}") from None


def check_writable(path: str | None, flag: str = "--output-json") -> None:
    """Tell before the work whether a result's place exists.

    Raises:
        ConfigError: the folder does not exist, or the name is a folder's.
    """
    if path is None:
        return
    place = Path(path)
    if place.is_dir():
        raise ConfigError(f"{flag} {path!r} is a folder: name a file")
    if not place.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(place.absolute().parent)!r}")
