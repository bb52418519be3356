"""Models of step times: what is fitted predicts, never falls, and comes back from its file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from quire.core.batch import ScheduledBatch, ScheduledCachedRequests, ScheduledNewRequest
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.sim.step_time import (
    KNOTS,
    Overheads,
    StepShape,
    StepTimeModel,
    Succession,
    fit,
    roofline,
    shape_of,
)


def random_shape(rng: random.Random) -> StepShape:
    decodes, prefills = rng.choice([0, 1, 3, 8, 30, 64]), rng.choice([0, 0, 0, 1, 2])
    lengths = [rng.randint(2, 900) for _ in range(prefills)]
    context = sum(rng.randint(1, 4000) for _ in range(decodes))
    prompts = sum(n * rng.randint(0, 2000) + n * (n + 1) // 2 for n in lengths)
    after, woken = (0.0 if prefills else rng.choice([0.0, 3.5, 30.0])), rng.choice([0, 0, 1])
    tokens, rows = decodes + sum(lengths), decodes + prefills
    idle = woken * rng.choice([0.02, 0.2, 1.1, 2.0])
    displaced = context * (after or prefills * rng.choice([3.0, 30.0]))
    head = 1 if decodes else rng.choice([0, 1])
    return StepShape(tokens, rows, prefills, context, prompts, after, woken, idle, displaced, head)


def machine(shape: StepShape) -> float:
    """A made-up one: weights are read once, then each token costs more."""
    return (
        2e-3
        + max(1e-3, 4e-5 * shape.tokens)
        + 1e-5 * shape.rows
        + 2e-8 * shape.decode_context
        + 3e-8 * shape.prompt_context
        + 4e-5 * shape.after
        + 6e-4 * shape.woken
        + 2e-2 * shape.idle
        + 3e-9 * shape.displaced
        + 8e-4 * shape.head
        + 5e-8 * max(0, shape.decode_context - 8192)
    )


def test_a_fit_predicts_steps_it_was_not_fitted_to() -> None:
    rng = random.Random(1)
    shapes = [s for s in (random_shape(rng) for _ in range(800)) if s.tokens]
    model = fit(shapes, [machine(s) * rng.uniform(0.97, 1.03) for s in shapes])
    others = [s for s in (random_shape(rng) for _ in range(300)) if s.tokens]
    errors = [abs(model.seconds(s) / machine(s) - 1) for s in others]
    assert sum(errors) / len(errors) < 0.03 and max(errors) < 0.2


def test_a_few_steps_of_a_slow_model_tell_what_prompts_cost() -> None:
    """They vary by a tenth, and not all sizes are among them."""

    def slow(shape: StepShape) -> float:
        return 45e-3 + 5e-4 * shape.tokens + 1.5e-7 * shape.prompt_context

    worst = []
    for seed in range(20):
        rng = random.Random(seed)
        shapes = [StepShape(1, 1, 0, rng.randint(10, 900), 0) for _ in range(40)]
        for _ in range(25):
            tokens, before = rng.choice([20, 70, 100, 256, 300, 512, 1500]), rng.choice([0, 512])
            attended = tokens * before + tokens * (tokens + 1) // 2
            shapes.append(StepShape(tokens, 1, 1, 0, attended))
        model = fit(shapes, [slow(shape) * rng.gauss(1.0, 0.1) for shape in shapes])
        prompts = [StepShape(n, 1, 1, 0, n * (n + 1) // 2) for n in (50, 200, 400, 600, 1000, 2000)]
        worst.append(max(abs(model.seconds(shape) / slow(shape) - 1) for shape in prompts))
    assert sum(worst) / len(worst) < 0.12


def test_few_steps_do_not_make_decodes_after_prompts_slow() -> None:
    """Where weights come from memory in each step, nothing is displaced. The steps say so with a
    tenth of error each, and what they say is asked of far larger ones."""
    wrong = []
    for seed in range(20):
        rng = random.Random(seed)
        shapes = [StepShape(n, n, 0, 300 * n, 0) for n in [1, 1, 2, 4, 8, 16] * 10]
        shapes += [StepShape(n, 1, 1, 0, n * (n + 1) // 2) for n in (64, 256, 600) * 5]
        for root in (8.0, 16.0, 24.0, 24.0, 24.0):
            context = rng.randint(200, 1200)
            shapes.append(StepShape(4, 4, 0, context, 0, root, 0, 0.0, root * context))
        times = [(45e-3 + 5e-4 * s.tokens + 1e-7 * s.decode_context) for s in shapes]
        model = fit(shapes, [each * rng.gauss(1.0, 0.1) for each in times])
        large = StepShape(16, 16, 0, 16 * 700, 0, 40.0, 0, 0.0, 40.0 * 16 * 700)
        wrong.append(model.seconds(large) / (45e-3 + 16 * 5e-4 + 1e-7 * 16 * 700) - 1)
    assert max(wrong) < 0.5 and sum(wrong) / len(wrong) < 0.15


def test_more_in_a_step_never_takes_less() -> None:
    rng = random.Random(2)
    for _ in range(20):
        shapes = [s for s in (random_shape(rng) for _ in range(60)) if s.tokens]
        model = fit(shapes, [rng.uniform(1e-3, 1e-1) for _ in shapes])
        for shape in shapes:
            for name in StepShape._fields:
                more = shape._replace(**{name: getattr(shape, name) + rng.randint(1, 500)})
                assert model.seconds(more) >= model.seconds(shape)


def test_larger_steps_than_any_seen_go_on_as_before() -> None:
    shapes = [StepShape(n, 1, 1, 0, 0) for n in (8, 16, 32, 64, 128, 256, 512)]
    model = fit(shapes, [1e-3 + 1e-4 * s.tokens for s in shapes])
    assert model.seconds(StepShape(4096, 1, 1, 0, 0)) == pytest.approx(0.41, rel=0.1)
    assert model.seconds(StepShape(100_000, 1, 1, 0, 0)) == pytest.approx(10.0, rel=0.1)


def test_steps_vary_around_the_model_as_they_were_measured() -> None:
    """Decodes and prompts each in their own way."""
    rng = random.Random(5)
    shapes = [s for s in (random_shape(rng) for _ in range(1800)) if s.tokens]
    usual = {False: [0.8, 0.8, 0.8, 1.6], True: [0.95, 1.05]}
    model = fit(shapes, [machine(s) * rng.choice(usual[bool(s.prefills)]) for s in shapes])
    for spread in (model.spread, model.prompt_spread):
        assert sum(spread) == pytest.approx(len(spread), rel=1e-3)
        assert list(spread) == sorted(spread)
    assert 70 <= sum(ratio < 1.2 for ratio in model.spread) <= 80
    assert model.prompt_spread[0] > 0.85 and model.prompt_spread[-1] < 1.15
    few = [*[s for s in shapes if s.prefills][:90], *[s for s in shapes if not s.prefills][:90]]
    steady = fit(few, [machine(s) for s in few])
    assert not steady.spread and not steady.prompt_spread, "too few to tell"


def test_a_fit_to_steps_that_vary_is_their_mean() -> None:
    """Of decodes and of prompts; throughput goes by the mean, and no step comes twice."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(6):
        rng = random.Random(seed)
        shapes = [s for s in (random_shape(rng) for _ in range(3000)) if s.tokens]
        seconds = [machine(s) * rng.lognormvariate(0, 0.35) for s in shapes]
        model = fit(shapes, seconds)
        for prompts, found in ratios.items():
            pairs = zip(shapes, seconds, strict=True)
            some = [(s, took) for s, took in pairs if bool(s.prefills) is prompts]
            found.append(sum(model.seconds(s) for s, _ in some) / sum(took for _, took in some))
    for found in ratios.values():
        assert sum(found) / len(found) == pytest.approx(1.0, abs=0.02)


def test_too_few_kinds_of_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 kinds, got 1"):
        fit([StepShape(1, 1, 0, 5, 0)] * 50, [0.1] * 50)


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    rng = random.Random(3)
    per_token = tuple(rng.uniform(0, 1e-4) for _ in KNOTS[1:])
    model = StepTimeModel(
        1e-3,
        per_token,
        1e-5,
        2e-5,
        3e-9,
        4e-9,
        5e-6,
        6e-5,
        7e-3,
        8e-9,
        9e-4,
        (9e-9, 0.0, 1e-8),
        Overheads(1e-4, 1e-6, 2e-3, 1e-3, 1e-5, 3e-5, 4e-5, 5e-5, 1e-7, 2e-2, 1e-2),
        {"a": "b"},
        (0.9, 1.1),
        spells=((0.9, 1.0), (1.1, 1.0)),
    )
    shape = StepShape(77, 12, 2, 50_000, 9000, 3.0, 1, 0.7, 15_000.0)
    assert model.scaled(3.0).seconds(shape) == pytest.approx(3 * model.seconds(shape))
    model.write(tmp_path / "m.json")
    assert StepTimeModel.read(tmp_path / "m.json") == model


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "truncated"),
        ("[]", "no calibration"),
        ('{"format": "quire-step-times", "version": 9}', "calibrate again"),
        (json.dumps({**StepTimeModel(1.0, (0.0,) * 14).to_dict(), "far": [1]}), "calibrate again"),
    ],
)
def test_files_that_are_no_calibration_are_refused(
    tmp_path: Path, content: str, problem: str
) -> None:
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        StepTimeModel.read(tmp_path / "m.json")
    with pytest.raises(ConfigError, match="cannot read"):
        StepTimeModel.read(tmp_path / "absent")


def test_bad_figures_are_refused() -> None:
    good = StepTimeModel(1e-3, (0.0,) * 14)
    for change in (
        {"fixed": -1.0}, {"per_row": float("nan")}, {"per_token": (0.0,)}, {"per_far": (0.0,)},
        {"per_far": (0.0, -1.0, 0.0)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="per_token|per_far|negative"):
            dataclasses.replace(good, **change)
    for ratio in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="spells must be above 0"):
            dataclasses.replace(good, spells=((1.0, 1.0), (1.0, ratio)))
    data = good.to_dict()
    del data["per_row"], data["overheads"]
    with pytest.raises(ValueError, match="overheads"):
        StepTimeModel.from_dict(data)


def test_a_roofline_is_memory_first_and_arithmetic_then() -> None:
    model = roofline(
        weight_bytes=10**9,
        parameters=5 * 10**8,
        kv_bytes_per_token=12_288,
        attention_flops_per_token=50_000,
        memory_gb_per_second=20,
        gflops=500,
    )
    one = model.seconds(StepShape(1, 1, 0, 0, 0))
    assert one == pytest.approx(0.05) and one == model.seconds(StepShape(16, 16, 0, 0, 0))
    assert model.seconds(StepShape(1000, 1, 1, 0, 0)) == pytest.approx(2.0, rel=0.03)
    with pytest.raises(ConfigError, match="--gflops must be above 0, got 0"):
        roofline(
            weight_bytes=1, parameters=1, kv_bytes_per_token=1, attention_flops_per_token=1,
            memory_gb_per_second=1, gflops=0,
        )  # fmt: skip


def test_shapes_of_batches_count_what_is_attended() -> None:
    new = ScheduledNewRequest("n", [1] * 9, [], SamplingParams(), ([1],), 4)
    known = ScheduledCachedRequests(["a", "b"], [(), ()], [10, 7])
    batch = ScheduledBatch(1, [new], known, {"a": 1, "b": 3, "n": 5}, 9, [], [])
    # a: 11 tokens; b: 8 + 9 + 10; n: 5 + 6 + 7 + 8 + 9
    assert shape_of(batch) == StepShape(9, 3, 2, 11, 27 + 35)
    decodes = ScheduledBatch(2, [], known, {"a": 1, "b": 1}, 2, [], [])
    assert shape_of(decodes) == StepShape(2, 2, 0, 19, 0)
    assert shape_of(batch, 0) == StepShape(9, 3, 2, 11, 62, head=0) and shape_of(batch, 3).head == 1


def test_steps_tell_what_was_before_them() -> None:
    known = ScheduledCachedRequests(["a", "b"], [(), ()], [10, 7])
    prompt = ScheduledBatch(1, [], known, {"a": 64, "b": 1}, 65, [], [])
    decodes = ScheduledBatch(2, [], known, {"a": 1, "b": 1}, 2, [], [])
    following = Succession()
    first, second = (following.shape_of(decodes, now)[5:] for now in (1.0, 1.1))
    assert first == (0.0, 1, pytest.approx(math.log(3.0)), 0.0, 1)
    assert second == (0.0, 0, 0.0, 0.0, 1)
    beside = following.shape_of(prompt, 1.2, 0)[5:]
    assert beside == (0.0, 0, 0.0, 8.0 * 8, 0), "its time is in its tokens, not that of the decode"
    after = [following.shape_of(decodes, 1.3) for _ in range(3)]
    assert [(s.after, s.displaced) for s in after] == [(8.0, 152.0), (4.0, 76.0), (2.0, 38.0)]
    following.idle(2.0)
    assert following.forgotten(2.0) == 0.0 and following.forgotten(6.5) == math.log(10.0)
    woken = following.shape_of(prompt, 2.5)
    assert (woken.woken, woken.idle) == (1, math.log(2.0))
    assert following.forgotten(9.0) == 0.0, "there is work again"
    faded = [following.shape_of(decodes, 3.0).after for _ in range(9)]
    assert faded == sorted(faded, reverse=True) and faded[-1] == 0.0
