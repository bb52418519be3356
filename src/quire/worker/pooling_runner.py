"""Runs batches on pooling models: hidden states are pooled where a prompt ends, nothing is sampled.

A decoder's prompt may come in chunks; unless only its last token counts, the hidden states of the
earlier chunks are kept until the end, by position, so that a repeated pass changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import KVCache
from quire.core.batch import BatchResult, ScheduledBatch
from quire.errors import NOT_A_NUMBER
from quire.models.encoder import EncoderInput
from quire.models.pooling import DecoderForPooling, EncoderForPooling
from quire.outputs import Pooled
from quire.params import PoolingParams
from quire.worker.device import Device
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.kv_transfer import KVTransfer
from quire.worker.model_runner import ModelRunner, Outcome


class PoolingRunner(ModelRunner):
    """A `ModelRunner` whose requests end with their prompt.

    Args:
        model: An encoder or a decoder, with its pooler.
        kv_caches: Keys and values per layer; none for an encoder.
        input_batch: Empty state of the right size.
        device: Where the model and the caches are.
        groups: See `ModelRunner`.
        transfer: See `ModelRunner`.
    """

    def __init__(
        self,
        model: EncoderForPooling | DecoderForPooling,
        kv_caches: list[KVCache],
        input_batch: InputBatch,
        device: Device,
        groups: Sequence[Sequence[int]] = (),
        transfer: KVTransfer | None = None,
    ) -> None:
        # The base never samples here, and calls `forward` only through `_forward`.
        super().__init__(  # type: ignore[arg-type]
            model, kv_caches, input_batch, device, groups, transfer
        )
        self.pooling_model = model
        self._params: dict[str, PoolingParams] = {}
        self._parts: dict[str, dict[int, Tensor]] = {}
        # hidden states of earlier chunks by their first position

    def reset(self) -> None:
        """Forget all requests."""
        super().reset()
        self._params.clear()
        self._parts.clear()

    def _update_states(self, batch: ScheduledBatch) -> dict[str, str]:
        for req_id in (*batch.finished_req_ids, *batch.preempted_req_ids):
            self._params.pop(req_id, None)
            self._parts.pop(req_id, None)
        for new in batch.scheduled_new_reqs:
            assert new.pooling_params is not None, f"{new.req_id} wants text"
            self._params[new.req_id] = new.pooling_params
            self._parts[new.req_id] = {}
        return super()._update_states(batch)

    def _commit(self, outcome: Outcome) -> BatchResult:
        result = super()._commit(outcome)
        result.pooled = outcome.pooled
        return result

    def _forward(self, inputs: StepInputs) -> Tensor:
        model = self.pooling_model
        if isinstance(model, DecoderForPooling):
            return super()._forward(inputs)
        start = time.perf_counter()
        hidden = model.encode(
            EncoderInput(
                input_ids=self._tensor(inputs.input_ids),
                positions=self._tensor(inputs.positions),
                token_types=self._tensor(self._token_types(inputs)),
                query_start_loc=self._tensor(inputs.query_start_loc),
            )
        )
        self.device.synchronize()
        self._forward_seconds += time.perf_counter() - start
        return hidden

    def _wants_all(self) -> bool:
        return True

    def _read_all(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> Tensor:
        return hidden

    def _token_types(self, inputs: StepInputs) -> np.ndarray:
        """`[T]`: 1 from where the second text of a pair begins."""
        types = np.zeros(len(inputs.input_ids), dtype=np.int64)
        starts = inputs.query_start_loc.tolist()
        for req_id, start, end in zip(inputs.req_ids, starts, starts[1:], strict=False):
            split = self._params[req_id].token_type_split
            if split is not None:
                types[start + split : end] = 1
        return types

    def _sample(self, inputs: StepInputs, hidden: Tensor, outcome: Outcome) -> None:
        """Pool the requests whose prompts end in this step; keep the chunks of the others."""
        starts = inputs.query_start_loc.tolist()
        req_ids, rows = [], []
        for index, req_id in enumerate(inputs.req_ids):
            chunk = hidden[starts[index] : starts[index + 1]]
            chunk = self._with_earlier(req_id, chunk, int(inputs.positions[starts[index]]))
            if inputs.samples[index]:
                req_ids.append(req_id)
                rows.append(chunk)
        if not req_ids:
            return
        pooled = self.pooling_model.pooler(rows, [self._params[i] for i in req_ids])
        for req_id, numbers in zip(req_ids, pooled, strict=True):
            if not bool(torch.isfinite(numbers).all()):
                outcome.failed[req_id] = NOT_A_NUMBER
                continue
            data = numbers.to("cpu", torch.float32).contiguous().numpy()
            outcome.pooled[req_id] = Pooled(tuple(numbers.shape), data.astype("<f4").tobytes())

    def _with_earlier(self, req_id: str, chunk: Tensor, first: int) -> Tensor:
        """All hidden states of the prompt so far, as far as they are needed."""
        spec, params = self.pooling_model.spec, self._params[req_id]
        if spec.whole_prompts or (spec.pooling == "last" and params.task != "token_embed"):
            return chunk
        parts = self._parts[req_id]
        # By position: a step that is tried again in halves puts the same rows in the same place.
        parts[first] = chunk.clone()
        return torch.cat([parts[at] for at in sorted(parts)])
