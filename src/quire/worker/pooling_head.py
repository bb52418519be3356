"""What a pooling model does with hidden states: pools them where a prompt ends. Samples nothing.

A decoder's prompt may come in chunks; unless only its last token counts, the hidden states of the
earlier chunks are kept until the end, by position, so that a repeated pass changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.core.batch import BatchResult, ScheduledBatch
from quire.errors import NOT_A_NUMBER
from quire.models.pooler import Pooler
from quire.outputs import Pooled
from quire.params import PoolingParams
from quire.worker.input_batch import StepInputs
from quire.worker.step_runner import Outcome


class PoolingHead:
    """Pools; a `StepHead`.

    Args:
        pooler: The model's.
    """

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self._params: dict[str, PoolingParams] = {}
        self._parts: dict[str, dict[int, Tensor]] = {}
        # hidden states of earlier chunks by their first position

    def take(self, batch: ScheduledBatch) -> None:
        """Read from a batch which requests have ended, and what the new ones ask for."""
        for req_id in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self._params.pop(req_id, None)
            self._parts.pop(req_id, None)
        for new in batch.scheduled_new_reqs:
            assert new.pooling_params is not None, f"{new.req_id} wants text"
            self._params[new.req_id] = new.pooling_params
            self._parts[new.req_id] = {}

    def forget(self) -> None:
        """Forget all requests."""
        self._params.clear()
        self._parts.clear()

    def token_types(self, inputs: StepInputs) -> np.ndarray:
        """`[T]` int64: 1 from where the second text of a pair begins, else 0."""
        types = np.zeros(len(inputs.input_ids), dtype=np.int64)
        starts = inputs.query_start_loc.tolist()
        for req_id, start, end in zip(inputs.req_ids, starts, starts[1:], strict=False):
            split = self._params[req_id].token_type_split
            if split is not None:
                types[start + split : end] = 1
        return types

    def wants_every_token(self) -> bool:
        """Always: the states of chunks that do not end a prompt are kept, too."""
        return True

    def read_every_token(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> Tensor:
        """Returns all states; `finish` uses them."""
        return hidden

    def finish(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Pool the requests whose prompts end in this pass; keep the chunks of the others."""
        starts = inputs.query_start_loc.tolist()
        req_ids, rows = [], []
        for index, req_id in enumerate(inputs.req_ids):
            chunk = hidden[starts[index] : starts[index + 1]]
            parts = self._parts[req_id]
            if self._needs_every_chunk(req_id):
                # By position: a step that is tried again in halves puts the same rows in the same
                # place.
                parts[int(inputs.positions[starts[index]])] = chunk.clone()
            if inputs.samples[index]:
                req_ids.append(req_id)
                rows.append(torch.cat([parts[at] for at in sorted(parts)]) if parts else chunk)
        if not req_ids:
            return
        pooled = self._pooler(rows, [self._params[i] for i in req_ids])
        for req_id, numbers in zip(req_ids, pooled, strict=True):
            if not bool(torch.isfinite(numbers).all()):
                outcome.failed[req_id] = NOT_A_NUMBER
                continue
            data = numbers.to("cpu", torch.float32).contiguous().numpy()
            outcome.pooled[req_id] = Pooled(tuple(numbers.shape), data.astype("<f4").tobytes())

    def commit(self, outcome: Outcome, result: BatchResult) -> None:
        """Put the pooled numbers into the result; the scheduler then ends the requests."""
        result.pooled = outcome.pooled

    def _needs_every_chunk(self, req_id: str) -> bool:
        spec, params = self._pooler.spec, self._params[req_id]
        return not spec.whole_prompts and (spec.pooling != "last" or params.task == "token_embed")
