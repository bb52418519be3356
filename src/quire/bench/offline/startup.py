"""How long the engine takes to start: `quire bench startup`.

Each start is a process of its own (`startup_child.py`), so imports count. quire compiles nothing
and keeps no cache of compiled code. What a start can find is the model's files in the memory of the
system: before each cold start the system is asked to drop them (`posix_fadvise`), and a warm start
finds them there. Python's own files stay where they are. Text and JSON have the form of `vllm bench
startup`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.bench.offline.options import StartupOptions
from quire.errors import StartupError

PERCENTAGES: Final = (10, 25, 50, 75, 90, 99)
PARTS: Final = {
    "startup_time": "total startup time",
    "compilation_time": "compilation time",
    "import_time": "import time",
    "load_time": "engine start time",
    "first_token_time": "time to first token",
}
"""What is measured, in the order in which it is told: the key, and its name in the text. The first
is from the start of the process to an engine that is ready; imports and the engine's start are
parts of it; the first token comes after."""
CLEARED: Final = (
    "cold: the system was asked to drop the model's files from its memory before each start; quire "
    "compiles nothing, so there is no other cache"
)


def measure_startup(
    engine: Mapping[str, Any],
    folder: Path,
    options: StartupOptions,
    seen: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Start the engine as often as asked for, each time in a new process.

    Args:
        engine: Arguments of `LLM`.
        folder: Of the model; its files are dropped before cold starts.
        options: How often.
        seen: Called with (what, done, total) after each start.

    Raises:
        StartupError: a start failed or took too long; its last words are in the message.
    """

    def cold() -> dict[str, float]:
        drop_files(folder)
        return start_once(engine, options.start_timeout)

    def warm() -> dict[str, float]:
        return start_once(engine, options.start_timeout)

    found: dict[str, list[dict[str, float]]] = {}
    for what, num, start in (
        ("cold", options.num_iters_cold, cold),
        ("warmup", options.num_iters_warmup, warm),
        ("warm", options.num_iters_warm, warm),
    ):
        found[what] = []
        seen(f"{what} starts", 0, num)
        for number in range(num):
            found[what].append(start())
            seen(f"{what} starts", number + 1, num)
    return startup_result(found["cold"], found["warm"])


def drop_files(folder: Path) -> int:
    """Ask the system to forget the contents of a folder's files; returns how many files. What
    another process has mapped stays."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return len(files)


def start_once(engine: Mapping[str, Any], timeout: float) -> dict[str, float]:
    """Seconds of each of `PARTS` for one start.

    Raises:
        StartupError: it failed or took too long.
    """
    begun = time.monotonic()
    job = json.dumps({"engine": dict(engine), "begun": begun})
    command = [sys.executable, "-m", "quire.bench.offline.startup_child"]
    try:
        done = subprocess.run(
            command, input=job, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"the engine was not ready after {timeout:g} s (--start-timeout)"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = " ".join(done.stderr.strip().splitlines()[-1:]) or "it said nothing"
        raise StartupError(f"a start ended with code {done.returncode}: {said}")
    return {name: float(value) for name, value in json.loads(lines[-1]).items()}


def startup_result(
    cold: Sequence[Mapping[str, float]], warm: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """The JSON: of each kind of start and part the mean, all values, and percentiles. Seconds."""
    result: dict[str, Any] = {"cleared": CLEARED}
    for kind, starts in (("cold", cold), ("warm", warm)):
        for part in PARTS:
            values = np.array([start[part] for start in starts])
            result[f"avg_{kind}_{part}"] = float(np.mean(values))
            result[f"{kind}_{part}s"] = [float(value) for value in values]
            found = np.percentile(values, PERCENTAGES)
            result[f"{kind}_{part.removesuffix('_time')}_percentiles"] = {
                str(p): float(v) for p, v in zip(PERCENTAGES, found, strict=True)
            }
    return result


def startup_text(result: Mapping[str, Any]) -> str:
    """The block of `vllm bench startup`."""
    lines = ["=" * 60, "STARTUP TIME BENCHMARK RESULTS", "=" * 60]
    for kind in ("cold", "warm"):
        lines += ["", f"{kind.upper()} STARTUP:"]
        for part, name in PARTS.items():
            lines.append(f"Avg {name}: {result[f'avg_{kind}_{part}']:.2f} seconds")
        for part in ("startup", "first_token"):
            lines.append(f"{PARTS[f'{part}_time'].capitalize()} percentiles:")
            found = result[f"{kind}_{part}_percentiles"]
            lines += [f"  {p}%: {value:.2f} seconds" for p, value in found.items()]
    return "\n".join([*lines, "", f"({result['cleared']})", "=" * 60])
