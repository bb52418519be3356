"""A verdict in plain words: how fast a server is for one user, and for how many it is fast enough.

More and more users ask at the same time, each one request after the other; a step of the ladder
is fast enough while the typical first word comes within a second and text as fast as people read.
Knows how to measure through `serve.py`, and prints nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from quire.bench.options import ServeOptions
from quire.bench.serve import ServeRun, run_serve
from quire.workload.options import DatasetOptions

LADDER: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Users at the same time."""
ROUNDS: Final = 3
"""Requests of each user; the first of a run meet an idle server."""
PATIENT_MS: Final = 1000.0
"""A first word that comes later feels slow."""
READING_MS: Final = 100.0
"""Milliseconds per token at ten tokens per second, which is about twice as fast as people read."""
AT_ONCE_MS: Final = 0.001
"""Per token: what is faster is no speed of a model."""
WORDS_PER_TOKEN: Final = 0.75


@dataclass(frozen=True, slots=True)
class QuickStep:
    """What was measured with some number of users."""

    users: int
    result: dict[str, Any]
    why: str = ""
    """The most frequent error of its requests; empty: none failed."""

    @property
    def is_fast_enough(self) -> bool:
        """Whether nobody is kept waiting, and nobody failed."""
        return (
            not self.result["failed"]
            and self.result["median_ttft_ms"] <= PATIENT_MS
            and self.result["median_tpot_ms"] <= READING_MS
        )


def climb(
    url: str,
    *,
    backend: str = "openai-chat",
    model: str | None = None,
    api_key: str | None = None,
    input_len: int = 64,
    output_len: int = 64,
    seconds: float = 60.0,
    told: Callable[[str], None] = lambda text: None,
) -> list[QuickStep]:
    """Measure with more and more users, until it is too slow, fails, or time is up.

    Args:
        url: The server.
        backend: How it is asked.
        model: Default: the first it lists.
        api_key: Its key.
        input_len: Prompt tokens.
        output_len: Reply tokens.
        seconds: After which no further step begins.
        told: Hears of each step.

    Raises:
        ConfigError: as `run_serve` does.
        StartupError: likewise.
    """
    steps: list[QuickStep] = []
    deadline = time.monotonic() + seconds

    def measure(users: int, rounds: int, seed: int) -> ServeRun:
        options = ServeOptions(
            base_url=url, backend=backend, model=model, api_key=api_key, max_concurrency=users,
            ignore_eos=True, temperature=0.0,
        )  # fmt: skip
        dataset = DatasetOptions(
            num_prompts=users * rounds, random_input_len=input_len, random_output_len=output_len,
            seed=seed,
        )  # fmt: skip
        return asyncio.run(run_serve(options, dataset))

    measure(1, 1, 0)  # the first request ever pays for what is made on first use
    for users in LADDER:
        if steps and time.monotonic() > deadline:
            told("time is up")
            break
        told(f"users at the same moment: {users}")
        run = measure(users, ROUNDS, users)
        steps.append(QuickStep(users, run.result, _why(run)))
        if not steps[-1].is_fast_enough:
            break
    return steps


def paragraph(steps: list[QuickStep], url: str, input_len: int, output_len: int) -> str:
    """What a manager reads."""
    alone = steps[0].result
    if not alone["completed"]:
        return (
            f"{alone['model_id']} at {url}: none of {alone['failed']} requests succeeded, so there "
            f"is nothing to say of its speed. The reason: {steps[0].why or 'unknown'}."
        )
    fine = [step for step in steps if step.is_fast_enough]
    said = [
        f"{alone['model_id']} at {url}: somebody who asks alone sees the first word after "
        f"{_seconds(alone['median_ttft_ms'])}, and then {_speed(alone)}"
        + ("." if _comes_at_once(alone) else ", where people read about 4.")
    ]
    if not fine:
        said.append(_too_slow(steps[0], "Even one user waits too long:"))
    elif fine[-1] is steps[-1]:
        said.append(_crowd(fine[-1]) + " More were not tried.")
    else:
        said.append(_crowd(fine[-1]))
        said.append(_too_slow(steps[-1], f"With {steps[-1].users} it is too slow:"))
    failed = sum(step.result["failed"] for step in steps)
    asked = sum(step.result["failed"] + step.result["completed"] for step in steps)
    held = f"All {asked} requests held."
    said.append(f"{failed} of {asked} requests failed." if failed else held)
    said.append(f"(Prompts of {input_len} tokens, replies of {output_len}; medians.)")
    return " ".join(said)


def _why(run: ServeRun) -> str:
    errors = Counter(record.error for record in run.outcome.records if not record.ok)
    return errors.most_common(1)[0][0] if errors else ""


def _crowd(step: QuickStep) -> str:
    result = step.result
    if step.users == 1:
        return "It is fast enough for one user at a time."
    per_hour = result["output_throughput"] * 3600 * WORDS_PER_TOKEN
    return (
        f"It is fast enough for {step.users} users at the same moment: each waits "
        f"{_seconds(result['median_ttft_ms'])} and gets {_speed(result)}; together that is about "
        f"{_round(per_hour):,} words an hour."
    )


def _too_slow(step: QuickStep, begin: str) -> str:
    result = step.result
    if not result["completed"]:
        return f"{begin} no request was answered."
    wait, speed = _seconds(result["median_ttft_ms"]), _speed(result)
    rest = "the rest comes with it" if _comes_at_once(result) else f"the rest comes at {speed}"
    return f"{begin} the first word takes {wait}, {rest}."


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _comes_at_once(result: dict[str, Any]) -> bool:
    """Whether the server, or something before it, holds replies back until they are whole."""
    return bool(result["median_tpot_ms"] <= AT_ONCE_MS)


def _speed(result: dict[str, Any]) -> str:
    if _comes_at_once(result):
        return "the rest at once"
    per_second = 1000 / result["median_tpot_ms"] * WORDS_PER_TOKEN
    return f"{per_second:.0f} words a second" if per_second >= 1 else "less than a word a second"


def _round(number: float) -> int:
    """Two digits that count."""
    digits = max(0, len(str(int(number))) - 2)
    return int(round(number, -digits))
