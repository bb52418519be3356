"""From one pass's arrays to hidden states: tensors, attention's metadata, and the model's call.

There is one class per way to compute: over a paged KV cache (all decoders), or on whole prompts
without a cache (encoders). They do not know what the hidden states are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cache_tensors import KVCache
from quire.kernels.scopes import scope
from quire.models.base import PagedDecoder
from quire.models.encoder import EncoderInput
from quire.models.pooling import EncoderForPooling
from quire.worker.device import Device
from quire.worker.input_batch import StepInputs
from quire.worker.tensors import to_tensor_on


class ForwardPass(Protocol):
    """Computes hidden states."""

    def __call__(self, inputs: StepInputs, every_token: bool) -> Tensor:
        """Hidden states `[T, H]` of a pass with T tokens, or `[W, H]` of the W tokens that
        `inputs.wanted` names, unless `every_token`."""
        ...


class PagedForward:
    """Over a paged KV cache.

    Args:
        model: Any decoder.
        kv_caches: Keys and values per layer.
        block_size: Tokens per block of the cache.
        device: Where the model and the caches are.
        group_of: The group of each layer that has block tables of its own; absent: group 0.
    """

    def __init__(
        self,
        model: PagedDecoder,
        kv_caches: Sequence[KVCache],
        block_size: int,
        device: Device,
        group_of: dict[int, int],
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._tensor = to_tensor_on(device)
        self._group_of = group_of

    def __call__(self, inputs: StepInputs, every_token: bool) -> Tensor:
        """See `ForwardPass`."""
        positions = self._tensor(inputs.positions)
        metadata = self._metadata(inputs, positions, every_token)
        input_ids = self._tensor(inputs.input_ids)
        with scope("quire: forward"):
            return self._model.forward(input_ids, positions, self._kv_caches, metadata)

    def _metadata(
        self, inputs: StepInputs, positions: Tensor, every_token: bool
    ) -> AttentionMetadata:
        first = AttentionMetadata(
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_table=self._tensor(inputs.block_tables[0]),
            slot_mapping=self._tensor(inputs.slot_mappings[0]),
            token_request=self._tensor(inputs.token_request),
            positions=positions,
            block_size=self._block_size,
            wanted=None if every_token else self._tensor(inputs.wanted),
            wanted_start_loc=None if every_token else self._tensor(inputs.wanted_start_loc),
        )
        if len(inputs.block_tables) == 1:
            return first
        groups = [
            replace(
                first,
                block_table=self._tensor(table),
                slot_mapping=self._tensor(slots),
                scratch={},
            )
            for table, slots in zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        ]
        by_layer = [groups[self._group_of[i]] for i in range(len(self._kv_caches))]
        return replace(first, by_layer=by_layer)


class EncoderForward:
    """Whole prompts, without a KV cache.

    Args:
        model: An encoder.
        device: Where it is.
        token_types: `[T]` int64 of a pass: 1 in the second text of a pair, else 0.
    """

    def __init__(
        self,
        model: EncoderForPooling,
        device: Device,
        token_types: Callable[[StepInputs], np.ndarray],
    ) -> None:
        self._model = model
        self._tensor = to_tensor_on(device)
        self._token_types = token_types

    def __call__(self, inputs: StepInputs, every_token: bool) -> Tensor:
        """See `ForwardPass`; an encoder always gives every token."""
        assert every_token, "an encoder's states are pooled, not sampled from"
        step = EncoderInput(
            input_ids=self._tensor(inputs.input_ids),
            positions=self._tensor(inputs.positions),
            token_types=self._tensor(self._token_types(inputs)),
            query_start_loc=self._tensor(inputs.query_start_loc),
        )
        return self._model.encode(step)
