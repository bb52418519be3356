"""What deploy/ holds is current, every expression is sound, and every alert can fire."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import promql
from deploy_tables import RULES
from metric_sections import SECTIONS, section_of, series, series_names
from prometheus_server import PROMTOOL
from quire.observability.metrics.table import METRICS, MetricKind

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
NAMES = {**series_names(), "up": frozenset()}
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here; tools/get_prometheus.py could not fetch one"
)


def board_expressions() -> list[str]:
    found = []
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            found += [target["expr"] for target in panel.get("targets", ())]
    return found


def test_files_are_current():
    command = [sys.executable, str(ROOT / "tools" / "gen_deploy.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("expr", [*board_expressions(), *(rule.expr for rule in RULES)])
def test_every_expression_asks_for_what_exists(expr):
    assert promql.problems(expr, NAMES) == []


@pytest.mark.parametrize(
    ("expr", "told"),
    [
        ("rate(vllm:num_preemption_total[5m])", "unknown metric vllm:num_preemption_total"),
        ("rate(vllm:num_preemptions[5m])", "unknown metric vllm:num_preemptions"),
        ("rate(vllm:num_preemptions_total[5 m])", "bad window"),
        ("rates(vllm:num_preemptions_total[5m])", "unknown function rates"),
        ("rate(vllm:num_preemptions_total[5m]", "missing the end"),
        ("vllm:num_requests_running)", "unexpected )"),
        ('vllm:num_requests_running{reason="x"}', "has no label reason"),
        ("vllm:num_requests_running ; 1", "cannot read"),
    ],
)
def test_the_checker_finds_mistakes(expr, told):
    (problem,) = promql.problems(expr, NAMES)
    assert told in problem


def test_every_metric_has_a_section_and_every_section_metrics():
    used = {section_of(metric).title for metric in METRICS}
    assert used == {section.title for section in SECTIONS}


def test_the_full_board_shows_every_metric():
    shown = "\n".join(board_expressions())
    for metric in METRICS:
        if not metric.help.startswith("Old name of "):
            name = (
                f"{metric.name}_bucket" if metric.kind is MetricKind.HISTOGRAM else series(metric)
            )
            assert f"{name}{{" in shown, metric.name


@needs_promtool
def test_promtool_takes_rules_and_configuration():
    config = str(DEPLOY / "prometheus" / "prometheus.yml")
    result = subprocess.run(
        [str(PROMTOOL), "check", "config", config], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then(tmp_path):
    tests = []
    for rule in RULES:
        minutes = "80m" if rule.wait == "30m" else "20m"
        assert rule.fires and rule.quiet, f"{rule.alert} has no example"
        for inputs, count in ((rule.fires, 1), (rule.quiet, 0)):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in inputs.items()],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{rule.alert}",alertstate="firing"}})'
                            " or vector(0)",
                            "eval_time": minutes,
                            "exp_samples": [{"labels": "{}", "value": count}],
                        }
                    ],
                }
            )
    rules = str(DEPLOY / "prometheus" / "quire.rules.yml")
    path = tmp_path / "alerts.yml"
    config = {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(config), "utf-8")
    result = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
