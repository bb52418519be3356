"""The grid of a sweep: parameter files, their combinations, and the command line of each.

A file holds a JSON list of objects, or an object of objects by name. A key is a flag:
`max_num_seqs` and `max-num-seqs` are the same. `true` gives the flag alone, `false` its `--no-`
form, null leaves it out, and lists and objects go as JSON. Runs nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.bench.sweep.rows import names_of
from quire.errors import ConfigError

Params = dict[str, Any]
NAME_KEY: Final = "_benchmark_name"
"""The key that names a set of parameters, as in vLLM's files."""
_LONGEST_NAME: Final = 120


def read_params(path: str | None, flag: str) -> list[Params]:
    """The sets of parameters of a file; without a file, one that is empty.

    Raises:
        ConfigError: the file cannot be read, or does not hold sets of parameters.
    """
    if path is None:
        return [{}]
    try:
        given = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{flag}: {path!r} is not JSON: {error}") from None
    if isinstance(given, dict):
        named = given.items()
        given = [{NAME_KEY: k, **v} if isinstance(v, dict) else v for k, v in named]
    if not isinstance(given, list) or not given or not all(isinstance(p, dict) for p in given):
        raise ConfigError(
            f"{flag}: {path!r} must hold a list of objects, or an object of objects by name, and "
            "at least one"
        )
    names = [name_of(params) for params in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{flag}: {path!r} has {twice!r} twice")
    return [{key.replace("-", "_"): value for key, value in p.items()} for p in given]


def name_of(params: Mapping[str, Any]) -> str:
    """A name that a file can have: the one given, or made of all keys and values."""
    given = params.get(NAME_KEY)
    text = given or "-".join(f"{k.replace('-', '_')}={v}" for k, v in params.items()) or "default"
    return re.sub(r"[^\w.=+-]+", "_", str(text))[:_LONGEST_NAME]


def arguments_of(params: Mapping[str, Any]) -> list[str]:
    """The flags of a set of parameters."""
    found: list[str] = []
    for key, value in params.items():
        if key == NAME_KEY or value is None:
            continue
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
            found += [flag, text]
    return found


def command_of(text: str, flag: str) -> list[str]:
    """A command line in words.

    Raises:
        ConfigError: it is empty, or a quote is open.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r}: {error}") from None
    if not words:
        raise ConfigError(f"{flag} must be a command, got an empty text")
    return words


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    outer: Params
    """Of the server, or of what is started."""
    inner: Params
    """Of the benchmark."""
    run: int
    folder: Path

    @property
    def file(self) -> Path:
        """Its result. It is there once the run has ended well."""
        return self.folder / f"run={self.run}.json"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.folder.name} run={self.run}"

    def result(self) -> dict[str, Any] | None:
        """Its result, if the run has ended well."""
        try:
            found = json.loads(self.file.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def links_of(text: str) -> list[tuple[str, str]]:
    """What `--link-vars` says: parameters of server and load that are to be equal.

    Raises:
        ConfigError: a part of it is not two names.
    """
    found = []
    for part in names_of(text):
        match = re.fullmatch(r"([\w-]+)\s*=\s*([\w-]+)", part)
        if match is None:
            raise ConfigError(
                f"--link-vars: {part!r} is not SERVER_PARAMETER=LOAD_PARAMETER, such as "
                "max_num_seqs=max_concurrency"
            )
        found.append((match[1].replace("-", "_"), match[2].replace("-", "_")))
    return found


def points_of(
    root: Path,
    outers: Sequence[Params],
    inners: Sequence[Params],
    runs: int,
    links: Sequence[tuple[str, str]] = (),
) -> list[Point]:
    """All combinations, those of one server after each other.

    Args:
        root: Folder of the sweep.
        outers: Of the server.
        inners: Of the load.
        runs: Of each combination.
        links: Parameters that must be equal; other combinations are left out.

    Raises:
        ConfigError: fewer than one run, a linked parameter that no set has, or nothing is left.
    """
    if runs < 1:
        raise ConfigError(f"--num-runs must be at least 1, got {runs}")
    for side, names, sets in (
        ("--serve-params", [outer for outer, _ in links], outers),
        ("--bench-params", [inner for _, inner in links], inners),
    ):
        for name in names:
            if missing := next((params for params in sets if name not in params), None):
                raise ConfigError(f"--link-vars: {name!r} is not in {name_of(missing)} of {side}")
    points = []
    for outer, inner in itertools.product(outers, inners):
        if any(outer[one] != inner[other] for one, other in links):
            continue
        folder = root / f"SERVE-{name_of(outer)}-BENCH-{name_of(inner)}"
        points += [Point(outer, inner, run, folder) for run in range(runs)]
    if not points:
        raise ConfigError("--link-vars: in no combination of parameters are these equal")
    return points
