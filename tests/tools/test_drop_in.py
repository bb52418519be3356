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
