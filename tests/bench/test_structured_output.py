"""`quire bench structured-output`: its files are those of `bench serve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_server import fake
from quire.bench.result import records_of
from quire.bench.saved import read_results
from quire.cli.benches.structured_output import main
from quire.errors import ConfigError


def test_the_result_is_saved_as_bench_serve_does(tmp_path: Path, capsys):
    with fake() as server:
        for _ in range(2):
            main([
                *("--base-url", server.url, "--num-prompts", "3", "--append-result"),
                *("--save-detailed", "--result-dir", str(tmp_path / "new")),
                *("--result-filename", "r.json", "--report", str(tmp_path / "r.html")),
                *("--plot-timeline", "--plot-dataset-stats"),
                *("--output-json", str(tmp_path / "o.json")),
            ])  # fmt: skip
    results = read_results(tmp_path / "new" / "r.json")
    assert [result["checked"] for result in results] == [3, 3]
    assert all(result["date"] and len(records_of(result)) == 3 for result in results)
    names = {path.name for path in tmp_path.rglob("*.*")}
    assert names == {"r.json", "r.html", "o.json", "r.timeline.html", "r.dataset_stats.html"}
    assert json.loads((tmp_path / "o.json").read_text())["correct"] == 0
    assert "Correct rate(%):" in capsys.readouterr().out


def test_places_are_checked_before_the_load(tmp_path: Path):
    with fake() as server:
        with pytest.raises(ConfigError, match="--report .* is a folder"):
            main(["--base-url", server.url, "--report", str(tmp_path)])
        assert not server.bodies
