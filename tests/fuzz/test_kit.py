"""The frame keeps its word: numbers repeat, and a failure names its own."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz_kit import cases, generator, numbers, replay_line

ROOT = Path(__file__).resolve().parents[2]
FAILING = """
from fuzz_kit import cases

@cases(4)
def test_some(rng, fuzz_number):
    assert rng.random() < 0.8, f"case {fuzz_number}"
"""
FIRST = 77_000


@cases(3)
def test_a_case_follows_from_its_number(rng: random.Random, fuzz_number: int) -> None:
    again = generator("test_a_case_follows_from_its_number", fuzz_number)
    assert rng.random() == again.random()
    assert generator("another_test", fuzz_number).random() != again.random()


def test_the_environment_chooses_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEED", "FIRST", "TIMES"):
        monkeypatch.delenv(f"QUIRE_FUZZ_{name}", raising=False)
    assert numbers(3) == [0, 1, 2]
    monkeypatch.setenv("QUIRE_FUZZ_FIRST", "50")
    monkeypatch.setenv("QUIRE_FUZZ_TIMES", "0.5")
    assert numbers(4) == [50, 51]
    assert numbers(1) == [50]
    monkeypatch.setenv("QUIRE_FUZZ_SEED", "9")
    assert numbers(3) == [9]


def test_other_parameters_stay_in_the_line() -> None:
    assert (
        replay_line("tests/fuzz/test_x.py::test_y[fcfs-12]", 12)
        == "QUIRE_FUZZ_SEED=12 python -m pytest tests/fuzz/test_x.py::test_y -k 'fcfs'"
    )


def test_a_round_names_the_commands_that_repeat_its_failures(tmp_path: Path) -> None:
    """Through the very script of `make fuzz`, on a small suite of its own."""
    for name in ("fuzz_kit.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / "fuzz" / name, tmp_path / name)
    (tmp_path / "test_some.py").write_text(FAILING, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n", "utf-8")
    bad = {n for n in range(FIRST, FIRST + 20) if generator("test_some", n).random() >= 0.8}
    assert 0 < len(bad) < 20

    environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_FUZZ")}
    rounds = [sys.executable, "tests/fuzz/rounds.py", "--rounds", "1", "--first", str(FIRST)]
    done = subprocess.run(
        [*rounds, str(tmp_path)],
        cwd=ROOT, env=environment | {"QUIRE_FUZZ_TIMES": "5"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith(f"round from number {FIRST}: ")
    told = done.stdout.partition("to repeat what failed:")[2]
    lines = re.findall(r"QUIRE_FUZZ_SEED=(\d+) python -m pytest .*test_some.py::test_some", told)
    assert sorted(map(int, lines)) == sorted(bad)
