"""How long a step takes, by what is in it: fitted to measured steps, or from a machine's figures.

`seconds = a + f(tokens) + b rows + c prefills + d decode context + e prompt context`, where `f` is
linear between powers of two. No term is negative and `f` never falls, so a step with more in it
never takes less. Knows no scheduler and no clock.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from quire.core.batch import ScheduledBatch
from quire.errors import ConfigError

FORMAT: Final = "quire-step-times"
VERSION: Final = 1
KNOTS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens between which the time of a step's tokens is linear: kernels take rows in panels, and
weights are read once however few rows there are."""
OUTLIER: Final = 20.0
"""A step counts as at most so many times the median of its kind."""
SPREAD: Final = 100
"""Ratios of `StepTimeModel.spread`."""
LEAST_SPREAD: Final = 200
"""Steps without which nothing is said of how they vary."""
MOST_TOKENS: Final = 2**16
"""Steps up to this size are looked up in a table."""


class StepShape(NamedTuple):
    """What is in a step, as far as its time depends on it."""

    tokens: int
    rows: int
    """Requests."""
    prefills: int
    """Requests with more than one token."""
    decode_context: int
    """Tokens that requests with one token attend to, summed."""
    prompt_context: int
    """For each token of the other requests, the tokens that it attends to, summed."""


def shape_of(batch: ScheduledBatch) -> StepShape:
    """What is in a batch."""
    counts, known = batch.num_scheduled_tokens, batch.scheduled_cached_reqs
    total, rows = batch.total_num_scheduled_tokens, len(counts)
    if total == rows and not batch.scheduled_new_reqs:
        return StepShape(total, rows, 0, sum(known.num_computed_tokens) + rows, 0)
    decodes = prompts = prefills = 0
    pairs = list(zip(known.req_ids, known.num_computed_tokens, strict=True))
    pairs += [(new.req_id, new.num_computed_tokens) for new in batch.scheduled_new_reqs]
    for name, before in pairs:
        count = counts[name]
        if count == 1:
            decodes += before + 1
        else:
            prefills += 1
            prompts += count * before + count * (count + 1) // 2
    return StepShape(total, rows, prefills, decodes, prompts)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What passes beside the steps, in seconds."""

    gap: float = 0.0
    """Between two steps of a busy engine."""
    gap_per_row: float = 0.0
    """The same for each request of the step before: its output is sent and its text made."""
    arrival: float = 0.0
    """From a request's arrival until the scheduler knows it."""
    output: float = 0.0
    """From the end of a step until its caller has the token."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of steps.

    Args:
        fixed: Of every step.
        per_token: Seconds of one more token, between `KNOTS[i]` and `KNOTS[i + 1]` tokens; the last
            one also holds above.
        per_row, per_prefill, per_decode_context, per_prompt_context: See `StepShape`.
        overheads: What passes beside the steps.
        about: Where the figures are from, for people.
    """

    fixed: float
    per_token: tuple[float, ...]
    per_row: float = 0.0
    per_prefill: float = 0.0
    per_decode_context: float = 0.0
    per_prompt_context: float = 0.0
    overheads: Overheads = field(default_factory=Overheads)
    about: dict[str, Any] = field(default_factory=dict)
    spread: tuple[float, ...] = ()
    """How much longer or shorter steps take than what this says, in equal shares of them: ratios of
    mean 1, in ascending order. Empty: they take just that."""
    _table: list[float] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError: a figure is missing or negative."""
        if len(self.per_token) != len(KNOTS) - 1:
            raise ValueError(f"per_token must be {len(KNOTS) - 1} figures")
        figures = (
            self.fixed, *self.per_token, self.per_row, self.per_prefill, self.per_decode_context,
            self.per_prompt_context, *asdict(self.overheads).values(),
        )  # fmt: skip
        if not all(0 <= figure < float("inf") for figure in figures):
            raise ValueError("no figure may be negative")
        if any(not 0 <= ratio < float("inf") for ratio in self.spread):
            raise ValueError("no ratio of the spread may be negative")
        if not any(figures[:-4]):
            raise ValueError("a step must take some time")

    def seconds(self, shape: StepShape) -> float:
        """How long a step takes."""
        tokens, table = shape.tokens, self._table
        while tokens >= len(table) and len(table) <= MOST_TOKENS:
            table.append(self.of_tokens(len(table)))
        return (
            (table[tokens] if tokens < len(table) else self.of_tokens(tokens))
            + self.per_row * shape.rows
            + self.per_prefill * shape.prefills
            + self.per_decode_context * shape.decode_context
            + self.per_prompt_context * shape.prompt_context
        )

    def of_tokens(self, tokens: int) -> float:
        """The part that depends on the number of tokens alone."""
        parts = _parts(tokens)
        return self.fixed + sum(a * b for a, b in zip(parts, self.per_token, strict=True))

    def scaled(self, factor: float) -> StepTimeModel:
        """A machine on which every step takes so many times as long."""
        return replace(
            self,
            fixed=self.fixed * factor,
            per_token=tuple(each * factor for each in self.per_token),
            per_row=self.per_row * factor,
            per_prefill=self.per_prefill * factor,
            per_decode_context=self.per_decode_context * factor,
            per_prompt_context=self.per_prompt_context * factor,
            _table=[],
        )

    def to_dict(self) -> dict[str, Any]:
        """What stands in the file."""
        figures = asdict(self)
        del figures["_table"]
        return {"format": FORMAT, "version": VERSION, "knots": list(KNOTS), **figures}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepTimeModel:
        """The inverse of `to_dict`.

        Raises:
            ValueError: it is not of this form or version.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"no calibration: format must be {FORMAT!r}")
        if data.get("version") != VERSION or data.get("knots") != list(KNOTS):
            raise ValueError(
                f"of version {data.get('version')!r:.20}, not {VERSION}: calibrate again"
            )
        try:
            given = {k: v for k, v in data.items() if k not in ("format", "version", "knots")}
            given["overheads"] = Overheads(**given["overheads"])
            return cls(
                **given
                | {"per_token": tuple(given["per_token"]), "spread": tuple(given.get("spread", ()))}
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"a figure is missing or unknown: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write the file of `quire calibrate`.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self.to_dict())) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | Path) -> StepTimeModel:
        """Read the file of `quire calibrate`.

        Raises:
            ConfigError: it cannot be read, or is no calibration of this version.
        """
        try:
            data = msgspec.json.decode(Path(path).read_bytes())
            return cls.from_dict(data if isinstance(data, dict) else {})
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from None


def _parts(tokens: int) -> list[float]:
    """How many of the tokens lie between each two knots; the last part has no end."""
    last = min(bisect.bisect_right(KNOTS, tokens), len(KNOTS) - 1)
    parts = [float(b - a) for a, b in zip(KNOTS[:last], KNOTS[1:], strict=False)]
    parts[last - 1] = float(tokens - KNOTS[last - 1])
    return parts + [0.0] * (len(KNOTS) - 1 - last)


def fit(
    shapes: Sequence[StepShape],
    seconds: Sequence[float],
    overheads: Overheads | None = None,
    about: dict[str, Any] | None = None,
) -> StepTimeModel:
    """Fit a model to measured steps: least squares of the relative errors, no term negative.

    Steps of the same shape count by the square root of their number, so that the thousands of
    decodes of a recording do not outweigh its few long prompts.

    Raises:
        ConfigError: there are too few steps, or all are alike.
    """
    import numpy

    kinds: dict[StepShape, list[float]] = {}
    for shape, each in zip(shapes, seconds, strict=True):
        if shape.tokens and each > 0:
            kinds.setdefault(shape, []).append(each)
    if len(kinds) < 4:
        raise ConfigError(
            f"a model of step times needs steps of at least 4 kinds, got {len(kinds)}: record a "
            "longer run, or one with prompts and decodes"
        )
    rows, target = [], []
    for shape, measured in kinds.items():
        usual = _mean(measured)
        weight = len(measured) ** 0.5 / usual
        values = (1.0, *_parts(shape.tokens), *map(float, shape[1:]))
        rows.append([weight * value for value in values])
        target.append(weight * usual)
    terms = _non_negative(numpy.array(rows), numpy.array(target))
    terms[0] = max(terms[0], 1e-9)
    count = len(KNOTS)
    per_token = _continued(terms[1:count], max(shape.tokens for shape in kinds))
    row, prefill, decode, prompt = terms[count:]
    model = StepTimeModel(
        terms[0], per_token, row, prefill, decode, prompt, overheads or Overheads(), about or {}
    )
    return replace(model, spread=_spread(model, shapes, seconds), _table=[])


def _mean(measured: Sequence[float]) -> float:
    """The mean: what throughput goes by. One during which the machine was suspended says nothing of
    others."""
    most = OUTLIER * statistics.median(measured)
    return statistics.fmean(min(each, most) for each in measured)


def _spread(
    model: StepTimeModel, shapes: Sequence[StepShape], seconds: Sequence[float]
) -> tuple[float, ...]:
    ratios = sorted(
        min(OUTLIER, each / model.seconds(shape))
        for shape, each in zip(shapes, seconds, strict=True)
        if shape.tokens and each > 0
    )
    if len(ratios) < LEAST_SPREAD:
        return ()
    picked = [ratios[(2 * i + 1) * len(ratios) // (2 * SPREAD)] for i in range(SPREAD)]
    mean = statistics.fmean(picked)
    return tuple(round(ratio / mean, 5) for ratio in picked)


def _continued(per_token: Sequence[float], most: int) -> tuple[float, ...]:
    """Where no step was as large as a knot, more tokens cost what they did before it."""
    seen = [i for i, start in enumerate(KNOTS[:-1]) if start < most]
    # One span may have got the share of its neighbour: what follows goes by the average.
    reach = sum(per_token[i] * (KNOTS[i + 1] - KNOTS[i]) for i in seen[-3:])
    average = reach / (KNOTS[seen[-1] + 1] - KNOTS[seen[-3:][0]])
    return tuple(p if i in seen else average for i, p in enumerate(per_token))


def _non_negative(matrix: Any, target: Any) -> list[float]:
    """Least squares without negative terms: Lawson and Hanson's active sets (Solving Least Squares
    Problems, 1974, chapter 23)."""
    import numpy

    scale = numpy.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    count = matrix.shape[1]
    terms, free = numpy.zeros(count), numpy.zeros(count, dtype=bool)
    for _ in range(10 * count):
        pull = matrix.T @ (target - matrix @ terms)
        pull[free] = -1.0
        best = int(pull.argmax())
        if pull[best] <= 1e-10 * len(target):
            break
        free[best] = True
        while True:
            solved = numpy.zeros(count)
            solved[free] = numpy.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if solved[free].min() > 0:
                break
            low = free & (solved <= 0)
            step = float((terms[low] / numpy.maximum(terms[low] - solved[low], 1e-300)).min())
            terms = terms + min(step, 1.0) * (solved - terms)
            free &= terms > 1e-15
            if not free.any():
                break
        terms = numpy.where(free, solved, 0.0)
    return [float(term) for term in terms / scale]


def roofline(
    *,
    weight_bytes: int,
    parameters: int,
    kv_bytes_per_token: int,
    attention_flops_per_token: float,
    memory_gb_per_second: float,
    gflops: float,
) -> StepTimeModel:
    """A model from a machine's figures: a step reads all weights once and computes two operations
    for each parameter and token; whatever takes longer counts. Attention reads the keys and values
    of a request once for a decode and computes for a prompt.

    Args:
        weight_bytes: That a step reads.
        parameters: That multiply each token.
        kv_bytes_per_token: Keys and values of one token of context.
        attention_flops_per_token: Operations for each token of context of each token.
        memory_gb_per_second: That can be read, in 1e9 bytes per second.
        gflops: 1e9 operations per second.

    Raises:
        ConfigError: a figure of the machine is not positive.
    """
    for name, value in (("memory-gb-s", memory_gb_per_second), ("gflops", gflops)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name} must be above 0, got {value:g}")
    reading = weight_bytes / (memory_gb_per_second * 1e9)
    each = 2 * parameters / (gflops * 1e9)
    hidden = reading / each  # tokens that take as long to compute as the weights take to read
    per_token = []
    for start, end in zip(KNOTS[:-1], KNOTS[1:], strict=True):
        per_token.append(each * min(1.0, max(0.0, (end - hidden) / (end - start))))
    per_token[-1] = each
    about = {
        "source": "roofline",
        "memory_gb_per_second": memory_gb_per_second,
        "gflops": gflops,
    }
    return StepTimeModel(
        reading,
        tuple(per_token),
        per_decode_context=max(
            kv_bytes_per_token / (memory_gb_per_second * 1e9),
            attention_flops_per_token / (gflops * 1e9),
        ),
        per_prompt_context=attention_flops_per_token / (gflops * 1e9),
        about=about,
    )
