"""The table in docs/scheduling.md is what the benchmark prints, and shows what policies are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table() -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "policies.py"), "--markdown"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_table_is_current(table: str) -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text("utf-8")
    assert table in page, "paste the output of `python benchmarks/policies.py --markdown`"


def test_policies_do_what_they_are_for(table: str) -> None:
    lines = [[c.strip() for c in line.strip("|\n").split("|")] for line in table.splitlines()]
    rows = {line[0]: [float(c) for c in line[1:]] for line in lines[2:]}
    mean, p99, quiet, urgent = range(4)
    assert rows["sjf"][mean] == min(row[mean] for row in rows.values())
    assert rows["fair"][quiet] == min(row[quiet] for row in rows.values())
    assert rows["priority, priority_preemption"][urgent] == min(r[urgent] for r in rows.values())
    assert rows["priority"][urgent] < rows["fcfs"][urgent] / 4
    assert rows["fcfs"][p99] < rows["sjf"][p99] < rows["ljf"][p99]
