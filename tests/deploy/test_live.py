"""A real Prometheus scrapes a real server: every expression of deploy/ gives values."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from live_server import serving
from metric_sections import series
from patience import PATIENCE
from prometheus_server import PROMETHEUS, scraping
from quire.observability.metrics.table import METRICS
from test_deploy import DEPLOY, board_expressions

BODY = {"model": "quire-demo", "prompt": "The capital of France is", "max_tokens": 12}
LATER = [series(m) for m in METRICS if m.label and not m.label_values]
"""Series that exist only once there is something to count: a draft, an adapter."""


def load(url: str, stop: threading.Event) -> None:
    """Requests until told to stop."""
    with httpx.Client(timeout=PATIENCE) as client:
        while not stop.is_set():
            client.post(f"{url}/v1/completions", json={**BODY, "ignore_eos": True})
            stop.wait(0.1)


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here; tools/get_prometheus.py")
def test_every_expression_runs_on_a_real_prometheus(tmp_path: Path) -> None:
    stop = threading.Event()
    with serving("--kv-cache-metrics", "--warm-spare") as server:
        threads = [threading.Thread(target=load, args=(server.url, stop)) for _ in range(2)]
        rules = DEPLOY / "prometheus" / "quire.rules.yml"
        with scraping(server.url.removeprefix("http://"), rules, tmp_path) as prometheus:
            try:
                for thread in threads:
                    thread.start()
                prometheus.wait_for("count_over_time(vllm:engine_steps_total[1m]) > 3")
                prometheus.wait_for("rate(vllm:generation_tokens_total[1m]) > 0")
                for template in board_expressions():
                    expr = template.replace("$model", ".+").replace("$__rate_interval", "1m")
                    found = prometheus.query(expr)
                    assert found or any(name in expr for name in LATER), f"{expr} gives nothing"
                prometheus.wait_for('ALERTS{alertname="QuireDown"} or vector(0)')
                evaluated = prometheus.rules()
                assert evaluated and all(rule["health"] != "err" for rule in evaluated)
                firing = prometheus.query('ALERTS{alertstate="firing"}')
                assert [a["metric"]["alertname"] for a in firing] == []
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
