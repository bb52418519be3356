"""How long a step takes, by what is in it: fitted to measured steps, or from a machine's figures.

`seconds = a + f(tokens) + b rows + c prefills + d(decode context) + e prompt context + g after +
h woken + i idle + j displaced + k head`, where `f` is linear between powers of two, and `d` between
the few sizes of `FAR`, beyond which keys and values leave a cache. No term is negative and neither
`f` nor the slope of `d` ever falls, so a step with more in it never takes less. Knows no scheduler
and no clock.

`after`, `woken`, `idle` and `displaced` tell of what was before the step: a decode after a long
prompt finds the caches full of other things, and has to read again what it attends to; the first
step of an idle engine finds its threads asleep, and its weights the less in caches that others
share, the longer it was idle. With a small model that doubles the time of such a step, and after a
second without work the time of a large one.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
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
FAR: Final = (2048, 8192, 32768)
"""Tokens that decodes attend to, summed, beyond which each may cost more: keys and values of so
many no longer are in one of the caches."""
TOO_LONG: Final = 1e9
"""Seconds, or ratios, that no figure of a model reaches."""
FASTEST: Final = 1e15
"""GB/s and GFLOP/s below which the figures of a machine are: a step takes some time on it."""
OUTLIER: Final = 20.0
"""A step counts as at most so many times the median of its kind."""
PASSES: Final = 4
"""Of the fit; each weighs errors by what the last one expects."""
FADING: Final = 0.5
"""What each step leaves of `StepShape.after`."""
FADED: Final = 0.5
"""Below this it is nothing."""
FORGETTING: Final = 0.5
"""Seconds without work beyond which each further one adds less and less to `StepShape.idle`."""
SMOOTH_FROM: Final = 32
"""Tokens from which on each more is expected to cost what the one before did: fewer wait for
memory."""
ATTENDED: Final = (512, 2**19, 0.3)
"""Tokens of a step, tokens that they attend to, and how much it counts if that costs anything."""
SPREAD: Final = 100
"""Ratios of a `StepTimeModel.spread`."""
LEAST_SPREAD: Final = 100
"""Steps of a sort without which nothing is said of how they vary."""
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
    after: float = 0.0
    """Of a step without prompts: how much a prompt has just displaced from the caches. See
    `Succession`."""
    woken: int = 0
    """1 if the engine had nothing to do before it."""
    idle: float = 0.0
    """How much it forgot meanwhile. See `Succession`."""
    displaced: float = 0.0
    """`decode_context`, times how much a prompt has just displaced of it. See `Succession`."""
    head: int = 1
    """0 if no request gets a token, because all are within their prompts: then the head, in small
    models a quarter of all weights, is not read."""


def shape_of(batch: ScheduledBatch, sampled: int = 1) -> StepShape:
    """What is in a batch that gives a token to so many requests."""
    counts, known = batch.num_scheduled_tokens, batch.scheduled_cached_reqs
    total, rows = batch.total_num_scheduled_tokens, len(counts)
    if total == rows and not batch.scheduled_new_reqs:
        context = sum(known.num_computed_tokens) + rows
        return StepShape(total, rows, 0, context, 0, head=min(sampled, 1))
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
    return StepShape(total, rows, prefills, decodes, prompts, head=min(sampled, 1))


class Succession:
    """What is in steps that follow each other.

    After a prompt of n tokens, `after` is the root of n, and fades with each step: measured were
    0.2, 0.5, 0.9 and 1.1 ms more after 8, 150, 600 and 1024 tokens, and about a quarter of that in
    the four steps after the first. `displaced` is that root times the context of decodes, with a
    prompt in the same step as well, which displaces it in each layer anew: measured were 0.07 us
    more for each of up to 32,000 tokens, after prompts of 150 and more.

    After t seconds without work, `idle` is ln(1 + t / FORGETTING). A step took 0.3, 1.3, 3.4, 7.5
    and 19 ms more after 0.01, 0.03, 0.1, 0.3 and 1 s, whether it had 8 tokens or 600, and with a
    larger model 1.5, 7, 15, 35, 65 and 110 ms after 0.03, 0.1, 0.3, 1, 3 and 8 s
    (`benchmarks/after_idle.py`). All times are those of one clock, on which an engine has had
    nothing to do since 0.
    """

    def __init__(self) -> None:
        self._after = 0.0
        self._idle_since: float | None = 0.0

    def shape_of(self, batch: ScheduledBatch, now: float, sampled: int = 1) -> StepShape:
        """What is in the next step, which begins now and gives a token to so many requests."""
        shape = shape_of(batch, sampled)
        tokens, rows, prefills = shape[:3]
        if not tokens:
            return shape
        after, woken, idle = self._after, int(self._idle_since is not None), self.forgotten(now)
        self._after, self._idle_since = (after * FADING if after > FADED else 0.0), None
        displaced = after
        if prefills:
            self._after = max(self._after, math.sqrt(tokens - rows + prefills))
            displaced, after = max(displaced, self._after), 0.0
        displaced *= shape.decode_context
        if not (after or woken or displaced):
            return shape
        return StepShape(*shape[:5], after, woken, idle, displaced, shape.head)

    def forgotten(self, now: float) -> float:
        """`StepShape.idle` of a step that would begin now."""
        since = self._idle_since
        return 0.0 if since is None else math.log1p(max(0.0, now - since) / FORGETTING)

    def idle(self, now: float) -> None:
        """From now on there is nothing to do until the next request comes."""
        self._idle_since = now


@dataclass(frozen=True, slots=True)
class Overheads:
    """What passes beside the steps, in seconds."""

    gap: float = 0.0
    """Between two steps of a busy engine."""
    gap_per_row: float = 0.0
    """The same for each request of the step before: its output is sent and its text made."""
    arrival: float = 0.0
    """From a request's arrival at a busy engine until the scheduler can take it."""
    output: float = 0.0
    """From the end of a step until its callers have their tokens."""
    output_per_row: float = 0.0
    """The same for each request of the step, because all their tokens go the same way."""
    gap_after_prompt: float = 0.0
    """Added to the gap after a step with prompts."""
    gap_per_arrival: float = 0.0
    """Added for each request that comes to a busy engine: the scheduler gets it between two
    steps."""
    wake: float = 0.0
    """Added to `arrival` where the engine has nothing to do: it sleeps."""
    gap_per_prompt_token: float = 0.0
    """Added to the gap for each token of the step before that is not the only one of its request:
    what ran between two steps finds less of its own in the caches, the more was computed."""
    wake_per_idle: float = 0.0
    """Added to `wake`, times `StepShape.idle`: what a request passes through is no longer in the
    caches either."""
    output_per_idle: float = 0.0
    """The same added to `output`."""
    gap_of_arrival: float = 0.0
    """Added if any request comes to a busy engine: what takes it in is not in the caches. Further
    ones, on the same way, cost only `gap_per_arrival`."""

    def waking(self, idle: float) -> float:
        """Added to `arrival` where the engine has nothing to do and has forgotten so much."""
        return self.wake + self.wake_per_idle * idle

    def delivery(self, rows: int, idle: float) -> float:
        """From the end of a step of so many requests until its callers have their tokens."""
        return self.output + self.output_per_row * rows + self.output_per_idle * idle

    def taking_in(self, first: bool) -> float:
        """What a request that comes to a busy engine adds to the pause, if it is the first in it or
        not."""
        return self.gap_per_arrival + self.gap_of_arrival * first

    def pause(self, shape: StepShape, arrivals: int) -> float:
        """Between a step of this shape and the next, if so many requests come meanwhile."""
        return (
            self.gap
            + self.gap_per_row * shape.rows
            + self.gap_after_prompt * min(shape.prefills, 1)
            + self.gap_of_arrival * min(arrivals, 1)
            + self.gap_per_arrival * arrivals
            + self.gap_per_prompt_token * max(0, shape.tokens - shape.rows)
        )


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of steps.

    Args:
        fixed: Of every step.
        per_token: Seconds of one more token, between `KNOTS[i]` and `KNOTS[i + 1]` tokens; the last
            one also holds above.
        per_row, per_prefill, per_decode_context, per_prompt_context, per_after, per_woken,
            per_idle, per_displaced, per_head: See `StepShape`.
        per_far: Added for each token of the decode context beyond each of `FAR`.
        overheads: What passes beside the steps.
        about: Where the figures are from, for people.
    """

    fixed: float
    per_token: tuple[float, ...]
    per_row: float = 0.0
    per_prefill: float = 0.0
    per_decode_context: float = 0.0
    per_prompt_context: float = 0.0
    per_after: float = 0.0
    per_woken: float = 0.0
    per_idle: float = 0.0
    per_displaced: float = 0.0
    per_head: float = 0.0
    per_far: tuple[float, ...] = (0.0,) * len(FAR)
    overheads: Overheads = field(default_factory=Overheads)
    about: dict[str, Any] = field(default_factory=dict)
    spread: tuple[float, ...] = ()
    """How much longer or shorter steps without prompts take than what this says, in equal shares of
    them: ratios of mean 1, in ascending order. Empty: they take just that."""
    prompt_spread: tuple[float, ...] = ()
    """The same of steps with prompts. They are longer, so they vary less: half a long prompt's time
    more or less would be taken by all who wait behind it."""
    spells: tuple[tuple[float, float], ...] = ()
    """How fast the machine was while this was measured, second by second: how many times as long as
    this says steps without and with prompts took, 1 on average. Empty: always as fast."""
    _table: list[float] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError: a figure is missing or negative."""
        for name, count in (("per_token", len(KNOTS) - 1), ("per_far", len(FAR))):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must be {count} figures")
        figures = (
            self.fixed, *self.per_token, self.per_row, self.per_prefill, self.per_decode_context,
            self.per_prompt_context, self.per_after, self.per_woken, self.per_idle,
            self.per_displaced, self.per_head, *self.per_far,
            *asdict(self.overheads).values(),
        )  # fmt: skip
        if not all(0 <= figure < TOO_LONG for figure in figures):
            raise ValueError(f"no figure may be negative, or {TOO_LONG:g} s and more")
        if any(not 0 <= ratio < TOO_LONG for ratio in (*self.spread, *self.prompt_spread)):
            raise ValueError(f"no ratio of the spread may be negative, or {TOO_LONG:g} and more")
        if any(not 0 < ratio < TOO_LONG for each in self.spells for ratio in each):
            raise ValueError(f"every ratio of the spells must be above 0 and below {TOO_LONG:g}")
        if not any(figures[: -len(asdict(self.overheads))]):
            raise ValueError("a step must take some time")

    def seconds(self, shape: StepShape) -> float:
        """How long a step takes."""
        tokens, table, context = shape.tokens, self._table, shape.decode_context
        far = 0.0
        if context > FAR[0]:
            for start, each in zip(FAR, self.per_far, strict=True):
                far += each * max(0, context - start)
        while tokens >= len(table) and len(table) <= MOST_TOKENS:
            table.append(self.of_tokens(len(table)))
        return (
            (table[tokens] if tokens < len(table) else self.of_tokens(tokens))
            + self.per_row * shape.rows
            + self.per_prefill * shape.prefills
            + self.per_decode_context * context
            + far
            + self.per_prompt_context * shape.prompt_context
            + self.per_after * shape.after
            + self.per_woken * shape.woken
            + self.per_idle * shape.idle
            + self.per_displaced * shape.displaced
            + self.per_head * shape.head
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
            per_after=self.per_after * factor,
            per_woken=self.per_woken * factor,
            per_idle=self.per_idle * factor,
            per_displaced=self.per_displaced * factor,
            per_head=self.per_head * factor,
            per_far=tuple(each * factor for each in self.per_far),
            _table=[],
        )

    def to_dict(self) -> dict[str, Any]:
        """What stands in the file."""
        figures = asdict(self)
        del figures["_table"]
        knots = {"knots": list(KNOTS), "far": list(FAR)}
        return {"format": FORMAT, "version": VERSION, **knots, **figures}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepTimeModel:
        """The inverse of `to_dict`.

        Raises:
            ValueError: it is not of this form or version.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"no calibration: format must be {FORMAT!r}")
        current = (VERSION, list(KNOTS), list(FAR))
        if (data.get("version"), data.get("knots"), data.get("far", list(FAR))) != current:
            raise ValueError(
                f"of version {data.get('version')!r:.20}, not {VERSION}: calibrate again"
            )
        try:
            beside = ("format", "version", "knots", "far")
            given = {name: value for name, value in data.items() if name not in beside}
            given["overheads"] = Overheads(**given["overheads"])
            lists = {name: tuple(given.get(name, ())) for name in ("spread", "prompt_spread")}
            lists["spells"] = tuple((a, b) for a, b in given.get("spells", ()))
            lists["per_far"] = tuple(given.get("per_far", (0.0,) * len(FAR)))
            if not isinstance(given.get("about", {}), dict):
                raise TypeError("about must be an object")
            return cls(**given | lists | {"per_token": tuple(given["per_token"])})
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

    The few prompts of a slow model cannot tell a bend of `f` from the cost of attention, nor either
    from chance. So a step must show what is unusual: see `_unless_shown`.

    Raises:
        ConfigError: there are too few steps, or all are alike.
    """
    import numpy

    steps = [(shape, each) for shape, each in zip(shapes, seconds, strict=True) if shape.tokens]
    steps = [(shape, each) for shape, each in steps if each > 0]
    if (kinds := len({shape for shape, _ in steps})) < 4:
        raise ConfigError(
            f"a model of step times needs steps of at least 4 kinds, got {kinds}: record a "
            "longer run, or one with prompts and decodes"
        )
    values = numpy.array([_values(shape) for shape, _ in steps])
    taken = numpy.array([each for _, each in steps])
    weights = _weights([shape for shape, _ in steps])
    expected = _usual(steps)
    for _ in range(PASSES):
        # Errors are relative to what is expected. Were they relative to what was measured, slow
        # steps would count little and quick ones much, and the fit were below the mean, by which
        # throughput goes.
        by = weights / expected
        target = numpy.minimum(taken, OUTLIER * expected)
        plain = _unless_shown(values, [shape.tokens for shape, _ in steps], expected)
        terms = non_negative(
            numpy.vstack([values * by[:, None], plain]),
            numpy.concatenate([target * by, numpy.zeros(len(plain))]),
        )
        terms[0] = max(terms[0], 1e-9)
        expected = values @ numpy.array(terms)
    count = len(KNOTS)
    per_token = _continued(terms[1:count], max(shape.tokens for shape, _ in steps))
    row, prefill, decode, prompt, after, woken, idle, displaced, head, *far = terms[count:]
    model = StepTimeModel(
        terms[0], per_token, row, prefill, decode, prompt, after, woken, idle, displaced, head,
        tuple(far), overheads or Overheads(), about or {},
    )  # fmt: skip
    decodes = [step for step in steps if not step[0].prefills]
    prompts = [step for step in steps if step[0].prefills]
    return replace(
        model, spread=_spread(model, decodes), prompt_spread=_spread(model, prompts), _table=[]
    )


def _values(shape: StepShape) -> tuple[float, ...]:
    """What each term of a model is multiplied with."""
    far = (float(max(0, shape.decode_context - start)) for start in FAR)
    return 1.0, *_parts(shape.tokens), *map(float, shape[1:]), *far


def _term(name: str) -> int:
    """Which of `_values` belongs to this part of a step."""
    return len(KNOTS) - 1 + StepShape._fields.index(name)


def _unless_shown(values: Any, tokens: Sequence[int], expected: Any) -> Any:
    """What terms are to be unless steps show otherwise, as rows whose products with the terms are
    to be 0: `f` goes on as before, attention costs a prompt nothing, and no decode is slower for a
    large context, or one that was displaced. Each counts as one step that is off by as much.

    Args:
        values: Of each step, what each term is multiplied with.
        tokens: Of each step.
        expected: Seconds of each.
    """
    import numpy

    order, terms = numpy.argsort(tokens, kind="stable"), values.shape[1]
    ascending, seconds = numpy.array(tokens)[order], expected[order]
    rows = []
    for i, (start, end) in enumerate(itertools.pairwise(KNOTS[:-1]), 1):
        if start >= SMOOTH_FROM and end < ascending[-1]:
            bend = numpy.zeros(terms)
            bend[i], bend[i + 1] = end - start, start - end
            rows.append(bend / numpy.interp(end, ascending, seconds))
    count, attended, weight = ATTENDED
    attention = numpy.zeros(terms)
    attention[_term("prompt_context")] = weight * attended
    rows.append(attention / numpy.interp(count, ascending, seconds))
    for term in (_term("displaced"), *range(terms - len(FAR), terms)):
        most = numpy.zeros(terms)
        most[term] = (values[:, term] / expected).max()
        rows.append(most)
    return numpy.array(rows)


def _usual(steps: Sequence[tuple[StepShape, float]]) -> Any:
    """For each step, the median of those like it."""
    import numpy

    like: dict[tuple[int, ...], list[float]] = {}
    for shape, each in steps:
        like.setdefault(kind_of(shape), []).append(each)
    usual = {kind: statistics.median(measured) for kind, measured in like.items()}
    return numpy.array([usual[kind_of(shape)] for shape, _ in steps])


def _weights(shapes: Sequence[StepShape]) -> Any:
    """How much the error of each step counts: those of a kind count together by the square root of
    their number, so that thousands of decodes do not outweigh a few long prompts."""
    import numpy

    numbers = collections.Counter(map(kind_of, shapes))
    return numpy.array([numbers[kind_of(shape)] ** -0.25 for shape in shapes])


def kind_of(shape: StepShape) -> tuple[int, ...]:
    """Steps within a factor of two of each other in tokens and requests are alike."""
    return shape.tokens.bit_length(), shape.rows.bit_length(), min(shape.prefills, 1)


def _spread(model: StepTimeModel, steps: Sequence[tuple[StepShape, float]]) -> tuple[float, ...]:
    ratios = sorted(min(OUTLIER, each / model.seconds(shape)) for shape, each in steps)
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


def non_negative(matrix: Any, target: Any) -> list[float]:
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
        ConfigError: a figure of the machine is not positive, or such that steps take no time or
            `TOO_LONG`.
    """
    for name, value in (("memory-gb-s", memory_gb_per_second), ("gflops", gflops)):
        if not 0 < value < FASTEST:
            rule = f"below {FASTEST:g}" if value > 0 else "above 0"
            raise ConfigError(f"--{name} must be {rule}, got {value:g}")
    for name, value, work in (
        ("memory-gb-s", memory_gb_per_second, max(weight_bytes, kv_bytes_per_token)),
        ("gflops", gflops, max(2 * parameters, attention_flops_per_token)),
    ):
        if work / (value * 1e9) >= TOO_LONG:
            raise ConfigError(
                f"--{name} {value:g} is too little: a step would take {TOO_LONG:g} s and more"
            )
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
