"""Results as files: where they are written, and how one file may hold several."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.bench.options import ServeOptions
from quire.errors import ConfigError


def now() -> datetime.datetime:
    """The time to print."""
    return datetime.datetime.now()


def file_of(options: ServeOptions, model: str, at: datetime.datetime) -> Path:
    """Where the result of a run goes: `--result-dir`, and `--result-filename` or a name made of
    label, rate, concurrency, model and time."""
    name = options.result_filename
    if name is None:
        limit = options.max_concurrency
        parts = [
            options.label or options.backend,
            f"{options.request_rate}qps",
            *([f"concurrency{limit}"] if limit is not None else []),
            model.rstrip("/").rpartition("/")[2],
            at.strftime("%Y%m%d-%H%M%S"),
        ]
        name = "-".join(parts).replace("/", "_") + ".json"
    return Path(options.result_dir or "") / name


def write_result(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write one result; with `append`, after those that are there, on a line of its own.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(result)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write("\n" + text if append and file.tell() else text)
    except OSError as error:
        raise ConfigError(f"cannot write the result {str(path)!r}: {error.strerror}") from None


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """All results in a file, in order.

    Raises:
        ConfigError: it cannot be read, or holds something else; the message tells the line.
    """
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the result {str(path)!r}: {reason}") from None
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(text):
        line = text.count("\n", 0, place) + 1
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: not JSON: {error}") from None
        if not isinstance(value, dict) or "completed" not in value or "duration" not in value:
            raise ConfigError(f"{path}, line {line}: not a result of a benchmark")
        found.append(value)
        while place < len(text) and text[place].isspace():
            place += 1
    if not found:
        raise ConfigError(f"{path}: there is no result in it")
    return found
