"""Flags that several benchmarks share: numbers, the dataset's, the engine's for `LLM`.

The dataset's flags are made from the fields of `DatasetOptions`, and the engine's are those of
`quire serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quire.cli.parser import Parser
from quire.config import EngineConfig, neutral
from quire.config.cli import given_neutral, given_options
from quire.errors import ConfigError
from quire.workload.options import DatasetOptions, flag_of

_READERS: Final = {"int": int, "int | None": int, "float": float}


def add_fields(parser: Parser, options: type[Any], help: Mapping[str, str], title: str) -> None:
    """A flag for each field of a dataclass of numbers and switches that `help` names."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(options):
        if field.name not in help:
            continue
        names: tuple[str, ...] = (flag_of(field.name),)
        add_flag(parser, group, names, str(field.type), field.default, help[field.name])


def add_flag(
    parser: Parser, group: Any, names: tuple[str, ...], kind: str, default: Any, text: str
) -> None:
    """One flag of a group. Its default is in its help, and applied after a `--config` file."""
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if kind == "bool":
        how["action"] = "store_true"
    else:
        how["type"] = _READERS.get(kind, str)
        how["metavar"] = "TEXT" if how["type"] is str else "N" if how["type"] is int else "X"
        if default is not None:
            text = f"{text} Default: {default}."
    action = group.add_argument(*names, help=text.replace("%", "%%"), **how)
    parser.set_late_default(action.dest, default)


def add_dataset_flags(parser: Parser, defaults: Mapping[str, Any] | None = None) -> None:
    """Flags for all fields of `DatasetOptions` but `seed`, with other defaults where given."""
    group = parser.add_argument_group("Dataset", "Which requests.")
    for field in dataclasses.fields(DatasetOptions):
        if field.name != "seed":
            names: tuple[str, ...] = (flag_of(field.name),)
            if field.name == "dataset_path":
                names += ("--dataset",)
            default = (defaults or {}).get(field.name, field.default)
            text = field.metadata["help"]
            add_flag(parser, group, names, str(field.type), default, text)


def dataset_options(namespace: argparse.Namespace, **changed: Any) -> DatasetOptions:
    """The dataset that was asked for.

    Raises:
        ConfigError: a value is out of range.
    """
    names = (field.name for field in dataclasses.fields(DatasetOptions))
    given = {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
    if given.get("seed") is None:
        given["seed"] = 0
    return DatasetOptions(**{**given, **changed})


def made_of(options: type[Any], namespace: argparse.Namespace) -> Any:
    """An options dataclass from the namespace's values.

    Raises:
        ConfigError: a value is out of range.
    """
    names = (field.name for field in dataclasses.fields(options))
    given = {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
    return options(**{name: value for name, value in given.items() if value is not None})


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
