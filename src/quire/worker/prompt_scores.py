"""Log-probabilities in prompts: of the prompt's own tokens and the likeliest (`prompt_logprobs`),
and of tokens that a request names (`prompt_logprob_token_ids`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from torch import Tensor

from quire.core.batch import TokenLogprobs
from quire.errors import NOT_A_NUMBER
from quire.models.base import CausalLM
from quire.sampling import LogprobRow, gather_logprobs
from quire.worker.device import Device
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.step_runner import Outcome
from quire.worker.tensors import to_tensor_on

_PROMPT_SLAB: Final = 2**24
"""Number of prompt logits held at once: 64 MiB of float32."""


class PromptScorer:
    """Scores the prompts of requests that asked for it.

    Args:
        model: Computes logits.
        input_batch: The requests' state.
        device: Where the model is.
    """

    def __init__(self, model: CausalLM, input_batch: InputBatch, device: Device) -> None:
        self._model = model
        self._input_batch = input_batch
        self._tensor = to_tensor_on(device)

    def score(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Log-probabilities of the prompt tokens that follow the positions of this step."""
        for index, req_id in enumerate(inputs.req_ids):
            if req_id in self._input_batch.prompt_logprobs:
                self._score_own(index, inputs, hidden, outcome)
            if req_id in self._input_batch.scored:
                self._score_named(index, inputs, hidden, outcome)

    def _score_own(self, index: int, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        req_id, row, first, end = self._span(index, inputs)
        if end <= first:
            return
        targets = self._input_batch.token_ids[row, first + 1 : end + 1].astype(np.int64)
        start = int(inputs.query_start_loc[index])
        wanted = self._input_batch.sampling_of(row).params.prompt_logprobs or 0
        entries = self._entries(hidden[start : start + len(targets)], targets, wanted)
        if not all(math.isfinite(entry.logprobs[0]) for entry in entries):
            outcome.failed[req_id] = NOT_A_NUMBER
        outcome.prompt_entries[req_id] = [TokenLogprobs(*entry) for entry in entries]

    def _score_named(
        self, index: int, inputs: StepInputs, hidden: Tensor, outcome: Outcome
    ) -> None:
        req_id, _, first, end = self._span(index, inputs)
        wanted = self._input_batch.scored[req_id]
        start = int(inputs.query_start_loc[index]) - first
        first = max(first, wanted.start)
        if end <= first:
            return
        ids = wanted.ids[first - wanted.start : end - wanted.start]
        rows = np.empty(ids.shape, dtype=np.float32)
        for part, logprobs in self._logprobs(hidden[start + first : start + end]):
            known = self._tensor(np.maximum(ids[part], 0))
            rows[part] = logprobs.gather(1, known).cpu().numpy()
        if not np.isfinite(rows).all():
            outcome.failed[req_id] = NOT_A_NUMBER
        rows[ids < 0] = -np.inf
        outcome.scored[req_id] = first - wanted.start, rows

    def _span(self, index: int, inputs: StepInputs) -> tuple[str, int, int, int]:
        """A request's id and row, and the positions of this step that a prompt token follows."""
        row, first = inputs.rows[index], int(inputs.positions[inputs.query_start_loc[index]])
        end = min(int(inputs.seq_lens[index]), self._input_batch.num_prompt[row] - 1)
        return inputs.req_ids[index], row, first, end

    def _entries(self, hidden: Tensor, targets: np.ndarray, count: int) -> list[LogprobRow]:
        """Entries of consecutive prompt tokens."""
        entries: list[LogprobRow] = []
        for part, logprobs in self._logprobs(hidden):
            ids = self._tensor(targets[part])
            entries += gather_logprobs(logprobs, ids, [count] * len(ids), self._model.ops)
        return entries

    def _logprobs(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Of the token after each state, in slabs that bound the memory of the logits; each is
        valid until the next."""
        at_once = max(1, _PROMPT_SLAB // self._input_batch.vocab_size)
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            logits = self._model.compute_logits(hidden[part], keep="logits")
            yield part, self._model.ops.log_softmax(logits, keep="logprobs")
