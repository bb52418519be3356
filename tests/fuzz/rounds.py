"""`make fuzz`: rounds of the fuzz tests with random numbers, until the time is over.

    python tests/fuzz/rounds.py --minutes 480 [--first NUMBER] [pytest arguments]

Prints the first number of each round. Ends with 1 if a case failed, after naming the commands
that repeat each; a failed round does not stop the next. Pytest arguments may name files or cases.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

from fuzz_kit import NUMBER_BITS

ROOT = Path(__file__).resolve().parents[2]
TIMES = 5
"""A round is so many short runs: its start, most of it imports, shall not be felt."""
STUCK = 900
"""Seconds after which a case counts as hanging: its stacks are printed, the round ends."""
REPLAY = re.compile(r"^QUIRE_FUZZ_SEED=\d+ python -m pytest .*$", re.MULTILINE)


def run_round(first: int, until: float, extra: list[str]) -> tuple[int, list[str]]:
    """One round; returns pytest's exit code and the commands that repeat what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", f"faulthandler_timeout={STUCK}", "-o", "faulthandler_exit_on_timeout=true"]
    names_files = any((ROOT / word.partition("::")[0]).exists() for word in extra)
    command += extra if names_files else [*extra, "tests/fuzz"]
    environment = os.environ | {
        "QUIRE_FUZZ_FIRST": str(first),
        "QUIRE_FUZZ_TIMES": os.environ.get("QUIRE_FUZZ_TIMES") or str(TIMES),
        "QUIRE_FUZZ_UNTIL": str(until),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if not done.returncode:
        print(done.stdout.strip().rpartition("\n")[2], flush=True)
        return 0, []
    print(done.stdout, flush=True)
    found = list(dict.fromkeys(REPLAY.findall(done.stdout)))
    whole = f"QUIRE_FUZZ_FIRST={first} QUIRE_FUZZ_TIMES={environment['QUIRE_FUZZ_TIMES']} "
    return done.returncode, found or [whole + "python -m pytest " + " ".join(command[3:])]


def main() -> int:
    """Rounds until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="an hour in all unless given")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="no more than so many")
    parser.add_argument("--first", type=int, help="number of the first round; random unless given")
    options, extra = parser.parse_known_args()
    until = time.monotonic() + 60 * (options.minutes + 60 * options.hours or 60)
    first, failures = options.first, list[str]()
    for _ in range(options.rounds):
        if first is None:
            first = secrets.randbits(NUMBER_BITS)
        print(f"round from number {first}:", end=" ", flush=True)
        failures += run_round(first, until, extra)[1]
        first = None
        if time.monotonic() >= until:
            break
    if failures:
        print("to repeat what failed:", *failures, sep="\n  ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
