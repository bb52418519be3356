"""Steps in which each request computes its last token and takes the likeliest next one, as one call
of the model.

Most steps of greedy requests are such. The bits are those of `PagedForward` and `SamplingHead`.
What is saved are the ways between them: with one request, 0.4 ms of a step whose weights have
emptied the caches (docs/cpu-kernels.md). Knows no model family.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.errors import NOT_A_NUMBER
from quire.kernels.cache_tensors import KVCache
from quire.logger import get_logger
from quire.models.base import CausalLM
from quire.worker.input_batch import InputBatch
from quire.worker.step_runner import Outcome, WholePass

logger = get_logger(__name__)


class GreedyDecode:
    """A `Shortcut`.

    Args:
        model: Computes tokens.
        input_batch: The requests' state, with one group of layers.
        kv_caches: Keys and values per layer.
    """

    def __init__(
        self, model: CausalLM, input_batch: InputBatch, kv_caches: Sequence[KVCache]
    ) -> None:
        self._model = model
        self._input_batch = input_batch
        self._kv_caches = kv_caches

    def __call__(self, req_ids: Sequence[str], counts: Sequence[int]) -> WholePass | None:
        """See `Shortcut`."""
        places = self._input_batch.greedy_places(req_ids, counts)
        if places is None:
            return None
        requests = self._input_batch.request_rows()
        start = time.perf_counter()
        found = self._model.likeliest_after(requests, *places, self._kv_caches)
        if found is None:
            return None
        seconds = time.perf_counter() - start - found.head_seconds
        outcome = Outcome()
        for req_id, token in zip(req_ids, found.token_ids, strict=True):
            if token >= 0:
                outcome.sampled[req_id] = [token]
            else:
                logger.error("request %s failed: %s", req_id, NOT_A_NUMBER)
                outcome.failed[req_id] = NOT_A_NUMBER
        return WholePass(outcome, seconds, found.head_seconds)
