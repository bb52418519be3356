"""Steps in which each request computes its last token and takes a next one by its logits alone, as
one call of the model.

Most steps of most requests are such: greedy ones, and those that sample with temperature, top-k,
top-p and min-p. The bits are those of `PagedForward` and `SamplingHead`. What is saved are the ways
between them: with one request, 0.4 ms of a greedy step whose weights have emptied the caches, and
0.7 of one that samples (docs/cpu-kernels.md). Knows no model family.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from quire.errors import NOT_A_NUMBER
from quire.kernels.cache_tensors import KVCache
from quire.kernels.decoder import NOT_FINITE, OUT_OF_RANGE, Pick
from quire.kernels.request_rows import LastTokens
from quire.kernels.scopes import scope
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.worker.input_batch import InputBatch
from quire.worker.sampling_head import SamplingHead
from quire.worker.step_runner import Outcome, WholePass

logger = get_logger(__name__)


class DecodeAtOnce:
    """A `Shortcut`.

    Args:
        model: Computes tokens.
        input_batch: The requests' state, with one group of layers.
        kv_caches: Keys and values per layer.
        head: Samples where more than a pick is wanted.
    """

    def __init__(
        self,
        model: CausalLM,
        input_batch: InputBatch,
        kv_caches: Sequence[KVCache],
        head: SamplingHead,
    ) -> None:
        self._model = model
        self._input_batch = input_batch
        self._kv_caches = kv_caches
        self._head = head

    def __call__(self, req_ids: Sequence[str], counts: Sequence[int]) -> WholePass | None:
        """See `Shortcut`."""
        last = self._input_batch.last_tokens(req_ids, counts)
        if last is None:
            return None
        sampling = [self._input_batch.sampling_of(row) for row in last.rows]
        if not all(request.is_picked for request in sampling):
            return self._sample(req_ids, last)
        picks: list[Pick] | None = None
        if any(request.active for request in sampling):
            outputs = self._input_batch.outputs(last.rows)
            picks = [r.pick_after(output) for r, output in zip(sampling, outputs, strict=True)]
        start = time.perf_counter()
        found = self._model.tokens_after(last, self._kv_caches, picks)
        if found is None or OUT_OF_RANGE in found.token_ids:  # the sampler says what is wrong
            return None
        seconds = time.perf_counter() - start - found.head_seconds
        outcome = Outcome()
        for req_id, token in zip(req_ids, found.token_ids, strict=True):
            if token != NOT_FINITE:
                outcome.sampled[req_id] = [token]
            else:
                logger.error("request %s failed: %s", req_id, NOT_A_NUMBER)
                outcome.failed[req_id] = NOT_A_NUMBER
        return WholePass(outcome, seconds, found.head_seconds)

    def _sample(self, req_ids: Sequence[str], last: LastTokens) -> WholePass | None:
        """The model in one call, and the steps of the sampler."""
        start = time.perf_counter()
        found = self._model.logits_after(last, self._kv_caches)
        if found is None:
            return None
        middle = time.perf_counter()
        outcome = Outcome()
        with torch.inference_mode(), scope("quire: sample"):
            self._head.sample(req_ids, last.rows, found.logits, outcome)
        sampled = time.perf_counter() - middle
        seconds = found.head_seconds
        return WholePass(outcome, middle - start - seconds, seconds + sampled)
