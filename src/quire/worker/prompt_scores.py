"""Log-probabilities of prompt tokens, for requests that ask for them (`prompt_logprobs`)."""

from __future__ import annotations

import math
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
        starts = inputs.query_start_loc.tolist()
        for index, req_id in enumerate(inputs.req_ids):
            if req_id not in self._input_batch.prompt_logprobs:
                continue
            row = int(inputs.rows[index])
            first = int(inputs.positions[starts[index]]) + 1
            end = min(int(inputs.seq_lens[index]) + 1, int(self._input_batch.num_prompt[row]))
            if end <= first:
                continue
            targets = self._input_batch.token_ids[row, first:end].astype(np.int64)
            chunk = hidden[starts[index] : starts[index] + len(targets)]
            wanted = self._input_batch.sampling_of(row).params.prompt_logprobs or 0
            entries = self._entries(chunk, targets, wanted)
            if not all(math.isfinite(entry.logprobs[0]) for entry in entries):
                outcome.failed[req_id] = NOT_A_NUMBER
            outcome.prompt_entries[req_id] = [TokenLogprobs(*entry) for entry in entries]

    def _entries(self, hidden: Tensor, targets: np.ndarray, count: int) -> list[LogprobRow]:
        """Entries of consecutive prompt tokens, in slabs that bound the memory of the logits."""
        entries: list[LogprobRow] = []
        at_once = max(1, _PROMPT_SLAB // self._input_batch.vocab_size)
        for start in range(0, len(targets), at_once):
            part = slice(start, start + at_once)
            ids = self._tensor(targets[part])
            logprobs = self._model.ops.log_softmax(self._model.compute_logits(hidden[part]))
            entries += gather_logprobs(logprobs, ids, [count] * len(ids), self._model.ops)
        return entries
