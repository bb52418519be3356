"""Listens between model and sampler of an engine in this process: real logits, each with the
request it belongs to, its output so far, and what the engine made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quire import LLM


class Row(NamedTuple):
    """One decision of the sampler."""

    request_id: str
    """As the caller named it."""
    index: int
    """Which of its completions."""
    logits: np.ndarray
    """float32 `[vocab]`, as the model gave them."""
    output: list[int]
    """Tokens before this one."""
    token: int | None
    """The engine's; `None`: it failed the request."""
    logprobs: Any
    """The engine's log-probabilities as (ids, values, rank), if any."""


class Recorder:
    """Calls `see` for every row that is sampled in `llm`, from then on.

    What raises in `see` is kept until `stop`: in the step, it would be taken for the step's own.
    `outputs` has every token sampled, also those after a stop string, by (request, completion).
    """

    def __init__(self, llm: LLM, see: Callable[[Row], None]) -> None:
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self._see = see
        self._logits: Any = None
        self._error: Exception | None = None
        runner = llm.llm_engine.core.executor._worker._runner  # type: ignore[attr-defined]
        self._runner, model = runner, runner.model
        self._head = runner._steps._head
        self._compute, self._likeliest = model.compute_logits, model.compute_likeliest
        self._sample = self._head.finish
        # Whole steps in one call have nothing between model and sampler.
        self._shortcut, runner._steps._shortcut = runner._steps._shortcut, None
        model.compute_logits, model.compute_likeliest = self._kept_logits, self._kept_likeliest
        self._head.finish = self._listened

    def stop(self) -> None:
        """Leave the engine as it was; raises what was raised while listening."""
        model = self._runner.model
        model.compute_logits, model.compute_likeliest = self._compute, self._likeliest
        self._head.finish = self._sample
        self._runner._steps._shortcut = self._shortcut
        if self._error is not None:
            raise self._error

    def _kept_logits(self, hidden: Any, keep: str | None = None) -> Any:
        logits = self._compute(hidden, keep=keep)
        if keep is not None:  # the sampler writes over them
            self._logits = logits.numpy().copy()
        return logits

    def _kept_likeliest(self, hidden: Any) -> Any:
        self._logits = self._compute(hidden).numpy().copy()
        return self._likeliest(hidden)

    def _listened(self, inputs: Any, hidden: Any, outcome: Any) -> None:
        self._logits = None
        self._sample(inputs, hidden, outcome)
        try:
            self._tell(inputs, outcome)
        except Exception as error:
            self._error = self._error or error

    def _tell(self, inputs: Any, outcome: Any) -> None:
        which = np.flatnonzero(inputs.samples)
        assert not len(which) or len(self._logits) == len(which)
        for place, index in enumerate(which.tolist()):
            internal = inputs.req_ids[index]
            child, underline, name = internal.partition("_")
            key = (name if underline else child).rpartition("-")[0], int(child) if underline else 0
            output = self.outputs.setdefault(key, [])
            (token,) = outcome.sampled.get(internal, [None])
            (entry,) = outcome.logprobs.get(internal, [None])
            parts = None if entry is None else (entry.token_ids, entry.logprobs, entry.rank)
            self._see(Row(*key, self._logits[place], list(output), token, parts))
            if token is not None:
                output.append(token)
