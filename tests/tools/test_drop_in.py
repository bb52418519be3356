"""docs/drop-in.md is what the script counts, and nothing that was taken is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "drop_in.py"
INCOMPLETE = {"names that scripts import", "HTTP routes", "other members of `SamplingParams`"}


def test_the_page_is_current():
    command = [sys.executable, str(SCRIPT), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_what_is_missing():
    command = [sys.executable, str(SCRIPT), "--json"]
    counts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {title for title, row in counts.items() if row["missing"]} <= INCOMPLETE
    assert counts["names that scripts import"]["taken"] >= 87


def test_the_readme_says_the_same():
    command = [sys.executable, str(SCRIPT), "--json"]
    counts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    readme = (ROOT / "README.md").read_text("utf-8")
    titles = {
        "flags at their own default": "flags at their own default, command line",
        "parameters of `SamplingParams` at their default": None,
        "members of `LLM`": None,
        "names that scripts import": None,
        "HTTP routes": None,
    }
    for told, title in titles.items():
        row = counts[title or told]
        line = next(line for line in readme.splitlines() if line.startswith(f"| {told} |"))
        numbers = [int(cell) for cell in line.strip("|").split("|")[1:] if cell.strip()]
        assert numbers == [n for n in (row["all"], row["taken"], len(row["refused"])) if n], line
