"""The result of a run: one record per request, and every figure as a function of the records.

The JSON has the keys of `vllm bench serve`, and the figures are defined as there
(docs/benchmarks.md):

- TTFT: from sending a request to its first output. Waiting for a place under `--max-concurrency`
  happens before that.
- TPOT: (latency - TTFT) / (output tokens - 1), of requests with more than one token.
- ITL: each gap between two outputs, of all requests together.
- E2EL: from sending to the last output.
- Goodput: requests per second that meet every SLO; the TPOT of a single token counts as 0.
- Peak output token throughput: most outputs within one of the seconds after the first start.

Failed requests count in `failed`, and in no other figure. Knows nothing of HTTP or of an engine:
who makes records (a client, a simulator) passes seconds of one clock, whatever its zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.spelling import did_you_mean

Samples = NDArray[np.float64]
SCHEMA: Final = 1
"""`schema` of the JSON: raised when a key changes its meaning."""
MS: Final = 1000.0
LATENCIES: Final = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
"""Latency metrics: name in keys and flags, title, abbreviation."""
LONGEST: Final = 1e10
"""Seconds that times of a result are below; clocks count from 1970, some of them."""
SLO_METRICS: Final = ("ttft", "tpot", "e2el")
"""Metrics that `--goodput` takes: those with one value per request."""


@dataclass(slots=True)
class RequestRecord:
    """What one request did. Times are seconds of one clock."""

    start: float
    """When it was sent."""
    input_len: int
    """Prompt tokens, by the server's count where it tells."""
    output_len: int = 0
    """Output tokens, likewise."""
    first_token: float | None = None
    """When the first output came; None: none came."""
    itls: list[float] = field(default_factory=list)
    """Gaps between outputs. An output may hold several tokens."""
    end: float | None = None
    """When the last output came, if the reply was whole; None: it was not."""
    error: str = ""
    """Why it failed; empty: it did not."""
    text: str = ""
    """What was generated, if it is kept."""
    queue_time: float = 0.0
    """Seconds that the client held it back, for `--max-concurrency`."""
    priority: int = 0
    status: int = 0
    """HTTP status with which the server refused it; 0: it did not."""

    @property
    def ok(self) -> bool:
        """Whether it counts: it ended, and without an error."""
        return not self.error and self.end is not None

    @property
    def latency(self) -> float:
        """Seconds from sending to the end; 0 if it never ended."""
        return 0.0 if self.end is None else self.end - self.start

    @property
    def ttft(self) -> float:
        """Seconds to the first output; 0 if there was none."""
        return 0.0 if self.first_token is None else self.first_token - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What was asked of a run, for the head of its result."""

    model_id: str
    backend: str = "openai"
    label: str | None = None
    tokenizer_id: str | None = None
    num_prompts: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Keys of the result; an infinite rate is the text `inf`, because JSON has none."""
        rate: float | str = "inf" if math.isinf(self.request_rate) else self.request_rate
        return {
            "backend": self.backend,
            "label": self.label,
            "model_id": self.model_id,
            "tokenizer_id": self.tokenizer_id,
            "num_prompts": self.num_prompts,
            **self.metadata,
            "request_rate": rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
        }


def summary(
    records: Sequence[RequestRecord],
    duration: float,
    *,
    percentiles: Sequence[float] = (99,),
    goodput: Mapping[str, float] | None = None,
    metrics: Sequence[str] = tuple(LATENCIES),
) -> dict[str, Any]:
    """All figures of a run.

    Args:
        records: One per request, failed ones too.
        duration: Seconds from the first send to the last end.
        percentiles: Which ones of each latency, in [0, 100].
        goodput: SLOs in milliseconds by metric (`SLO_METRICS`).
        metrics: Which latencies.

    Returns:
        Keys as in the result's JSON. What nobody measured is 0, `request_goodput` None.
    """
    done = [record for record in records if record.ok]
    seconds = max(duration, 1e-9)
    total_in = sum(record.input_len for record in done)
    total_out = sum(record.output_len for record in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(done) / seconds,
        "request_goodput": _num_good(done, goodput) / seconds if goodput else None,
        "input_throughput": total_in / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "max_output_tokens_per_s": peak_outputs_per_second(done),
        "max_concurrent_requests": peak_concurrency(done),
    }
    found = latencies(done)
    for name in metrics:
        figures |= _statistics(name, found[name], percentiles)
    return figures


def latencies(records: Sequence[RequestRecord]) -> dict[str, Samples]:
    """The samples in seconds behind each latency metric, of the requests that did not fail."""
    done = [record for record in records if record.ok]
    lists = {
        "ttft": [r.ttft for r in done if r.first_token is not None],
        "tpot": [tpot for r in done if (tpot := r.tpot) is not None],
        "itl": [gap for r in done for gap in r.itls],
        "e2el": [r.latency for r in done],
    }
    return {name: np.asarray(values, dtype=np.float64) for name, values in lists.items()}


def detailed(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Lists with one entry per request, failed ones too: the keys of `--save-detailed`."""
    return {
        "input_lens": [r.input_len for r in records],
        "output_lens": [r.output_len for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "latencies": [r.latency for r in records],
        "start_times": [r.start for r in records],
        "queue_times": [r.queue_time for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=-LONGEST, le=LONGEST)]
_LISTS: Final[dict[str, Any]] = {
    "input_lens": list[_Count], "output_lens": list[_Count], "ttfts": list[_Seconds],
    "itls": list[list[_Seconds]], "latencies": list[_Seconds], "start_times": list[_Seconds],
    "errors": list[str | None], "queue_times": list[_Seconds], "generated_texts": list[str],
}  # fmt: skip
"""The lists of `detailed` that `records_of` reads, and what is in them."""
_OPTIONAL: Final[dict[str, Any]] = {"queue_times": 0.0, "generated_texts": ""}
"""Those that may be missing, and what each entry is then."""


def records_of(result: Mapping[str, Any]) -> list[RequestRecord]:
    """The records of a detailed result, as `detailed` wrote them. Results of `vllm bench serve` are
    read as well.

    Raises:
        ConfigError: the result is not detailed, or its lists do not fit together.
    """
    if missing := [name for name in _LISTS if name not in result and name not in _OPTIONAL]:
        raise ConfigError(f"the result has no {missing[0]}: save it with --save-detailed")
    count = len(result["ttfts"]) if isinstance(result["ttfts"], list) else 0
    rows = []
    for name, kind in _LISTS.items():
        given = result.get(name)
        if not given and name in _OPTIONAL:
            given = [_OPTIONAL[name]] * count
        try:
            rows.append(msgspec.convert(given, kind))
        except msgspec.ValidationError as wrong:
            raise ConfigError(f"the result's {name}: {wrong}") from None
    records = []
    try:
        for row in zip(*rows, strict=True):
            length, output, ttft, itls, latency, start, error, queue_time, text = row
            first = start + ttft if ttft > 0 else None
            end = None if error and not latency else start + latency
            records.append(
                RequestRecord(
                    start, length, output, first, itls, end, error or "", text, queue_time
                )
            )
    except ValueError as wrong:
        raise ConfigError(f"the lists of the result do not fit: {wrong}") from None
    return records


def peak_outputs_per_second(records: Sequence[RequestRecord]) -> float:
    """Most outputs that came within one whole second after the first start."""
    # Not by `outputs_per_bin`: a run that was simulated may take years.
    seconds = np.floor(_after_start(records))
    counts = np.unique(seconds[seconds >= 0], return_counts=True)[1]
    return float(counts.max(initial=0))


def outputs_per_bin(records: Sequence[RequestRecord], width: float) -> Samples:
    """Outputs of requests that did not fail, in bins of `width` seconds from the first start."""
    bins = (_after_start(records) / width).astype(np.int64)
    return np.bincount(bins[bins >= 0]).astype(np.float64)


def _after_start(records: Sequence[RequestRecord]) -> Samples:
    """Seconds from the first start to each output of requests that did not fail."""
    times = [output_times(r) for r in records if r.ok and r.first_token is not None]
    if not times:
        return np.zeros(0)
    return np.concatenate(times) - min(record.start for record in records if record.ok)


def output_times(record: RequestRecord) -> Samples:
    """When each output of a request came."""
    if record.first_token is None:
        return np.zeros(0)
    return record.first_token + np.concatenate(([0.0], np.cumsum(record.itls)))


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests between sending and end at one moment; one that ends makes room first."""
    return int(concurrency(records)[1].max(initial=0))


def concurrency(records: Sequence[RequestRecord]) -> tuple[Samples, NDArray[np.int64]]:
    """Moments at which the number of requests in flight changes, and that number from then on."""
    done = [record for record in records if record.ok]
    times = np.array([r.start for r in done] + [r.start + r.latency for r in done])
    change = np.repeat([1, -1], len(done))
    order = np.lexsort((change, times))
    return times[order], np.cumsum(change[order])


def parse_goodput(pairs: Sequence[str] | None) -> dict[str, float]:
    """Read `ttft:200 tpot:50`: SLOs in milliseconds.

    Raises:
        ConfigError: an unknown metric, or a value that is not above 0.
    """
    slos: dict[str, float] = {}
    for pair in pairs or ():
        name, colon, text = pair.partition(":")
        if name not in SLO_METRICS:
            hint = did_you_mean(name, SLO_METRICS)
            known = ", ".join(SLO_METRICS)
            raise ConfigError(f"--goodput knows {known}, got {name!r}{hint}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not colon or not 0 < value < math.inf:
            raise ConfigError(f"--goodput {name} must be above 0 milliseconds, got {text!r}")
        slos[name] = value
    return slos


def parse_percentiles(text: str) -> list[float]:
    """Read `50,99,99.9`.

    Raises:
        ConfigError: one is not a number in [0, 100].
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles must be in [0, 100], got {part!r}")
        found.append(value)
    return found


def parse_metrics(text: str) -> list[str]:
    """Read `ttft,tpot,itl`.

    Raises:
        ConfigError: a name is none of `LATENCIES`.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in LATENCIES:
            hint = did_you_mean(name, LATENCIES)
            known = ", ".join(LATENCIES)
            raise ConfigError(f"--percentile-metrics knows {known}, got {name!r}{hint}")
    return names


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def _statistics(name: str, samples: Samples, percentiles: Sequence[float]) -> dict[str, float]:
    values = samples * MS if len(samples) else np.zeros(1)
    figures = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    for percentile in percentiles:
        key = f"{percentile_name(percentile)}_{name}_ms"
        figures[key] = float(np.percentile(values, percentile))
    return figures


def _num_good(done: Sequence[RequestRecord], slos: Mapping[str, float]) -> int:
    values = {"ttft": _ttft, "tpot": _tpot, "e2el": _latency}
    return sum(all(values[name](r) * MS <= slo for name, slo in slos.items()) for r in done)


def _ttft(record: RequestRecord) -> float:
    return record.ttft


def _tpot(record: RequestRecord) -> float:
    return record.tpot or 0.0


def _latency(record: RequestRecord) -> float:
    return record.latency
