"""Rules, queries and thresholds that vLLM guides name (rows G21 to G23); tests/deploy runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def rules() -> dict[str, str]:
    """Expression to the time it must hold."""
    text = (DEPLOY / "prometheus" / "quire.rules.yml").read_text("utf-8")
    return {rule["expr"]: rule["for"] for rule in yaml.safe_load(text)["groups"][0]["rules"]}


def panels() -> list[dict[str, Any]]:
    text = (DEPLOY / "grafana" / "dashboards" / "overview.json").read_text("utf-8")
    found: list[dict[str, Any]] = json.loads(text)["panels"]
    return found


def test_g21_alert_rules() -> None:
    """The three alert rules of vLLM guides: usage, preemptions, and both at once."""
    found = rules()
    assert found["vllm:kv_cache_usage_perc > 0.9"] == "5m"
    assert "rate(vllm:num_preemptions_total[5m]) > 0.5" in found
    both = "vllm:kv_cache_usage_perc > 0.95 and rate(vllm:num_preemptions_total[5m]) > 1"
    assert both in found


def test_g22_four_panels_and_a_scrape_every_5_s() -> None:
    """The four panels of vLLM guides, with their queries; scraped every 5 s."""
    exprs = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(panels()) == 4
    ttft = "histogram_quantile(0.95, rate(vllm:time_to_first_token_seconds_bucket[5m]))"
    assert {ttft, "rate(vllm:generation_tokens_total[1m])"} < set(exprs)
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting"} < set(exprs)
    assert {"vllm:kv_cache_usage_perc", "rate(vllm:num_preemptions_total[5m])"} < set(exprs)
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    assert config["global"]["scrape_interval"] == "5s"


def test_g23_thresholds() -> None:
    """The thresholds of vLLM guides are rules: TTFT p95 0.5 s and p99 0.8 s, TPOT 30 ms, 10 and 50
    waiting. A new server, and prompts that differ, have a low hit rate without any fault; so that
    rule is about prefixes that were cached, evicted and asked for again."""
    ends = {expr.rpartition(" > ")[2] for expr in rules() if "histogram_quantile" in expr}
    assert ends == {"0.5", "0.8", "0.03"}
    assert {"vllm:num_requests_waiting > 10", "vllm:num_requests_waiting > 50"} < set(rules())
    assert any("prefix_cache_missed_total" in expr and "> 0.2" in expr for expr in rules())
