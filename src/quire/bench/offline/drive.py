"""Runs requests on an inline engine, and keeps a record of each and the statistics of each step.

The clock is `time.perf_counter`. A token's time is when `step()` returns it, so figures are those
of the engine alone: no HTTP, no other process. Knows no benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.result import RequestRecord
from quire.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.core.stats import StepStats
    from quire.engine.llm_engine import LLMEngine
    from quire.outputs import RequestOutput

Prompt = str | list[int]


@dataclass(slots=True)
class Job:
    """One request to the engine."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    due: float = 0.0
    """Seconds after the start of the run; before them the engine does not hear of it."""
    prompt_len: int = 0
    """Tokens of the prompt, if known; else the engine's count."""


@dataclass(slots=True)
class DriveOutcome:
    """What came of a run."""

    records: list[RequestRecord]
    """In the order of the jobs. Several completions (`n`) of a job count as one request."""
    duration: float
    steps: list[StepStats] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    """Output of the first completion of each job."""
    texts: list[str] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(record.output_len for record in self.records)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(record.input_len for record in self.records)

    @property
    def peak_kv_usage(self) -> float:
        """0 to 1."""
        return max((step.kv_cache_usage for step in self.steps), default=0.0)

    @property
    def num_preempted(self) -> int:
        """Preemptions."""
        return sum(step.num_preempted for step in self.steps)


class Drive:
    """One run of jobs on an engine.

    Args:
        engine: The engine; nothing else uses it meanwhile.
        jobs: What to run. A refused one raises, and nothing stays in the engine.
        seen: Called with (jobs done, jobs) at the beginning, and after each step that ended one.
        prequeue: Hand all jobs over before the clock starts. Only for jobs that are due at once.
    """

    def __init__(
        self,
        engine: LLMEngine,
        jobs: Sequence[Job],
        *,
        seen: Callable[[int, int], None] = lambda done, total: None,
        prequeue: bool = False,
    ) -> None:
        self._engine, self._jobs, self._seen = engine, jobs, seen
        self._prequeue = prequeue
        self._latest: dict[int, float] = {}
        self._ends: dict[int, int] = {}
        self._outcome = DriveOutcome(
            [], 0.0, token_ids=[[] for _ in jobs], texts=["" for _ in jobs]
        )
        self._left = 0

    def run(self) -> DriveOutcome:
        """Run to the end.

        Raises:
            RequestError: a job is invalid.
            QuireError: the engine failed on all of them.
        """
        order = iter(sorted(range(len(self._jobs)), key=lambda i: self._jobs[i].due))
        out = self._outcome
        out.records = [RequestRecord(0.0, job.prompt_len) for job in self._jobs]
        self._left = len(self._jobs)
        self._seen(0, self._left)
        try:
            if self._prequeue:
                self._add_all(list(order))
                order = iter(())
            start = time.perf_counter()
            if self._prequeue:
                for record in out.records:
                    record.start = start
            self._loop(order, start)
        except BaseException:
            self._engine.abort_request([str(i) for i in range(len(self._jobs))])
            raise
        out.duration = time.perf_counter() - start
        self._settle()
        return out

    def _add_all(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._add(index)

    def _loop(self, order: Iterator[int], start: float) -> None:
        waiting = next(order, None)
        while self._left:
            while waiting is not None and start + self._jobs[waiting].due <= time.perf_counter():
                self._add(waiting)
                waiting = next(order, None)
            if self._engine.has_unfinished_requests:
                self._step()
            elif waiting is not None:
                time.sleep(max(0.0, start + self._jobs[waiting].due - time.perf_counter()))

    def _add(self, index: int) -> None:
        job = self._jobs[index]
        params = job.params.replace(output_kind=RequestOutputKind.DELTA)
        prompt: Any = job.prompt
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        self._outcome.records[index].start = time.perf_counter()
        self._engine.add_request(str(index), prompt, params, priority=job.priority)

    def _step(self) -> None:
        before = self._left
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            self._take(output, now)
        step = self._engine.frontend.last_step
        steps = self._outcome.steps
        if step is not None and (not steps or steps[-1] is not step):
            steps.append(step)
        if self._left < before:
            self._seen(len(self._jobs) - self._left, len(self._jobs))

    def _take(self, output: RequestOutput, now: float) -> None:
        index = int(output.request_id)
        record, out = self._outcome.records[index], self._outcome
        record.input_len = len(output.prompt_token_ids or ())
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if tokens:
            if record.first_token is None:
                record.first_token = now
            else:
                record.itls.append(now - self._latest[index])
            self._latest[index] = now
            record.output_len += tokens
        for completion in output.outputs:
            if completion.index == 0:
                out.token_ids[index] += completion.token_ids
                out.texts[index] += completion.text
            if completion.finish_reason == "error":
                record.error = "the engine failed on it; see the log"
        if output.finished:
            record.end = now
            self._left -= 1

    def _settle(self) -> None:
        """One more step tells the worker that the last requests have ended."""
        while self._engine.has_unfinished_requests:
            self._engine.step()


def random_prompts(
    num: int, length: int, vocab_size: int, rng: np.random.Generator
) -> list[list[int]]:
    """Prompts of random ids, `length` tokens each; ids below 10 are left out, because special
    tokens are mostly there."""
    low = min(10, vocab_size - 1)
    return [[int(i) for i in rng.integers(low, vocab_size, length)] for _ in range(num)]


def check_context(prompt_len: int, output_len: int, limit: int, what: str = "") -> None:
    """Refuse lengths beyond the model's context.

    Raises:
        ConfigError: prompt and output together have more than `limit` tokens.
    """
    from quire.errors import ConfigError

    if prompt_len + output_len > limit:
        raise ConfigError(
            f"{what or 'a request'} has {prompt_len} prompt and {output_len} output tokens, more "
            f"than the context of {limit} (--max-model-len): ask for shorter ones"
        )
