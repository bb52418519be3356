"""Runs faults one after the other, each against a server of its own, and reports what held.

`python tests/chaos/drill.py [F1 F3 ...] [--size usual] [--json FILE]`; `make chaos` and
`make chaos-long`. The exit code is 1 if a row that is promised does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(TESTS / name) for name in ("chaos", "e2e", "support")]

import psutil

from chaos_server import ChaosServer, chaos_server
from conditions import CONDITIONS, Trial, Watch, idle_cpu
from faults import CACHE, SIZES, Fault, Size, faults
from mixed_load import (
    CANARY,
    Ask,
    Load,
    asked_again,
    has_own_answer,
    mixed_asks,
    references,
    run_all,
)
from quire.utils.process import raise_descriptor_limit
from soaks import soaks
from surroundings import Around, Unavailable

LIMITS = {"short": 240, "usual": 480, "long": 3600}
"""Seconds of one fault, by size."""
MOST_RETOLD = 48
"""Requests without a seed of their own that are asked again, of one trial."""


@dataclass
class Result:
    """One row of the report."""

    fault: str
    injected: str
    mechanism: str
    promised: bool
    state: str
    """`holds`, `does not hold`, `not built` or `not possible here`."""
    complaints: dict[str, list[str]] = field(default_factory=dict)
    """By condition; `its own` is what the row asks for."""
    requests: int = 0
    lost: int = 0
    changed: int = 0
    recovery_p50: float | None = None
    recovery_max: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Of what is sorted; `None` of nothing."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 4) if values else None


async def try_fault(name: str, fault: Fault, size: Size) -> Result:
    """One fault against a server of its own."""
    row = Result(name, fault.injected, fault.mechanism, fault.promised, "not built")
    if fault.driver is None:
        return row
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        around = Around()
        if fault.around is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-chaos-")))
            try:
                around = stack.enter_context(fault.around(folder))
            except Unavailable as why:
                row.state, row.facts = "not possible here", {"why": str(why)}
                return row
        server = stack.enter_context(
            chaos_server(*CACHE, *fault.args, *around.args, env=around.env)
        )
        asks = mixed_asks(fault.streams or size.streams)
        trial = await _prepare(server, asks)
        trial.around, trial.may_refuse = around, fault.may_refuse
        try:
            await trial.load.during(fault.driver(trial, size))
        finally:
            trial.watch.close()
        if trial.lives:
            await _after(trial)
        complaints = {what: list(check(trial)) for what, check in CONDITIONS.items()}
        recoveries = sorted(trial.recoveries())
    complaints["its own"] = trial.complaints
    row.complaints = {what: told for what, told in complaints.items() if told}
    row.state = "does not hold" if row.complaints else "holds"
    row.requests = trial.load.num_done + len(trial.load.canaries)
    row.lost, row.changed = len(complaints["nothing lost"]), len(complaints["same bytes"])
    row.recovery_p50, row.recovery_max = quantile(recoveries, 0.5), quantile(recoveries, 1)
    gaps = trial.gaps()
    row.gap_p50, row.gap_p99 = quantile(gaps, 0.5), quantile(gaps, 0.99)
    row.facts, row.seconds = trial.facts, round(time.monotonic() - start, 1)
    return row


async def _prepare(server: ChaosServer, asks: list[Ask]) -> Trial:
    url = server.url
    canary, *expected = await references(url, [CANARY, *asks])
    wrong = [a.name for a, out in zip(asks, expected, strict=True) if not out.is_whole]
    assert canary.is_whole and not wrong, f"no fault-free answer of {wrong}"
    # Once more, so that what is kept for good (threads, caches, allocator) is there already.
    again = await run_all(url, asks)
    for ask, a, b in zip(asks, expected, again, strict=True):
        assert a == b or not has_own_answer(ask), f"{ask.name} is not repeatable without faults"
    assert server.wait_quiet(), "it does not become idle"
    load = Load(url, asks, expected)
    return Trial(server, load, canary, server.held(), Watch(server))


async def _after(trial: Trial) -> None:
    """What must be seen of a server that lives on, once the load has gone."""
    server, load = trial.server, trial.load
    server.until("/readyz", 200, 30)
    open_ended = [
        p for p, (index, out) in enumerate(load.done)
        if out.is_whole and not has_own_answer(load.asks[index])
    ]  # fmt: skip
    chosen = random.Random(2).sample(open_ended, min(MOST_RETOLD, len(open_ended)))
    asks, outs = [load.asks[load.done[p][0]] for p in chosen], [load.done[p][1] for p in chosen]
    trial.retold = dict(zip(chosen, await asked_again(load.url, asks, outs), strict=True))
    trial.facts["retold"] = len(chosen)
    server.wait_quiet()
    trial.cpu_idle = await idle_cpu(server)


HEADINGS = ("fault", "state", "requests", "lost", "changed", "recovery p50/max s", "gap p50/p99 ms")


def table(results: Sequence[Result]) -> str:
    """The report as text: a table, and below it what does not hold and why."""

    def pair(a: float | None, b: float | None, times: float, digits: int) -> str:
        if a is None or b is None:
            return "-"
        return f"{a * times:.{digits}f} / {b * times:.{digits}f}"

    rows = [HEADINGS]
    for r in results:
        counts = ("-",) * 3 if r.state.startswith("not ") else (r.requests, r.lost, r.changed)
        rows.append((
            f"{r.fault} {r.injected}", r.state, *map(str, counts),
            pair(r.recovery_p50, r.recovery_max, 1, 2), pair(r.gap_p50, r.gap_p99, 1000, 0),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for r in results:
        for what, told in r.complaints.items():
            lines.append(f"{r.fault}, {what}: {len(told)} times, first: {told[0]}")
    facts = [f"{r.fault}: {r.facts} ({r.seconds} s)" for r in results if r.facts]
    return "\n".join([*lines, *facts])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Faults against a server, and what held.")
    rows = faults() | soaks("usual")
    parser.add_argument(
        "fault", nargs="*",
        help=f"of {' '.join(rows)}; default: the F rows, of size long also the S rows",
    )  # fmt: skip
    parser.add_argument("--size", choices=SIZES, default="usual")
    parser.add_argument("--alone", action="store_true", help="this fault, in this process")
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    args = parser.parse_args(argv)
    raise_descriptor_limit()
    if unknown := set(args.fault) - set(rows):
        parser.error(f"no fault {sorted(unknown)[0]!r}; there are {', '.join(rows)}")
    rows = faults() | soaks(args.size)
    usual = rows if args.size == "long" else faults()
    if args.alone:
        assert len(args.fault) == 1 and args.json, "a fault and a file"
        name = args.fault[0]
        result = asyncio.run(try_fault(name, rows[name], SIZES[args.size]))
        args.json.write_text(json.dumps(vars(result)), "utf-8")
        return 0
    results, start = [], time.monotonic()
    for name in args.fault or usual:
        results.append(in_its_own_process(name, rows[name], args.size))
        told = f"{name}: {results[-1].state}, {results[-1].seconds:.0f} s"
        print(told, file=sys.stderr, flush=True)
        if args.json:
            _write(args.json, args.size, results)
    print(table(results))
    print(f"{time.monotonic() - start:.0f} s in all")
    return int(any(r.promised and r.state == "does not hold" for r in results))


def in_its_own_process(name: str, fault: Fault, size: str) -> Result:
    """One fault; whatever goes wrong with it, the others run."""
    row = Result(name, fault.injected, fault.mechanism, fault.promised, "not built")
    if fault.driver is None:
        return row
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quire-drill-") as folder:
        told = Path(folder, "row.json")
        command = [sys.executable, __file__, name, "--size", size, "--alone", "--json", str(told)]
        run = subprocess.Popen(command, start_new_session=True)
        try:
            code = run.wait(LIMITS[size])
            why = f"the drill ended with exit code {code}; what it printed is above"
        except subprocess.TimeoutExpired:
            why = f"it was not over within {LIMITS[size]} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            _unmount()
        if told.exists():
            row = Result(**json.loads(told.read_text("utf-8")))
        else:
            row.state, row.complaints = "does not hold", {"its own": [why]}
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _unmount() -> None:
    """Remove the small file systems that a drill could not remove itself."""
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.startswith("quire-chaos "):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)


def _write(path: Path, size: str, results: Sequence[Result]) -> None:
    machine = f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} CPUs"
    told = {"size": size, "machine": machine, "faults": [vars(r) for r in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
