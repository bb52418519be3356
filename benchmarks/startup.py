"""How long a start takes: the command's help, the import, and a server up to its first token.

    python benchmarks/startup.py                a table; exit code 1 if something is above its limit
    python benchmarks/startup.py --json         one JSON object
    python benchmarks/startup.py --model PATH   another model than the embedded one, without limits

Seconds of a clock and of processors, over all processes; the best of a few, since whatever else the
machine does only makes one slower. The limits are what is promised for the embedded model on two
idle cores; tests count work instead, and hold on a busy machine as well.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO

QUIRE = [sys.executable, "-m", "quire"]


@dataclass(frozen=True)
class Row:
    """What one start took. Seconds."""

    what: str
    wall: float
    processors: float
    limit: float | None
    """Of `wall`."""

    @property
    def kept(self) -> bool:
        return self.limit is None or self.wall <= self.limit


def best(what: str, start: Callable[[], float], rounds: int, limit: float | None) -> Row:
    """The quickest of a few starts; `start` returns its own seconds of a clock."""
    found = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = start()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((wall, sum(after[:2]) - sum(before[:2])))
    return Row(what, min(w for w, _ in found), min(p for _, p in found), limit)


def command(*arguments: str) -> Callable[[], float]:
    """A process that runs to its end."""

    def start() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    return start


def server(model: list[str]) -> float:
    """Seconds from the process's start to the first streamed token; then it is ended."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*QUIRE, "serve", *model, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first_token(ready(process.stdout))
        return time.perf_counter() - begun
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def ready(output: IO[str]) -> str:
    """Base URL, once the server has greeted."""
    said, url = "", None
    for line in output:
        said += line
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        url = url or (found and found.group(0))
        if url and "curl" in line:
            return url
    sys.exit(f"the server ended:\n{said}")


def first_token(url: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                return
    sys.exit("no token came")


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a start takes.")
    parser.add_argument("--model", help="a model folder; the embedded model if left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    model, rounds = [given.model] if given.model else [], given.rounds
    rows = [
        best("quire --help", command("-m", "quire", "--help"), 2 * rounds, 0.15),
        best("quire serve --help", command("-m", "quire", "serve", "--help"), 2 * rounds, 0.25),
        best("import quire", command("-c", "import quire"), 2 * rounds, 0.15),
        best("first token", lambda: server(model), rounds, None if given.model else 3.0),
    ]
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"{'':20}{'wall':>8}{'processors':>12}{'limit':>8}")
        for row in rows:
            limit = "" if row.limit is None else f"{row.limit:.2f}"
            note = "" if row.kept else "  too long"
            print(f"{row.what:20}{row.wall:8.3f}{row.processors:12.3f}{limit:>8}{note}")
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
