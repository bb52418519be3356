"""The rows of a sweep: read, filtered, binned, put into groups.

A row has the parameters and figures of one run. Texts of options are those of vLLM:
`max_concurrency<1000,max_num_batched_tokens<=4096` and `request_throughput%1`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from quire.errors import ConfigError
from quire.spelling import did_you_mean

Row = Mapping[str, Any]
SUMMARY: Final = "summary.json"
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION: Final = re.compile(r"\s*(\w+)\s*(==|!=|<=|>=|<|>)\s*(.+?)\s*")
_BIN: Final = re.compile(r"\s*(\w+)\s*%\s*(\S+)\s*")


def read_rows(folder: str) -> list[dict[str, Any]]:
    """The rows of a sweep, or of all sweeps whose folders are in this one.

    Raises:
        ConfigError: there is none, or it has no rows.
    """
    root = Path(folder)
    files = [root / SUMMARY]
    if not files[0].exists():
        files = sorted(root.rglob(SUMMARY)) or files
    rows = [row for file in files for row in _rows_in(file, folder)]
    if not rows:
        raise ConfigError(f"{str(files[0])!r} has no run that ended well")
    return rows


def _rows_in(file: Path, folder: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder!r} is no folder of a sweep: it has no {file.name}") from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder!r} is no folder of a sweep: {file.name}: {problem}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{str(file)!r} is not the summary of a sweep")
    return rows


def value_of(row: Row, name: str) -> Any:
    """A parameter or figure of a row.

    Raises:
        ConfigError: the row has none of that name.
    """
    if name not in row:
        raise ConfigError(f"{_name(row)} has no {name!r}{did_you_mean(name, list(row))}")
    return row[name]


def number(row: Row, name: str) -> float:
    """A figure of a row.

    Raises:
        ConfigError: the row has none of that name, or it is no number.
    """
    value = row.get(name)
    if not _is_number(value):
        if isinstance(value, str):  # the request rate of requests that are sent all at once
            raise ConfigError(
                f"{name} of {_name(row)} is no number but {value!r}; --filter-by "
                f"'{name}!={value}' leaves such runs out"
            )
        numbers = [k for k, v in row.items() if _is_number(v)]
        raise ConfigError(f"{_name(row)} has no number {name!r}{did_you_mean(name, numbers)}")
    return float(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(row: Row) -> str:
    return str(row.get("point", "a run"))


@dataclass(frozen=True, slots=True)
class Condition:
    """What a row has to be."""

    name: str
    sign: str
    target: str

    def holds(self, row: Row) -> bool:
        """Whether a row is so. Numbers compare as numbers, also those that are text (`inf`).

        Raises:
            ConfigError: the row lacks the name, or a text is to be more or less than something.
        """
        value, target = value_of(row, self.name), _number_in(self.target)
        own = float(value) if _is_number(value) else _number_in(value)
        if own is not None and target is not None:
            return _OPERATORS[self.sign](own, target)
        if self.sign in ("==", "!="):
            return _OPERATORS[self.sign](str(value), self.target)
        if value is None:
            return False
        raise ConfigError(
            f"--filter-by: {value!r} {self.sign} {self.target}: only numbers are more or less"
        )


def _number_in(text: Any) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def conditions_of(text: str) -> list[Condition]:
    """What `--filter-by` says.

    Raises:
        ConfigError: a part of it is no condition.
    """
    found = []
    for part in names_of(text):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"--filter-by: {part!r} is no condition: a name, one of {' '.join(_OPERATORS)}, "
                "and a value"
            )
        name, sign, target = match.groups()
        found.append(Condition(name, sign, target.strip("'\"")))
    return found


def bins_of(text: str) -> dict[str, float]:
    """What `--bin-by` says: sizes of bins, by the figure that is put into them.

    Raises:
        ConfigError: a part of it is no size.
    """
    found = {}
    for part in names_of(text):
        match = _BIN.fullmatch(part)
        size = match and _number_in(match[2])
        if match is None or size is None or not 0 < size < math.inf:
            raise ConfigError(f"--bin-by: {part!r} is not a name, %, and a size above 0")
        found[match[1]] = size
    return found


def names_of(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def selected(
    rows: Sequence[Row], conditions: Sequence[Condition], bins: Mapping[str, float]
) -> list[Row]:
    """The rows that are as they have to be, with figures at the beginnings of their bins.

    Raises:
        ConfigError: none is left, or a row lacks a name.
    """
    kept = [row for row in rows if all(condition.holds(row) for condition in conditions)]
    if not kept:
        raise ConfigError(f"--filter-by: none of {len(rows)} runs is left")
    return [
        {**row, **{name: number(row, name) // size * size for name, size in bins.items()}}
        for row in kept
    ]


def grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows by the values of some parameters, as text for people; empty without names.

    Raises:
        ConfigError: a row lacks a name.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        text = ", ".join(f"{name}={value_of(row, name)}" for name in names)
        found.setdefault(text, []).append(row)
    return found
