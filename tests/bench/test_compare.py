"""Comparisons: what is the same counts as the same, what differs is seen."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.bench.compare import Difference, compare
from quire.bench.plots import PlottedRun, intervals, length_histograms, timeline
from quire.bench.report import ReportRun, write_page, write_report
from quire.bench.result import RequestRecord, detailed, records_of, summary
from quire.bench.saved import write_result
from quire.cli.benches.compare import main, table_of
from quire.errors import ConfigError


def made(seed: int, num: int = 200, slower: float = 1.0, likeness: float = 0.5) -> dict[str, Any]:
    """A run whose requests are like their neighbours, as in a queue."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(num)
    for i in range(1, num):
        z[i] = likeness * z[i - 1] + math.sqrt(1 - likeness**2) * z[i]
    records = []
    for i in range(num):
        ttft = slower * 0.05 * math.exp(0.5 * z[i])
        gaps = (0.01 * np.exp(0.3 * z[i] + 0.3 * rng.standard_normal(12))).tolist()
        end = i * 0.1 + ttft + sum(gaps)
        records.append(RequestRecord(i * 0.1, 10, 13, i * 0.1 + ttft, gaps, end))
    return summary(records, num * 0.1) | detailed(records) | {"num_prompts": num}


def test_equal_runs_are_the_same_in_95_percent():
    same: Counter[str] = Counter()
    for seed in range(20):
        for d in compare([made(2 * seed)], [made(2 * seed + 1)], seed=seed):
            if d.verdict != "unknown":
                same[d.name] += d.verdict == "same"
    assert len(same) == 9
    # Of 20, 17 or more hold 0 in 98 of 100 tests if each does so in 95 of 100.
    assert min(same.values()) >= 17, same
    assert sum(same.values()) < 20 * 9, "intervals are not so wide that they hold everything"


@pytest.mark.parametrize("repetitions", [3, 10])
def test_equal_repetitions_are_the_same_in_95_percent(repetitions):
    rng = np.random.default_rng(repetitions)

    def group() -> list[dict[str, Any]]:
        values = np.exp(rng.normal(0, 0.05, repetitions))
        return [{"completed": 1, "request_throughput": float(value)} for value in values]

    verdicts = [compare(group(), group())[0].verdict for _ in range(600)]
    assert 0.92 < verdicts.count("same") / 600 < 0.995


def test_welch_interval_is_as_published():
    """Two samples of three, computed by hand: means 1 and 2, variances 1 and 1, t(4) = 2.776."""
    a, b = ([{"completed": 1, "output_throughput": math.exp(v)} for v in values]
            for values in ((0.0, 1.0, 2.0), (1.0, 2.0, 3.0)))  # fmt: skip
    (d,) = compare(a, b)
    margin = 2.776 * math.sqrt(2 / 3)
    assert math.log1p(d.change) == pytest.approx(1.0)
    assert [math.log1p(d.low or 0), math.log1p(d.high or 0)] == pytest.approx(
        [1 - margin, 1 + margin], abs=1e-6
    )


def test_a_slower_run_is_worse():
    found = {d.name: d for d in compare([made(1)], [made(2, slower=1.5)])}
    ttft = found["Mean TTFT (ms)"]
    assert ttft.verdict == "worse" and ttft.low is not None and ttft.high is not None
    assert ttft.low < 0.5 < ttft.high
    assert found["Mean TPOT (ms)"].verdict == "same"
    back = {d.name: d.verdict for d in compare([made(2, slower=1.5)], [made(1)])}
    assert back["Mean TTFT (ms)"] == "better"


def test_what_cannot_be_said_is_not_said():
    found = {d.name: d for d in compare([made(1)], [made(2)])}
    assert found["P99 TTFT (ms)"].verdict == "unknown"
    assert found["P99 TTFT (ms)"].note == "needs 1000 samples, got 200"
    assert found["P99 ITL (ms)"].verdict != "unknown", "there are 2400 gaps"
    assert "--append-result" in found["Request throughput (req/s)"].note
    few = compare([made(1, 30)], [made(2, 30)])
    assert {d.verdict for d in few} == {"unknown"}
    with pytest.raises(ConfigError, match="at least 3 results on each side, got 2 and 1"):
        compare([made(1), made(2)], [made(3)])
    with pytest.raises(ConfigError, match="second side .* no request was answered"):
        compare([made(1)], [{"completed": 0}])


def instant(at: float, num: int = 200) -> dict[str, Any]:
    """A run whose outputs come all at once, `at` seconds after each request was sent."""
    records = [RequestRecord(i * 0.1, 10, 3, i * 0.1 + at, [at, at], i * 0.1 + at)
               for i in range(1, num + 1)]  # fmt: skip
    return summary(records, num * 0.1) | detailed(records) | {"num_prompts": num}


@pytest.mark.parametrize("zero", [0.0, -0.01])
def test_figures_that_are_not_above_0_have_no_ratio(zero, tmp_path, capsys):
    gap = "Mean ITL (ms)"
    gone = {d.name: d for d in compare([made(1)], [instant(zero)])}[gap]
    assert (gone.low, gone.verdict, gone.note) == (None, "unknown", "needs figures above 0")
    assert gone.change <= -1
    come = {d.name: d for d in compare([instant(zero)], [made(1)])}[gap]
    assert (come.low, come.verdict, come.note) == (None, "unknown", "needs figures above 0")
    assert math.isnan(come.change)
    a, b = (str(tmp_path / name) for name in ("a.json", "b.json"))
    write_result(Path(a), instant(zero))
    write_result(Path(b), made(1))
    assert main([a, b]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if gap in line]
    assert line.endswith("needs figures above 0") and "%" not in line
    assert main([a, b, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[gap]["change"] is None and rows[gap]["after"] > 0


def test_a_figure_that_chance_makes_0_has_no_ratio():
    records = [RequestRecord(i * 0.1, 10, 3, i * 0.1 + 0.1, [0.0 if i % 40 < 19 else 0.02] * 2,
                             i * 0.1 + 0.3) for i in range(1, 201)]  # fmt: skip
    nearly = summary(records, 20.0) | detailed(records) | {"num_prompts": 200}
    assert nearly["median_itl_ms"] > 0, "but half of the replicates have a median of 0"
    found = {d.name: d for d in compare([made(1)], [nearly])}["Median ITL (ms)"]
    assert (found.low, found.high, found.verdict) == (None, None, "unknown")
    assert found.note == "may be 0 by chance, so there is no ratio"


def test_wide_intervals_leave_the_table_and_the_plot_readable():
    wide = Difference("Mean ITL (ms)", 1.0, 5.0, 4.0, -0.99, 1e12, False)
    narrow = Difference("Mean TTFT (ms)", 1.0, 1.1, 0.1, -0.123, 0.456, False)
    heads, *rows = table_of([wide, narrow]).splitlines()
    assert [row.index("same") for row in rows] == [heads.index("verdict")] * 2
    assert "-99.0% to over +1000%" in rows[0] and "-12.3% to +45.6%" in rows[1]
    drawn = intervals(["wide", "narrow"], [(-0.99, 4.0, 1e12), (-0.1, 0.1, 0.3)])
    (upwards,) = re.findall(r'"array":\{"dtype":"f8","bdata":"([^"]*)"', drawn)
    assert np.frombuffer(base64.b64decode(upwards)) == pytest.approx([600.0, 20.0])


def test_the_command(tmp_path, capsys):
    a, b, page = (str(tmp_path / name) for name in ("a.json", "b.json", "r.html"))
    write_result(Path(a), made(1))
    write_result(Path(b), made(2, slower=2.0))
    assert main([a, b, "--report", page]) == 0
    out = capsys.readouterr().out
    assert re.search(r"Mean TTFT \(ms\) .*% to .*% +worse", out)
    assert "B is worse in Mean TTFT (ms)" in out and "One run of each" in out
    assert "verdict" in Path(page).read_text("utf-8")
    for path in (a, b):
        for seed in (5, 6):
            write_result(Path(path), made(seed), append=True)
    assert main([a, b]) == 0
    assert "One run of each" not in capsys.readouterr().out
    write_result(Path(a), made(1))
    write_result(Path(b), made(2, slower=2.0))
    assert main([a, b, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["name"] == "Mean TTFT (ms)" and rows[0]["verdict"] == "worse"
    write_result(Path(b), summary(records_of(made(2)), 20.0))
    with pytest.raises(ConfigError, match="save it with --save-detailed"):
        main([a, b])


# ---- the report ----------------------------------------------------------------------------------


def test_other_loads_are_told(tmp_path, capsys):
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    write_result(Path(a), made(1) | {"request_rate": 5.0, "max_concurrency": None})
    write_result(Path(b), made(2) | {"request_rate": "inf", "max_concurrency": 4})
    write_result(Path(c), made(3) | {"request_rate": 5.0, "max_concurrency": None})
    assert main([a, b, "--report", str(tmp_path / "r.html")]) == 0
    told = "The loads differ: request_rate (5.0 and inf), max_concurrency (none and 4)."
    assert told in capsys.readouterr().out and told in (tmp_path / "r.html").read_text()
    assert main([a, c]) == 0
    assert "The loads differ" not in capsys.readouterr().out


def test_a_report_opens_offline(tmp_path):
    result = made(1)
    records = records_of(result) + [RequestRecord(0.0, 5, error="<refused>")]
    path = tmp_path / "deep" / "report.html"
    write_report(path, "A <run>", [ReportRun("one", result, records)], notes=["1 < 2"])
    text = path.read_text("utf-8")
    assert "A &lt;run&gt;" in text and "1 &lt; 2" in text
    own = text[: text.index("<script>")] + text[text.index("</script>") :]
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", own), "nothing is loaded"
    assert "default-src 'none'" in text
    assert "Plotly.newPlot" in own and text.count("Plotly.newPlot(") >= 3
    assert "@media print" in text
    for title in ("Time to First Token", "Outputs per second", "TTFT by prompt length"):
        assert title in own
    assert f"{result['mean_ttft_ms']:,.2f}" in own


def test_plots_of_nothing(tmp_path):
    result = summary([], 1.0)
    write_report(tmp_path / "r.html", "empty", [ReportRun("none", result, [])])
    silent = [RequestRecord(0.0, 5, 0, None, [], 1.0)]  # answered, with nothing
    write_report(tmp_path / "r.html", "silent", [ReportRun("none", result, silent)])
    none = PlottedRun("none", [])
    write_page(tmp_path / "p.html", "empty", [timeline(none), length_histograms([none])])


def test_long_runs_make_no_large_files(tmp_path):
    records = [RequestRecord(i / 100, 5, 30, i / 100 + 0.1, [0.01] * 29, i / 100 + 0.4)
               for i in range(6000)]  # fmt: skip
    write_report(tmp_path / "r.html", "long", [ReportRun("x", summary(records, 60.0), records)])
    assert (tmp_path / "r.html").stat().st_size < 8_000_000, "plotly itself has five million"
    with pytest.raises(ConfigError, match="cannot write the report"):
        write_page(tmp_path, "a folder", [])
