"""Runs cases on all engines in turn, in one run: figures of one table never come from two.

A ratio is the median over the rounds of (peer's seconds / quire's of the same round and format). Of
a peer's settings the one that was quickest in a case counts there; the others are told. What the
machine can do is measured before and after each run of quire, because a shared machine's memory is
not equally fast for a minute.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from quire.bench.engine.limit import limit
from quire.bench.engine.options import Case
from quire.bench.engine.workers import BenchedEngine
from quire.errors import StartupError
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.kernels.probe import Probe, Rates
from quire.utils.host import available_cores

OWN: Final = "quire"

Seen = Callable[[str, int, int], None]
"""Called with a case, the rounds of it that are done, and how many there are."""


class Paper(Protocol):
    """What no engine can beat."""

    def rates(self) -> Rates:
        """What the machine gives now."""
        ...

    def seconds(self, case: Case, work: Mapping[str, int], rates: Rates) -> float:
        """For a whole case of what an engine of quire has to do, at these rates."""
        ...


class MachinePaper:
    """The machine's own limits."""

    def __init__(self) -> None:
        set_num_threads(available_cores())
        choose_isa()
        self._probe = Probe()

    def rates(self) -> Rates:
        """What memory and registers give now."""
        return self._probe.measure()

    def seconds(self, case: Case, work: Mapping[str, int], rates: Rates) -> float:
        """See `limit`."""
        return limit(case, work, rates)


def warm_up(workers: Sequence[BenchedEngine], cases: Mapping[str, Case]) -> None:
    """Run the largest case once on each engine: the first run of any engine is slower, and memory
    that the system gives when it is first touched would count in whatever case touches it.

    Raises:
        StartupError: an engine ended.
    """
    largest = max(cases.values(), key=lambda case: case.held)
    for worker in workers:
        worker.run_once(largest, 7)


def measure(
    workers: Sequence[BenchedEngine],
    cases: Mapping[str, Case],
    rounds: int,
    paper: Paper,
    *,
    pause: float = 0.0,
    seen: Seen = lambda what, done, total: None,
) -> dict[str, Any]:
    """Everything of one run, after `warm_up`.

    Args:
        workers: quire's first, one for each format.
        cases: By name.
        rounds: In which each worker runs a case once.
        paper: The limit.
        pause: Seconds before each run.
        seen: Hears how far it is.

    Returns:
        Also if an engine ends (`ended` says which and why) or the user interrupts: then of the
        cases that were done.

    Raises:
        StartupError: an engine ended before the first case was done.
        KeyboardInterrupt: as early.
    """
    results: dict[str, Any] = {}
    ended = ""
    for seed, (name, case) in enumerate(cases.items()):
        try:
            results[name] = _case(
                workers, case, seed, rounds, paper, pause, functools.partial(seen, name)
            )
        except (KeyboardInterrupt, StartupError) as stop:
            if not results:
                raise
            ended = str(stop)
            break
    ratios = {name: _ratios(rows) for name, rows in results.items()}
    return {
        "ended": ended,
        "machine": machine(),
        "versions": {worker.name: worker.about for worker in workers},
        "ready_seconds": {worker.name: round(worker.ready_seconds, 2) for worker in workers},
        "results": results,
        "ratios": ratios,
    }


def _case(
    workers: Sequence[BenchedEngine],
    case: Case,
    seed: int,
    rounds: int,
    paper: Paper,
    pause: float,
    seen: Callable[[int, int], None],
) -> dict[str, Any]:
    """Rows of one case."""
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    limits: dict[str, list[tuple[float, Rates]]] = {}
    seen(0, rounds)
    for number in range(rounds):
        # Whoever begins changes, so that none always follows the other.
        for worker in workers[:: 1 if number % 2 else -1]:
            time.sleep(pause)
            before = paper.rates()
            seconds[worker.name].append(worker.run(case, 1000 * number + seed))
            if worker.peer == OWN:
                rates = before.mean(paper.rates())
                least = paper.seconds(case, worker.about["work"], rates)
                limits.setdefault(worker.row, []).append((least, rates))
        seen(number + 1, rounds)
    rows = _result(workers, case, seconds)
    for row, found in limits.items():
        rows[row]["limit"] = _limit(found, rows[row]["seconds"])
    return rows


def _result(
    workers: Sequence[BenchedEngine], case: Case, seconds: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Seconds and rate of each peer with its best setting, and of all that were tried."""
    rows: dict[str, Any] = {}
    for worker in workers:
        taken = seconds[worker.name]
        row = {
            "seconds": [round(each, 4) for each in taken],
            "tokens_per_second": round(case.tokens / statistics.median(taken), 1),
        }
        best = rows.setdefault(worker.row, {"tried": {}, "tokens_per_second": 0.0})
        best["tried"][worker.setting] = row
        if row["tokens_per_second"] > best["tokens_per_second"]:
            rows[worker.row] = {**row, "setting": worker.setting, "tried": best["tried"]}
    return rows


def _ratios(rows: Mapping[str, Any]) -> dict[str, float]:
    """By engine and format: how many times as fast quire was with that format; of quire's own, as
    how many times the first of them."""
    first = next(iter(rows))
    found = {}
    for name, row in rows.items():
        if name == first:
            continue
        peer, form = name.split(" ")
        theirs, ours = row["seconds"], rows[f"{OWN} {form}"]["seconds"]
        if peer == OWN:
            theirs = rows[first]["seconds"]
        found[name] = round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 3)
    return found


def _limit(limits: Sequence[tuple[float, Rates]], ours: Sequence[float]) -> dict[str, Any]:
    fractions = [limit / taken for (limit, _), taken in zip(limits, ours, strict=True)]
    return {
        "seconds": [round(limit, 4) for limit, _ in limits],
        "gb_per_second": [round(rates.read / 1e9, 1) for _, rates in limits],
        "gflop_per_second": [round(rates.multiply / 1e9) for _, rates in limits],
        "gop_per_second_of_codes8": [round(rates.multiply_codes8 / 1e9) for _, rates in limits],
        "gop_per_second_of_codes4": [round(rates.multiply_codes4 / 1e9) for _, rates in limits],
        "gop_per_second_of_groups8": [round(rates.multiply_groups8 / 1e9) for _, rates in limits],
        "gop_per_second_of_groups4": [round(rates.multiply_groups4 / 1e9) for _, rates in limits],
        "fraction": round(statistics.median(fractions), 3),
    }


def machine() -> dict[str, Any]:
    """What this ran on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    about = dict(line.split("\t:", 1) for line in reversed(lines) if "\t:" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    name = about.get("model name", platform.processor())
    if "cpu family" in about:
        name += f" (family {about['cpu family']}, model {about['model']})"
    return {
        "cpu": name,
        "cores": available_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
