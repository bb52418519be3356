"""The text of the metrics, against what prometheus_client writes and reads."""

from __future__ import annotations

import math
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from quire.core.stats import FinishedRequestStats, IterationStats
from quire.observability.metrics.exposition import render
from quire.observability.metrics.prometheus import PrometheusSink


def families(text: str) -> list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]:
    return [
        (f.name, f.type, f.documentation, [(s.name, s.labels, s.value) for s in f.samples])
        for f in text_string_to_metric_families(text)
    ]


def test_it_reads_like_the_librarys_own() -> None:
    sink = PrometheusSink('a "model"\\with\nall')
    sink.set_cache_config({"block_size": 16})
    ended = FinishedRequestStats("stop", 1e7, 0.1, 1e-9, 3.0, 3.2, 7, 2_000_000, 0, 0, 1, None)
    iteration = IterationStats(
        num_prompt_tokens=3,
        num_generation_tokens=9,
        time_to_first_token=[0.3, 123456789.0],
        inter_token_latency=[0.01],
        finished=[ended],
    )
    sink.record(None, iteration)
    families_now = [f for f in sink._registry.collect() if not f.name.startswith("process_")]
    registry = SimpleNamespace(collect=lambda: families_now)
    plain = families(generate_latest(registry).decode())  # type: ignore[arg-type]
    ours = families(render(families_now).decode())
    assert ours == plain and len(ours) > 50


def test_values_that_are_no_numbers() -> None:
    family = GaugeMetricFamily("g", "two\nlines \\", labels=["l"])
    for name, value in {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1e300}.items():
        family.add_metric([name], value)
    ((_, _, text, samples),) = families(render([family]).decode())
    assert text == "two\nlines \\"
    assert [s[2] for s in samples[:2]] == [math.inf, -math.inf]
    assert math.isnan(samples[2][2]) and samples[3][2] == 1e300
