"""Every figure of a result against a slow computation from its definition, on random records."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest

from quire.bench.result import (
    RequestRecord,
    RunSettings,
    detailed,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    records_of,
    summary,
)
from quire.bench.text_block import text_block
from quire.errors import ConfigError


def random_record(rng: random.Random) -> RequestRecord:
    start = rng.uniform(100, 130)
    if rng.random() < 0.1:
        return RequestRecord(start, rng.randint(1, 99), error="the connection broke")
    gaps = [rng.expovariate(20) for _ in range(rng.choice([0, 0, 1, 5, 40]))]
    first = start + rng.uniform(0.01, 2)
    end = first + sum(gaps) + rng.choice([0.0, 0.003])
    tokens = rng.choice([len(gaps) + 1, len(gaps) + 3])  # an output may hold several tokens
    return RequestRecord(start, rng.randint(1, 99), tokens, first, gaps, end)


def slow_percentile(values: list[float], percentile: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    if not values:
        return 0.0
    ordered, place = sorted(values), percentile / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def slow_figures(records: list[RequestRecord], duration: float, slos: dict[str, float]) -> Any:
    done = [r for r in records if r.end is not None and r.error == ""]
    ttft = [r.first_token - r.start for r in done if r.first_token is not None]
    e2el = [r.end - r.start for r in done if r.end is not None]
    tpot, all_tpot, itl = [], [], []
    for r in done:
        value = 0.0
        if r.output_len > 1:
            value = (r.end - r.first_token) / (r.output_len - 1)
            tpot.append(value)
        all_tpot.append(value)
        itl += r.itls
    good = 0
    for a, b, c in zip(ttft, all_tpot, e2el, strict=True):
        good += (
            a * 1000 <= slos.get("ttft", math.inf)
            and b * 1000 <= slos.get("tpot", math.inf)
            and c * 1000 <= slos.get("e2el", math.inf)
        )
    figures: dict[str, Any] = {
        "completed": len(done), "failed": len(records) - len(done),
        "total_input_tokens": sum(r.input_len for r in done),
        "total_output_tokens": sum(r.output_len for r in done),
        "request_throughput": len(done) / duration, "request_goodput": good / duration,
        "output_throughput": sum(r.output_len for r in done) / duration,
        "total_token_throughput": sum(r.output_len + r.input_len for r in done) / duration,
        "max_output_tokens_per_s": slow_peak(done),
        "max_concurrent_requests": max(
            (sum(o.start <= r.start < o.end for o in done) for r in done), default=0
        ),
    }  # fmt: skip
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)):
        figures[f"mean_{name}_ms"] = statistics.fmean(values or [0]) * 1000
        figures[f"median_{name}_ms"] = statistics.median(values or [0]) * 1000
        figures[f"std_{name}_ms"] = statistics.pstdev(values or [0]) * 1000
        for p in (50, 90, 99, 99.9):
            figures[f"p{p:g}_{name}_ms"] = slow_percentile(values, p) * 1000
    return figures


def slow_peak(done: list[RequestRecord]) -> float:
    begin = min((r.start for r in done), default=0.0)
    seconds: dict[int, int] = {}
    for r in done:
        at = r.first_token or 0.0
        for gap in [0.0, *r.itls]:
            at += gap
            seconds[int(at - begin)] = seconds.get(int(at - begin), 0) + 1
    return float(max(seconds.values(), default=0))


@pytest.mark.parametrize("seed", range(30))
def test_figures_are_as_defined(seed):
    rng = random.Random(seed)
    records = [random_record(rng) for _ in range(rng.choice([0, 1, 2, 40, 300]))]
    slos = {name: rng.uniform(1, 1500) for name in rng.sample(["ttft", "tpot", "e2el"], 2)}
    figures = summary(records, 33.0, percentiles=(50, 90, 99, 99.9), goodput=slos)
    expected = slow_figures(records, 33.0, slos)
    for name, value in expected.items():
        # Sums are in another order here: a last digit may differ.
        assert figures[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_one_that_ends_makes_room_for_one_that_begins():
    one, two = (RequestRecord(s, 1, 1, s + 0.5, [], s + 1) for s in (0.0, 1.0))
    assert summary([one, two], 2.0)["max_concurrent_requests"] == 1


def test_detailed_results_can_be_read_again():
    rng = random.Random(9)
    records = [random_record(rng) for _ in range(60)]
    again = records_of(detailed(records))
    before, after = summary(records, 9.0), summary(again, 9.0)
    assert before == pytest.approx(after)
    with pytest.raises(ConfigError, match="no input_lens: save it with --save-detailed"):
        records_of({"ttfts": []})
    with pytest.raises(ConfigError, match="do not fit"):
        records_of({**detailed(records), "itls": []})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("itls", [["a"]], r"the result's itls: Expected `float`, got `str` - at `\$\[0\]\[0\]`"),
        ("itls", [[[1]]], "the result's itls: Expected `float`"),
        ("ttfts", [1e300], "the result's ttfts: "),
        ("ttfts", 3, "the result's ttfts: Expected `array`"),
        ("input_lens", [-1], "the result's input_lens: "),
        ("errors", [{}], "the result's errors: "),
        ("latencies", [1.0, 2.0], "do not fit"),
    ],
)
def test_details_that_are_none(name, value, words):
    good = detailed([RequestRecord(0.0, 10, 3, 0.25, [0.5, 0.25], 1.0)])
    assert len(records_of(good | {"queue_times": None, "generated_texts": None})) == 1
    with pytest.raises(ConfigError, match=words):
        records_of(good | {name: value})


def test_the_peak_of_a_run_of_years():
    records = [RequestRecord(0.0, 1, 3, 0.25, [0.5, 4e9], 4e9 + 0.75)]
    assert summary(records, 5e9)["max_output_tokens_per_s"] == 2


def test_settings_are_json():
    settings = RunSettings("m", num_prompts=3, metadata={"tp": "2"})
    told = settings.to_json()
    assert told["request_rate"] == "inf"
    assert told["tp"] == "2"
    assert RunSettings("m", request_rate=2.5).to_json()["request_rate"] == 2.5


def test_text_block_is_that_of_vllm():
    record = RequestRecord(0.0, 10, 3, 0.25, [0.5, 0.25], 1.0)
    result = RunSettings("m", num_prompts=1, request_rate=4.0, max_concurrency=8).to_json()
    result |= summary([record], 2.0, goodput={"ttft": 300})
    assert text_block(result, metrics=["ttft", "tpot", "itl", "e2el"]).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1         ",
        "Failed requests:                         0         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           4.00      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      10        ",
        "Total generated tokens:                  3         ",
        "Request throughput (req/s):              0.50      ",
        "Request goodput (req/s):                 0.50      ",
        "Input token throughput (tok/s):          5.00      ",
        "Output token throughput (tok/s):         1.50      ",
        "Peak output token throughput (tok/s):    2.00      ",
        "Peak concurrent requests:                1.00      ",
        "Total token throughput (tok/s):          6.50      ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          250.00    ",
        "Median TTFT (ms):                        250.00    ",
        "P99 TTFT (ms):                           250.00    ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          375.00    ",
        "Median TPOT (ms):                        375.00    ",
        "P99 TPOT (ms):                           375.00    ",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           375.00    ",
        "Median ITL (ms):                         375.00    ",
        "P99 ITL (ms):                            497.50    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          1000.00   ",
        "Median E2EL (ms):                        1000.00   ",
        "P99 E2EL (ms):                           1000.00   ",
        "==================================================",
    ]
    assert np.isfinite([v for v in result.values() if isinstance(v, float)]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_goodput(["itl:5"]), "--goodput knows ttft, tpot, e2el, got 'itl'"),
        (lambda: parse_goodput(["ttft"]), "--goodput ttft must be above 0"),
        (lambda: parse_goodput(["ttft:-1"]), "got '-1'"),
        (lambda: parse_percentiles("50,101"), r"must be in \[0, 100\], got '101'"),
        (lambda: parse_percentiles("x"), "got 'x'"),
        (lambda: parse_metrics("ttft,tpat"), "did you mean 'tpot'"),
    ],
)
def test_bad_flags(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
