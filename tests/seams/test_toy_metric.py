"""A metric is one row: it is then counted, listed by `LLM.get_metrics()` and scraped."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.observability.metrics import store
from quire.observability.metrics.table import METRICS, Metric, MetricKind, Source

LONGEST = Metric(
    "toy:longest_output_tokens",
    MetricKind.HISTOGRAM,
    "Tokens of the longest completion of a request.",
    Source.FINISHED,
    lambda done: [] if done.longest is None else [done.longest],
    buckets=(2.0, 8.0),
)


def test_one_row_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "METRICS", (*METRICS, LONGEST))
    with LLM(disable_log_stats=False) as llm:
        for length in (2, 5, 9):
            llm.generate("One", SamplingParams(max_tokens=length, ignore_eos=True, n=2))
        found = {metric.name: metric for metric in llm.get_metrics()}
        text = llm.llm_engine.frontend.prometheus.render().decode()
    assert found["toy:longest_output_tokens"].buckets == {"2.0": 1, "8.0": 2, "+Inf": 3}
    assert "# TYPE toy:longest_output_tokens histogram" in text
    assert 'toy:longest_output_tokens_sum{engine="0",model_name="quire-demo"} 16.0' in text
