"""Every row has a test: the table in docs/required.md is complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"B": 27, "C": 19, "D": 13, "E": 4, "F": 5, "G": 24, "H": 13, "J": 8}
"""How many rows each letter has: behaviours, flags, variables, endpoints, traces, metrics, log
lines, profilers."""
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]


def table() -> dict[str, list[str]]:
    """Row to tests, as the page has them."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "required.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(r"[A-J]\d+(, [A-J]\d+)*", cells[0]):
            for row in cells[0].split(", "):
                found.setdefault(row, []).append(cells[2].strip("`"))
    return found


TABLE = table()


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test(row: str) -> None:
    assert TABLE.get(row), f"no test is named after {row}"
    for test in TABLE[row]:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / "required" / file).read_text("utf-8"))
        named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert row.lower() in name.split("_"), f"{test} is not named after {row}"
        assert ast.get_docstring(named[name]), f"{test} does not say what holds"


def test_no_row_is_made_up() -> None:
    assert set(TABLE) <= set(ROWS)


def test_the_observability_page_leads_to_the_table() -> None:
    assert "(required.md)" in (ROOT / "docs" / "observability.md").read_text("utf-8")
