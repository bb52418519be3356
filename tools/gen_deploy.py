"""Writes deploy/: Grafana dashboards, Prometheus rules and scrape configuration.

`python tools/gen_deploy.py` writes, `--check` fails if a file is not what would be written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy_tables import OVERVIEW, RULES, Panel, full_board

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
HEAD = (
    "# Written by tools/gen_deploy.py: change the tables in tools/deploy_tables.py, then run it.\n"
)
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def grafana_panel(number: int, panel: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    style: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stack:
        style = {**style, "fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": style}
    if panel.percent:
        defaults["max"] = 1
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(panel.targets.items())
        ],
    }


def variables(model: bool) -> list[dict[str, Any]]:
    """What one chooses at the top of the dashboard."""
    source = {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
    if not model:
        return [source]
    query = "label_values(vllm:num_requests_running, model_name)"
    return [
        source,
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".+",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def dashboard(uid: str, title: str, panels: list[dict[str, Any]], model: bool) -> str:
    board = {
        "uid": uid,
        "title": title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables(model)},
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def overview() -> str:
    panels = [
        grafana_panel(i + 1, panel, 12 * (i % 2), HEIGHT * (i // 2), 12)
        for i, panel in enumerate(OVERVIEW)
    ]
    return dashboard("quire-overview", "quire: overview", panels, model=False)


def full() -> str:
    return dashboard("quire-full", "quire: every metric", list(_full_panels()), model=True)


def _full_panels() -> Iterator[dict[str, Any]]:
    numbers, y = itertools.count(1), 0
    for title, panels in full_board():
        yield {
            "id": next(numbers),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            "panels": [],
        }
        y += 1
        for i, panel in enumerate(panels):
            place = WIDTH * (i % COLUMNS), y + HEIGHT * (i // COLUMNS)
            yield grafana_panel(next(numbers), panel, *place, WIDTH)
        y += HEIGHT * -(-len(panels) // COLUMNS)


def rules() -> str:
    group = {
        "name": "quire",
        "rules": [
            {
                "alert": rule.alert,
                "expr": rule.expr,
                "for": rule.wait,
                "labels": {"severity": rule.severity},
                "annotations": {"summary": rule.summary, "description": rule.remedy},
            }
            for rule in RULES
        ],
    }
    return HEAD + yaml.safe_dump({"groups": [group]}, sort_keys=False, width=100)


def scrape() -> str:
    config = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["quire.rules.yml"],
        "scrape_configs": [
            {
                "job_name": "quire",
                "metrics_path": "/metrics",
                "static_configs": [{"targets": ["127.0.0.1:8000"]}],
            }
        ],
    }
    notes = (
        "# prometheus --config.file=deploy/prometheus/prometheus.yml\n"
        "# A server with keys wants one here too: add to the job\n"
        "#   authorization: {credentials_file: /path/to/key}\n"
    )
    return HEAD + notes + yaml.safe_dump(config, sort_keys=False)


def datasource() -> str:
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "http://127.0.0.1:9090",
        "isDefault": True,
        "jsonData": {"timeInterval": "5s"},
    }
    return HEAD + yaml.safe_dump({"apiVersion": 1, "datasources": [source]}, sort_keys=False)


def provider() -> str:
    dashboards = {
        "name": "quire",
        "folder": "quire",
        "type": "file",
        "options": {"path": "/var/lib/grafana/dashboards"},
    }
    return HEAD + yaml.safe_dump({"apiVersion": 1, "providers": [dashboards]}, sort_keys=False)


FILES = {
    "prometheus/prometheus.yml": scrape,
    "prometheus/quire.rules.yml": rules,
    "grafana/dashboards/overview.json": overview,
    "grafana/dashboards/full.json": full,
    "grafana/provisioning/datasources/quire.yml": datasource,
    "grafana/provisioning/dashboards/quire.yml": provider,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    check = parser.parse_args().check
    stale = []
    for name, make in FILES.items():
        path, text = DEPLOY / name, make()
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
    if stale and check:
        print(f"stale: {', '.join(stale)}; run python tools/gen_deploy.py", file=sys.stderr)
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
