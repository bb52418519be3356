"""What all experiments are made of: engines side by side, rounds, a table, and a conclusion.

Engines that are compared take turns, round by round, so that a noisy machine is noisy for all. An
effect is the median of the rounds' ratios. It counts as seen only if every round shows it, in the
same direction and with at least 5 %; otherwise the conclusion says that it was not seen.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from quire.bench.offline.drive import Drive, DriveOutcome, Job, random_prompts
from quire.bench.result import latencies
from quire.engine.llm import LLM
from quire.errors import ConfigError
from quire.params import SamplingParams

LEAST_EFFECT: Final = 0.05
LEAST_ROUNDS: Final = 5
ROUNDS: Final = 7
KV_BYTES: Final = 256 << 20
"""Of each engine's KV cache, unless the user or the experiment says something else."""
_OF_MEMORY: Final = (
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Effect:
    """How many times larger one measurement was than another, over rounds."""

    ratios: tuple[float, ...]

    @classmethod
    def of(cls, larger: Sequence[float], smaller: Sequence[float]) -> Effect:
        """The ratios of two lists, round by round."""
        pairs = zip(larger, smaller, strict=True)
        return cls(tuple(a / max(b, 1e-12) for a, b in pairs))

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def direction(self) -> int:
        """1: larger; -1: smaller; 0: not seen."""
        if min(self.ratios) >= 1 + LEAST_EFFECT:
            return 1
        return -1 if max(self.ratios) <= 1 / (1 + LEAST_EFFECT) else 0

    @property
    def rounds(self) -> str:
        """The range, and of how many."""
        low, high = min(self.ratios), max(self.ratios)
        return f"{low:.2f} to {high:.2f} in {len(self.ratios)} rounds"

    def sentence(self, what: str, larger: str, smaller: str, than: str = "") -> str:
        """What was found, in words.

        Args:
            what: What was measured.
            larger: Said of it if it is larger: "rose to".
            smaller: Said if it is smaller.
            than: What it is compared with: "that without".
        """
        of = f" {than}" if than else ""
        ratio = f"{self.ratio:.2f} times{of} ({self.rounds})"
        if self.direction == 0:
            return f"{what}: no effect seen here, {ratio}"
        return f"{what} {larger if self.direction > 0 else smaller} {ratio}"


@dataclass
class LabReport:
    """What an experiment found."""

    name: str
    question: str
    setup: str
    columns: list[str]
    rows: list[list[str]]
    conclusion: str
    figures: dict[str, Any] = field(default_factory=dict)
    """Measured values by variant and figure, one per round."""

    def markdown(self) -> str:
        """Title, table and conclusion."""
        widths = [
            max(len(row[i]) for row in [self.columns, *self.rows]) for i in range(len(self.columns))
        ]

        def line(cells: Sequence[str]) -> str:
            first = cells[0].ljust(widths[0])
            rest = [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
            return "| " + " | ".join([first, *rest]) + " |"

        rule = (
            "|"
            + "|".join(
                ("-" * (w + 2)) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)
            )
            + "|"
        )
        table = "\n".join([line(self.columns), rule, *map(line, self.rows)])
        return f"{self.question}\n\n{self.setup}\n\n{table}\n\n**{self.conclusion}**"


class Lab:
    """What an experiment works with.

    Args:
        options: Arguments of `LLM` that the user gave; an experiment's own take precedence.
        rounds: How often everything is measured; at least 5, so that all agree by chance
            once in 16 times at most.
        seen: Called with (what, done, total) as rounds end.
        seed: Of prompts.

    Raises:
        ConfigError: too few rounds.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        rounds: int = ROUNDS,
        seen: Callable[[str, int, int], None] = lambda what, done, total: None,
        seed: int = 0,
    ) -> None:
        if rounds < LEAST_ROUNDS:
            raise ConfigError(
                f"--rounds must be at least {LEAST_ROUNDS}, got {rounds}: fewer prove nothing"
            )
        self.options, self.rounds = dict(options), rounds
        self._seen = seen
        self.rng = np.random.default_rng(seed)

    @contextlib.contextmanager
    def engines(self, variants: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, LLM]]:
        """An engine for each variant, alive at the same time and warm."""
        with contextlib.ExitStack() as stack:
            made = {name: stack.enter_context(self._llm(own)) for name, own in variants.items()}
            for llm in made.values():
                self.run(llm, [24] * 2, 4)
            yield made

    def _llm(self, own: Mapping[str, Any]) -> LLM:
        if clash := next((name for name in own if name in self.options), None):
            flag = "--" + clash.replace("_", "-")
            raise ConfigError(f"{flag} is what this experiment sets itself: leave it out")
        options = {**self.options, **own}
        if not any(name in options for name in _OF_MEMORY):
            options["kv_cache_memory_bytes"] = KV_BYTES
        return LLM(**options)

    def each_round(
        self,
        name: str,
        variants: Sequence[str],
        measure: Callable[[str, int], Mapping[str, float]],
    ) -> dict[str, dict[str, list[float]]]:
        """Measure all variants in every round; who begins changes.

        Args:
            name: For the progress.
            variants: Their names.
            measure: Gets a variant and the number of the round; gives figures.

        Returns:
            By variant and figure, the values of the rounds.
        """
        found: dict[str, dict[str, list[float]]] = {variant: {} for variant in variants}
        self._seen(f"lab {name}: rounds", 0, self.rounds)
        for number in range(self.rounds):
            for variant in list(variants)[:: 1 if number % 2 == 0 else -1]:
                for figure, value in measure(variant, number).items():
                    found[variant].setdefault(figure, []).append(value)
            self._seen(f"lab {name}: rounds", number + 1, self.rounds)
        return found

    def prompts(self, llm: LLM, lengths: Sequence[int], seed: int | None = None) -> list[list[int]]:
        """Random prompts of these lengths; equal seeds give equal ones."""
        rng = self.rng if seed is None else np.random.default_rng(seed)
        vocab = llm.llm_engine.core.info.vocab_size
        return [random_prompts(1, length, vocab, rng)[0] for length in lengths]

    def run(self, llm: LLM, lengths: Sequence[int], output: int) -> DriveOutcome:
        """Run new random prompts of these lengths, all at once."""
        return self.drive(llm, self.jobs(self.prompts(llm, lengths), output))

    def drive(self, llm: LLM, jobs: Sequence[Job]) -> DriveOutcome:
        """Run jobs."""
        return Drive(llm.llm_engine, jobs).run()

    @staticmethod
    def jobs(prompts: Sequence[list[int]], output: int, priority: int = 0) -> list[Job]:
        """Greedy, to a fixed length, without text."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        return [Job(prompt, params, priority) for prompt in prompts]


def context_of(llm: LLM) -> int:
    """Tokens that prompt and output may have."""
    limit = llm.llm_engine.config.model.max_model_len
    assert limit is not None, "resolve() settles it"
    return limit


def figures_of(outcome: DriveOutcome) -> dict[str, float]:
    """What most experiments look at; seconds, tokens per second, counts."""
    found = latencies(outcome.records)
    return {
        "seconds": outcome.duration,
        "tokens_per_second": outcome.num_output_tokens / max(outcome.duration, 1e-9),
        "steps": float(len(outcome.steps)),
        "ttft": float(found["ttft"].mean()) if len(found["ttft"]) else 0.0,
        "tpot": float(found["tpot"].mean()) if len(found["tpot"]) else 0.0,
        "peak_kv_usage": outcome.peak_kv_usage,
        "preemptions": float(outcome.num_preempted),
    }


def median(values: Sequence[float]) -> float:
    """Of the rounds."""
    return float(statistics.median(values))


def ms(values: Sequence[float]) -> str:
    """The median of seconds, in milliseconds."""
    return f"{1000 * median(values):.2f}"
