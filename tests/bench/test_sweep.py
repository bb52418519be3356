"""Sweeps: what runs, what does not run again, and what is seen in the results."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from patience import wait_for
from quire.bench.plots import curve_plot
from quire.bench.sweep import server_place
from quire.bench.sweep.front import CurvePoint, curves, devices_of, facets, pareto_front, speeds
from quire.bench.sweep.grid import arguments_of, links_of, name_of, points_of, read_params
from quire.bench.sweep.rows import bins_of, conditions_of, number, selected
from quire.bench.sweep.run import SweepCommands, rows_of, run_points
from quire.bench.sweep.workload import between, extremes
from quire.cli import main as cli
from quire.cli.benches.sweep import ABOUT, SWEEPS
from quire.errors import ConfigError

BENCH = """
import argparse, json, os, pathlib, sys
p = argparse.ArgumentParser()
p.add_argument("--result-dir"); p.add_argument("--result-filename"); p.add_argument("--log")
p.add_argument("--max-concurrency", type=int, default=0); p.add_argument("--fail-at", type=int)
p.add_argument("--hang-at", type=int); p.add_argument("--output-json")
p.add_argument("--ready-check-timeout-sec"); p.add_argument("--request-rate")
a, rest = p.parse_known_args()
with open(a.log, "a") as f: f.write(f"{a.max_concurrency}\\n")
if a.fail_at == a.max_concurrency: sys.exit(3)
if str(a.max_concurrency) in (str(a.hang_at), os.environ.get("HANG_AT")):
    import time; time.sleep(600)
c = a.max_concurrency
result = {"max_concurrency": c, "output_throughput": 100.0 * c / (c + 4),
          "request_throughput": 1.0 + c, "p99_ttft_ms": 5.0 * c, "lists": [1],
          "given": " ".join(rest)}
path = a.output_json or pathlib.Path(a.result_dir) / a.result_filename
pathlib.Path(path).write_text(json.dumps(result))
"""


@pytest.fixture
def bench(tmp_path):
    """A command that writes a result at once, and the log of its runs."""
    script, log = tmp_path / "bench.py", tmp_path / "runs.log"
    script.write_text(BENCH)
    log.touch()
    return [sys.executable, str(script), "--log", str(log)], log


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["bench", "sweep", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def grid(tmp_path: Path, *values: int) -> str:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([{"max_concurrency": value} for value in values]))
    return str(path)


def test_parameters_become_flags(tmp_path):
    params = {
        "max_num_seqs": 4,
        "a-b": "x y",
        "on": True,
        "off": False,
        "none": None,
        "j": {"k": 1},
    }
    assert arguments_of(params) == [
        "--max-num-seqs", "4", "--a-b", "x y", "--on", "--no-off", "--j", '{"k": 1}',
    ]  # fmt: skip
    assert name_of({"a-b": "x/y z"}) == "a_b=x_y_z" and name_of({}) == "default"
    path = tmp_path / "p.json"
    path.write_text('{"small": {"n-n": 1}, "large": {"n_n": 2}}')
    found = read_params(str(path), "--x")
    assert [name_of(p) for p in found] == ["small", "large"]
    assert [arguments_of(p) for p in found] == [["--n-n", "1"], ["--n-n", "2"]]


def test_a_sweep_goes_on_where_it_was(bench, tmp_path):
    command, log = bench
    points = points_of(tmp_path / "out", [{}], [{"max_concurrency": c} for c in (1, 2, 3)], 2)
    failing = SweepCommands([*command, "--fail-at", "2"])
    outcome = run_points(points, failing)
    assert outcome.num_run == 6 and len(outcome.failures) == 2
    assert all("it ended with code 3" in failure for failure in outcome.failures)
    assert log.read_text().split() == ["1", "1", "2", "2", "3", "3"]
    assert [row["max_concurrency"] for row in rows_of(points)] == [1, 1, 3, 3]
    log.write_text("")
    again = run_points(points, SweepCommands(command))
    assert again.num_found == 4 and again.num_run == 2 and not again.failures
    assert log.read_text().split() == ["2", "2"]
    points[0].file.write_text("half a resu")  # what a crash may leave is no result
    log.write_text("")
    run_points(points, SweepCommands(command))
    assert log.read_text().split() == ["1"]


def test_a_killed_sweep_repeats_nothing(bench, tmp_path, capsys):
    command, log = bench
    arguments = [
        "serve", "--bench-params", grid(tmp_path, 1, 2, 3), "--num-runs", "1",
        "--output-dir", str(tmp_path / "results"),
    ]  # fmt: skip
    arguments += ["--bench-cmd", " ".join(command)]
    killed = subprocess.Popen(
        [sys.executable, "-m", "quire", "bench", "sweep", *arguments],
        stderr=subprocess.DEVNULL, env={**os.environ, "HANG_AT": "2"},
    )  # fmt: skip
    wait_for(lambda: log.read_text().split() == ["1", "2"])
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    log.write_text("")
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and log.read_text().split() == ["2", "3"]
    assert out.startswith("3 of 3 runs, 1 of them from before")
    with open(tmp_path / "results" / "serve" / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["max_concurrency"] for row in rows] == ["1", "2", "3"]
    assert "lists" not in rows[0]


def test_a_dead_server_ends_the_run(bench, tmp_path):
    command, _ = bench
    points = points_of(tmp_path / "out", [{"x": 1}], [{"max_concurrency": 1}], 1)
    server = [sys.executable, "-c", "import sys; sys.exit(4)"]
    commands = SweepCommands([*command, "--hang-at", "1"], server)
    outcome = run_points(points, commands)
    assert "the server ended with code 4" in outcome.failures[0]
    commands = SweepCommands([*command, "--hang-at", "1"])
    commands.timeout = 0.3  # of a run that never ends
    assert "no end after 0.3 s (--run-timeout)" in run_points(points, commands).failures[0]


def test_no_other_server_is_measured(bench, tmp_path, monkeypatch):
    command, log = bench
    monkeypatch.setattr(server_place, "FREE_SECONDS", 0.0)
    starts = tmp_path / "starts"
    server = [sys.executable, "-c", f"open({str(starts)!r}, 'w'); import time; time.sleep(60)"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        points = points_of(tmp_path / "out", [{"x": 1}], [{"port": port}], 2)
        failures = run_points(points, SweepCommands(command, server)).failures
        assert len(failures) == 2 and f"listens at 127.0.0.1:{port} already" in failures[0]
        assert not log.read_text() and not starts.exists()
        assert not run_points(points, SweepCommands(command)).failures, (
            "without a server of its own"
        )
    for point in points:
        point.file.unlink()
    assert not run_points(points, SweepCommands(command, server)).failures


@pytest.mark.parametrize(
    ("serve", "inner", "port"),
    [
        ("quire serve --port 8123", {"port": 8000}, 8123),
        ("quire serve --port=8123", {"base_url": "http://localhost:8124/v1"}, 8123),
        ("python -m quire serve", {"port": 8001}, 8000),
    ],
)
def test_a_load_that_asks_elsewhere_is_told_at_once(bench, tmp_path, serve, inner, port):
    """It would wait ten minutes in each run for a server that listens on another port."""
    command, log = bench
    points = points_of(tmp_path / "out", [{}], [inner], 2)
    failures = run_points(points, SweepCommands(command, serve.split())).failures
    assert len(failures) == 2 and f"--serve-cmd listens on {port}" in failures[0]
    assert not log.read_text()


@pytest.mark.parametrize(
    ("serve", "port"),
    [
        ("quire serve M --port 1 --port 2", 2),
        ("quire serve --config f.yaml", None),
        ("quire serve --config f.yaml --port 3", 3),
        ("quire serve --uds socket", None),
        ("other program", None),
        ("other serve", None),
        ("/somewhere/bin/vllm serve M", 8000),
        ("quire serve --port x", None),
    ],
)
def test_which_port_a_server_has(serve, port):
    assert server_place.port_of(serve.split()) == port


def test_a_load_whose_server_has_ended_counts_as_failed(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    code = f"import os, time\nwhile not os.path.exists({str(gone)!r}): time.sleep(0.01)"
    # The load ends well, and a moment before it the server has.
    load = (
        f"import sys, time; open({str(gone)!r}, 'w'); time.sleep(1)\n"
        "open(sys.argv[sys.argv.index('--result-dir') + 1] + '/run=0.part', 'w').write('{}')"
    )
    points = points_of(tmp_path / "out", [{}], [{}], 1)
    commands = SweepCommands([sys.executable, "-c", load], [sys.executable, "-c", code])
    monkeypatch.setattr("quire.bench.sweep.run.CHECK_SECONDS", 3.0)  # it looks once, afterwards
    assert "the server ended with code 0" in run_points(points, commands).failures[0]
    assert points[0].result() is None


def test_where_a_load_looks_for_its_server():
    for text, place in (
        ("quire bench serve", ("127.0.0.1", 8000)),
        ("python -m quire bench serve --port=9 --port 10", ("127.0.0.1", 10)),
        ("x --host h --port 7", ("h", 7)),
        ("x --base-url http://h:5/v1 --port 7", ("h", 5)),
        ("x --base-url https://h", ("h", 443)),
        ("x --base-url [::1]:6", ("::1", 6)),
        ("x --port many", None),
        ("x --base-url http://h:99999", None),
        ("x", None),
    ):
        assert server_place.place_of(text.split()) == place, text


def test_results_of_another_command_are_not_taken_for_these(bench, tmp_path, capsys):
    command, log = bench
    base = ["-o", str(tmp_path / "r"), "--num-runs", "1", "--bench-params", grid(tmp_path, 1)]
    words = " ".join(command)
    assert run(capsys, "serve", *base, "--bench-cmd", f"{words} --fail-at 1")[0] == 1
    assert run(capsys, "serve", *base, "--bench-cmd", words)[0] == 0, "there was no result before"
    for other in (
        ["--bench-cmd", f"{words} --x 1"],
        ["--bench-cmd", words, "--after-bench-cmd", "true"],
        ["--bench-cmd", words, "--serve-cmd", "sleep 9", "--dry-run"],
    ):
        code, _, err = run(capsys, "serve", *base, *other)
        assert code == 2 and "has results of another command (--" in err and err.count("\n") == 1
    assert run(capsys, "serve", *base, "-e", "new", "--bench-cmd", f"{words} --x 1")[0] == 0
    assert log.read_text() == "1\n" * 3


def test_commands_that_cannot_be_started(bench, tmp_path, capsys):
    command, _ = bench
    broken = tmp_path / "no-program"
    broken.write_bytes(b"\0")
    broken.chmod(0o755)
    points = points_of(tmp_path / "out", [{}], [{}], 1)
    failures = run_points(points, SweepCommands(command, [str(broken)])).failures
    failures += run_points(points, SweepCommands([str(broken)])).failures
    failures += run_points(points, SweepCommands(command, after=[str(broken)])).failures
    assert len(failures) == 3 and all("cannot be started: Exec format" in f for f in failures)
    file = tmp_path / "file"
    file.touch()
    words = ["--bench-cmd", " ".join(command)]
    for kind, arguments, message in (
        ("serve", ["--bench-cmd", "/nonexist/p"], "--bench-cmd: there is no program '/nonexist/p'"),
        ("serve", [*words, "--serve-cmd", "/nonexist/p"], "--serve-cmd: there is no program"),
        ("startup", ["--startup-cmd", "/nonexist/p"], "--startup-cmd: there is no program"),
        ("serve", [*words, "-o", "/proc/x"], "--output-dir: cannot write into '/proc/x/serve'"),
        ("serve", [*words, "-o", str(file)], "--output-dir: cannot write into"),
        ("serve", [*words, "--run-timeout", "nan"], "--run-timeout must be above 0 seconds"),
        ("serve", [*words, "--run-timeout", "0"], "--run-timeout must be above 0 seconds, got 0"),
    ):
        code, _, err = run(capsys, kind, "-o", str(tmp_path / "r"), *arguments)
        assert code == 2 and message in err and err.count("\n") == 1, err


def test_each_server_is_started_once(bench, tmp_path):
    command, _ = bench
    starts = tmp_path / "starts"
    code = (
        f"import sys, time; open({str(starts)!r}, 'a').write(sys.argv[-1] + ' '); time.sleep(600)"
    )
    outers = [{"max_num_seqs": 1}, {"max_num_seqs": 2}]
    points = points_of(tmp_path / "out", outers, [{"max_concurrency": c} for c in (1, 2)], 2)
    # The after-command waits for the server's word, so that it is not ended before.
    after = [sys.executable, "-c", f"import os, time\nwhile not os.path.exists({str(starts)!r}): "
             "time.sleep(0.01)"]  # fmt: skip
    commands = SweepCommands(command, [sys.executable, "-c", code], after)
    assert not run_points(points[:4], commands).failures
    assert starts.read_text().split() == ["1"]


def test_pareto_front_against_brute_force():
    rng = random.Random(1)
    for _ in range(300):
        points = [(rng.randrange(8), rng.randrange(8)) for _ in range(rng.randrange(1, 25))]

        def beaten(i, points=points):
            x, y = points[i]
            return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

        front = pareto_front(points)
        assert sorted(front) == [i for i in range(len(points)) if not beaten(i)]
        assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


def rows_of_two_points() -> list[dict]:
    return [
        {"point": f"p{c}", "run": r, "c": c, "y": 10 * c + r, "k": "a", "s": c * r,
         "output_throughput": 4.0 * c, "max_concurrent_requests": 2 * c, "max_concurrency": None}
        for c in (2, 1) for r in range(3)
    ]  # fmt: skip


def test_curves_and_speeds_are_medians():
    rows = rows_of_two_points()
    assert curves(rows, "c", "y", ["k"]) == {
        "k=a": [CurvePoint(1, 11, 10, 12), CurvePoint(2, 21, 20, 22)]
    }
    assert [(s.name, s.each, s.total, s.label) for s in speeds(rows, "c", labels=["c", "no"])] == [
        ("p2", 4, 8, "c=2"), ("p1", 4, 4, "c=1"),
    ]  # fmt: skip
    assert [s.each for s in speeds(rows, "max_concurrency")] == [2, 2], "the most at once count"
    with pytest.raises(ConfigError, match="no number 'z'"):
        curves(rows, "c", "z", [])
    with pytest.raises(ConfigError, match="no 'z'"):
        curves(rows, "c", "y", ["z"])


def test_throughput_is_that_of_one_device():
    rows = [{**row, "tensor_parallel_size": 2, "g": 8} for row in rows_of_two_points()]
    assert [s.total for s in speeds(rows, "c")] == [4, 2]
    assert [(s.total, s.each, s.devices) for s in speeds(rows, "c", "g")] == [
        (1, 4, 8), (0.5, 4, 8),
    ]  # fmt: skip
    assert devices_of({"gpu_count": 4, "tensor_parallel_size": 2}) == 4
    assert devices_of({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}) == 6
    assert devices_of({}) == 1
    with pytest.raises(ConfigError, match="k must be above 0, got 0"):
        speeds([{**row, "k": 0} for row in rows], "c", "k")


def test_rows_are_filtered_and_binned():
    rows = [{"n": n, "rate": "inf" if n == 3 else n, "who": f"w{n}", "no": None} for n in range(6)]

    def left(text: str) -> list[int]:
        return [row["n"] for row in selected(rows, conditions_of(text), {})]

    assert left("") == [0, 1, 2, 3, 4, 5]
    assert left("n<3") == [0, 1, 2] and left("n<=3,n!=1") == [0, 2, 3] and left("n >= 4") == [4, 5]
    assert left("rate==inf") == [3] and left("rate>4") == [3, 5] and left("who=='w2'") == [2]
    assert left("who!=w2, n>1") == [3, 4, 5]
    binned = selected(rows, [], bins_of("n%2"))
    assert [row["n"] for row in binned] == [0, 0, 2, 2, 4, 4] and rows[1]["n"] == 1
    for text, problem in (
        ("n", "'n' is no condition"), ("n~3", "is no condition"), ("m<3", "a run has no 'm'"),
        ("n<0", "none of 6 runs is left"), ("who<3", "only numbers are more or less"),
        ("no<3", "none of 6 runs is left"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            left(text)
    for text in ("n", "n%0", "n%x", "n%inf", "n%-1"):
        with pytest.raises(ConfigError, match=f"--bin-by: '{text}'"):
            bins_of(text)


def test_figures_have_rows_columns_and_curves():
    rows = [
        {"f": f, "r": r, "c": c, "k": k, "x": x, "y": 100 * f + 10 * r + c + 0.1 * x}
        for f in range(2) for r in range(3) for c in range(2) for k in "ab" for x in range(4)
        if (r, c) != (2, 1)
    ]  # fmt: skip
    first, second = facets(rows, "x", "y", fig_by=["f"], row_by=["r"], col_by=["c"], curve_by=["k"])
    assert (first.name, second.name) == ("f=0", "f=1") and first.curves == ["k=a", "k=b"]
    assert first.rows == ["r=0", "r=1", "r=2"] and first.cols == ["c=0", "c=1"]
    assert len(first.panels) == 5 and ("r=2", "c=1") not in first.panels
    for (row, col), panel in second.panels.items():
        begin = 100 + 10 * int(row[2:]) + int(col[2:])
        assert [p.y for p in panel["k=a"]] == pytest.approx([begin + 0.1 * x for x in range(4)])
    (all_in_one,) = facets(rows, "x", "y")
    assert all_in_one.rows == all_in_one.cols == [""] and all_in_one.curves == ["y"]


def test_a_curve_shows_how_far_its_runs_are_apart():
    (figure,) = facets(rows_of_two_points(), "c", "y")
    assert '"array":[1.0,1.0],"arrayminus":[1.0,1.0]' in curve_plot(figure, "t", "c", "y")
    assert '"arrayminus"' not in curve_plot(figure, "t", "c", "y", error_bars=False)


def test_linked_parameters_are_equal(tmp_path):
    outers, inners = ([{"max_num_seqs": n} for n in (1, 4)], [{"c": n, "d": 0} for n in (4, 8, 1)])
    points = points_of(tmp_path, outers, inners, 1, links_of("max-num-seqs = c"))
    assert [(p.outer["max_num_seqs"], p.inner["c"]) for p in points] == [(1, 1), (4, 4)]
    with pytest.raises(ConfigError, match="'e' is not in c=4-d=0 of --bench-params"):
        points_of(tmp_path, outers, inners, 1, links_of("max_num_seqs=e"))
    with pytest.raises(ConfigError, match="in no combination"):
        points_of(tmp_path, outers, inners, 1, links_of("max_num_seqs=d"))
    with pytest.raises(ConfigError, match="'max_num_seqs' is not SERVER_PARAMETER=LOAD_PARAMETER"):
        links_of("max_num_seqs")


def test_loads_between_the_extremes():
    assert extremes("request_rate", 3) == [
        {"max_concurrency": 1, "request_rate": "inf"}, {"request_rate": "inf"},
    ]  # fmt: skip
    rows = [{"point": "a", "request_throughput": 2.0}, {"point": "b", "request_throughput": 6.0}]
    assert between(rows, "request_rate", 5) == [3, 4, 5]
    rows = [{"point": p, "max_concurrent_requests": n} for p, n in (("a", 1), ("b", 4))]
    assert between(rows, "max_concurrency", 10) == [2, 3]
    with pytest.raises(ConfigError, match="1 of the two"):
        between(rows[:1], "max_concurrency", 10)


def test_plots_of_a_sweep(bench, tmp_path, capsys):
    command, _ = bench
    base = [
        "--output-dir",
        str(tmp_path / "r"),
        "--num-runs",
        "1",
        "--bench-cmd",
        " ".join(command),
    ]
    assert run(capsys, "serve", "--bench-params", grid(tmp_path, 1, 4, 16), *base)[0] == 0
    folder = str(tmp_path / "r" / "serve")
    code, out, _ = run(
        capsys, "plot", folder, "--var-x", "max_concurrency", "--var-y", "p99_ttft_ms"
    )
    page = Path(out.strip()).read_text("utf-8")
    assert code == 0 and "p99_ttft_ms over max_concurrency" in page and "<td>80</td>" in page
    code, out, _ = run(capsys, "plot_pareto", folder)
    assert code == 0 and len(out.splitlines()) == 4  # a faster total costs each user: all are on it
    page = (tmp_path / "r" / "serve" / "pareto.html").read_text("utf-8")
    assert "Pareto front" in page and "max_concurrency=16, gpu_count=1" in page


def test_plots_as_asked(bench, tmp_path, capsys):
    command, _ = bench
    base = ["-o", str(tmp_path / "r"), "-e", "one", "--num-runs", "2"]
    base += ["--bench-cmd", " ".join(command), "--bench-params", grid(tmp_path, 1, 4, 16)]
    assert run(capsys, "serve", *base)[0] == 0
    axes = ["--var-x", "max_concurrency", "--var-y", "p99_ttft_ms", "--scale-x", "log"]
    asked = ["--fig-by", "max_concurrency", "--row-by", "run", "--fig-dir", "figures"]
    folder = str(tmp_path / "r")  # of all sweeps
    code, out, _ = run(capsys, "plot", folder, *axes, *asked, "--dry-run")
    assert code == 0 and not (tmp_path / "r" / "figures").exists()
    assert out.splitlines()[0] == (
        "p99_ttft_ms over max_concurrency: max_concurrency=1: 2 x 1 panels, 1 curves"
    )
    filtered = ["--filter-by", "max_concurrency<16", "--fig-name", "few"]
    code, out, _ = run(capsys, "plot", folder, *axes, *asked, *filtered)
    page = tmp_path / "r" / "figures" / "few.html"
    assert code == 0 and out.strip() == str(page)
    text = page.read_text("utf-8")
    assert "max_concurrency=4" in text and "max_concurrency=16" not in text
    assert '"type":"log"' in text
    code, _, err = run(capsys, "plot", folder, *axes, "--scale-y", "sqrt")
    assert code == 2 and "--scale-y must be linear or log, got 'sqrt'" in err


def test_a_sweep_to_go_on_with_must_be_there(bench, tmp_path, capsys):
    command, log = bench
    base = ["-o", str(tmp_path / "r"), "--num-runs", "1", "--bench-cmd", " ".join(command)]
    base += ["--bench-params", grid(tmp_path, 1, 4)]
    code, _, err = run(capsys, "serve", *base, "-e", "it", "--resume")
    assert code == 2 and "there is no folder" in err and not log.read_text()
    assert run(capsys, "serve", *base, "-e", "it")[0] == 0
    for resume in (["-e", "it", "--resume"], ["--resume", "it"]):
        code, out, _ = run(capsys, "serve", *base, *resume)
        assert code == 0 and "2 of 2 runs, 2 of them from before" in out
    assert log.read_text() == "1\n4\n"


def test_a_sweep_of_linked_parameters(bench, tmp_path, capsys):
    command, log = bench
    params = tmp_path / "serve.json"
    params.write_text('[{"max_num_seqs": 4}, {"max_num_seqs": 16}]')
    server = f"{sys.executable} -c 'import time; time.sleep(60)'"
    base = ["--serve-cmd", server, "--serve-params", str(params), "--bench-cmd", " ".join(command)]
    base += ["-o", str(tmp_path / "r"), "--num-runs", "1", "--bench-params", grid(tmp_path, 1, 4)]
    code, out, _ = run(capsys, "serve", *base, "--link-vars", "max_num_seqs=max_concurrency")
    assert code == 0 and "1 of 1 runs" in out and log.read_text() == "4\n"


def test_startup_sweep(bench, tmp_path, capsys):
    command, _ = bench
    params = tmp_path / "engine.json"
    params.write_text('[{"max_num_seqs": 2}, {"max_num_seqs": 4}]')
    code, _, _ = run(
        capsys, "startup", "--startup-cmd", " ".join(command), "--serve-params", str(params),
        "--num-runs", "1", "--output-dir", str(tmp_path / "r"),
    )  # fmt: skip
    rows = json.loads((tmp_path / "r" / "startup" / "summary.json").read_text())
    assert code == 0 and [row["given"] for row in rows] == ["--max-num-seqs 2", "--max-num-seqs 4"]


def test_serve_workload(bench, tmp_path, capsys):
    command, log = bench
    code, out, _ = run(
        capsys, "serve_workload", "--bench-cmd", " ".join(command), "--num-runs", "1",
        "--workload-iters", "4", "--output-dir", str(tmp_path),
    )  # fmt: skip
    rows = json.loads((tmp_path / "serve_workload" / "summary.json").read_text())
    assert code == 0 and len(rows) == 4 and "1.333" in rows[2]["point"]


def test_the_list_is_complete(capsys):
    assert run(capsys)[0] == 0 and list(SWEEPS) == list(ABOUT)


@pytest.mark.parametrize("kind", list(SWEEPS))
def test_every_kind_has_help(capsys, kind):
    with pytest.raises(SystemExit):
        cli.main(["bench", "sweep", kind, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: quire bench sweep {kind}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "did you mean 'serve'?"),
        (["serve", "--bench-params", "/none"], "--bench-params: cannot read '/none'"),
        (["serve", "--serve-params", "x"], "--serve-params needs --serve-cmd"),
        (["serve", "--num-runs", "0", "--dry-run"], "--num-runs must be at least 1, got 0"),
        (["serve", "--bench-cmd", "a 'b"], '--bench-cmd: "a \'b"'),
        (["serve_workload", "--workload-var", "x"], "--workload-var must be one of"),
        (["serve_workload", "--workload-iters", "1"], "--workload-iters must be at least 2, got 1"),
        (["plot", "/none"], "'/none' is no folder of a sweep: it has no summary.json"),
        (["plot_pareto", "/none"], "'/none' is no folder of a sweep"),
    ],
)
def test_bad_input(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code in (1, 2) and message in err.strip().splitlines()[-1]


@pytest.mark.parametrize("text", ["3", "[]", "[1]", "{", '{"a": 1}', '[{"a": 1}, {"a": 1}]'])
def test_bad_parameter_files(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--x: "):
        read_params(str(path), "--x")


def test_a_text_where_a_number_is_wanted_names_the_filter():
    """Of a workload sweep the first two runs have the rate `inf`, which is a text in JSON."""
    row = {"point": "p", "request_rate": "inf", "duration": 2}
    assert number(row, "duration") == 2
    advice = "request_rate of p is no number but 'inf'; --filter-by 'request_rate!=inf' leaves"
    with pytest.raises(ConfigError, match=re.escape(advice)):
        number(row, "request_rate")
    (others,) = conditions_of("request_rate!=inf")
    assert not others.holds(row)
