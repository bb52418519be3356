"""Experiments: what counts say is seen, where there is nothing nothing is, and what is refused."""

from __future__ import annotations

import json
import random

import pytest

from quire.bench.lab import experiments
from quire.bench.lab.kit import LEAST_ROUNDS, Effect, Lab, LabReport
from quire.cli import lab as command
from quire.cli import main as cli
from quire.errors import ConfigError


def test_an_effect_needs_every_round():
    assert Effect.of([2, 2.2, 1.9], [1, 1, 1]).direction == 1
    assert Effect.of([1, 1, 1], [2, 2.2, 1.9]).direction == -1
    assert Effect.of([2, 2.2, 1.04], [1, 1, 1]).direction == 0
    assert Effect.of([2, 0.5, 2], [1, 1, 1]).direction == 0
    assert Effect.of([6, 1, 2], [2, 1, 1]).ratio == 2
    said = Effect.of([2, 2.2, 1.9], [1, 1, 1]).sentence("it", "rose to", "fell to", "that")
    assert said == "it rose to 2.00 times that (1.90 to 2.20 in 3 rounds)"
    assert "no effect seen here" in Effect.of([1, 1], [1, 1]).sentence("it", "rose to", "fell to")


def test_noise_alone_is_rarely_an_effect():
    """Of variants that do not differ, with a spread of 30 %, one in 50 at most is taken for one."""
    rng = random.Random(4)

    def noise():
        return [rng.lognormvariate(0, 0.3) for _ in range(7)]

    assert sum(Effect.of(noise(), noise()).direction != 0 for _ in range(1000)) < 20


def test_variants_take_turns():
    lab, order = Lab({}), []
    found = lab.each_round("x", ["a", "b"], lambda name, n: order.append(name) or {"v": float(n)})
    assert order[:4] == ["a", "b", "b", "a"]
    assert found["a"]["v"] == [float(n) for n in range(lab.rounds)]


def test_a_table_has_columns_of_equal_width():
    report = LabReport("n", "Q?", "Setup.", ["", "long name"], [["a", "1"], ["bcd", "22"]], "C.")
    lines = report.markdown().split("\n\n")[2].splitlines()
    assert lines == [
        "|     | long name |", "|-----|----------:|", "| a   |         1 |", "| bcd |        22 |",
    ]  # fmt: skip
    assert report.markdown().endswith("**C.**")


@pytest.mark.parametrize("name", ["batch", "prefix", "priority", "swap", "capacity"])
def test_experiments_count_what_they_claim(name):
    """Figures that a busy machine cannot change: steps, tokens, preemptions, order."""
    lab = Lab({}, LEAST_ROUNDS)
    lab.rounds = 1
    report = experiments.EXPERIMENTS.get(name)(lab)
    figures = report.figures
    assert report.name == name and report.conclusion.endswith(".")
    assert len(report.rows) == len(figures) and all(
        len(r) == len(report.columns) for r in report.rows
    )
    if name == "batch":
        assert figures["1 prompt"]["steps"] == [32]
        assert figures["100 prompts"]["steps"][0] < 40  # and not 3200
    elif name == "prefix":
        on, off = figures["caching on"], figures["caching off"]
        assert on["later"][0] < off["later"][0]
    elif name == "swap":
        assert figures["recompute"]["prompt_tokens"][0] > figures["swap"]["prompt_tokens"][0]
        assert figures["swap"]["swapped_in"][0] > 0 == figures["recompute"]["swapped_in"][0]
        assert figures["recompute"]["preemptions"][0] > 0
    elif name == "priority":
        assert figures["priority"]["urgent"][0] < figures["priority"]["others"][0]
    elif name == "capacity":
        assert figures["recommended"]["preemptions"] == [0]
        assert figures["half as many again"]["preemptions"][0] > 0


def test_kv_types_hold_more_tokens_in_the_same_bytes():
    lab = Lab({}, LEAST_ROUNDS)
    lab.rounds = 1
    figures = experiments.kv_dtype(lab).figures
    assert figures["fp8"]["kv_tokens"] == pytest.approx(2 * figures["auto"]["kv_tokens"], rel=0.01)


def test_agreement_ends_at_the_first_difference():
    assert experiments._agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert experiments._agreement([[1, 2], [3, 4]], [[1, 2], [5, 4]]) == 0.5


def test_the_command_writes_what_it_prints(capsys, tmp_path, monkeypatch):
    report = LabReport("batch", "Q?", "Setup.", ["", "x"], [["a", "1"]], "C.", {"a": {"x": [1.0]}})
    monkeypatch.setitem(experiments.EXPERIMENTS._rows, "batch", lambda lab: report)
    experiments.EXPERIMENTS._loaded.pop("batch", None)
    page, figures = tmp_path / "lab.md", tmp_path / "lab.json"
    code = cli.main(["lab", "batch", "--markdown", str(page), "--output-json", str(figures)])
    experiments.EXPERIMENTS._loaded.pop("batch")
    assert code == 0 and capsys.readouterr().out.strip() == f"batch: {report.markdown()}"
    assert report.markdown() in page.read_text() and "7 rounds" in page.read_text()
    assert json.loads(figures.read_text()) == {"batch": {"a": {"x": [1.0]}}}


def test_the_list_is_complete(capsys):
    assert cli.main(["lab"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(experiments.EXPERIMENTS) == list(command.ABOUT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bathc"], "did you mean 'batch'?"),
        (["batch", "--rounds", "4"], "--rounds must be at least 5, got 4"),
        (["prefix", "--no-enable-prefix-caching"], "--enable-prefix-caching is what this"),
        (["batch", "--markdown", "/no/such/x"], "--markdown: there is no folder '/no/such'"),
        (["batch", "--model", "/none"], "there is no model folder '/none'"),
    ],
)
def test_bad_input(capsys, arguments, message):
    assert cli.main(["lab", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_two_rounds_are_refused():
    with pytest.raises(ConfigError, match="at least 5"):
        Lab({}, 2)
