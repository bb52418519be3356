"""What a logits processor of others is: vLLM's class form, under vLLM's names.

A class written for vLLM works unchanged. Each request gets an instance of its own, which sees a
batch of one, so that its output cannot depend on other requests; see docs/logits-processors.md for
what a processor may rely on. Calls nothing: `custom` does.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.params import SamplingParams

T = TypeVar("T")

RequestLogitsProcessor = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)
"""A function of the output token ids (before them, if it takes three arguments, the prompt's) and a
row of logits `[vocab]` that returns logits."""


class MoveDirectionality(enum.Enum):
    """How a request changes its place in a batch. In a batch of one none does."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in a batch."""

    batch_size: int
    """Always 1."""
    removed: Sequence[int]
    """Always empty: an instance ends with its request."""
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """Index (0), parameters, prompt token ids, and the list of output token ids. The list grows:
    whoever keeps it sees all tokens so far."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]
    """Always empty."""


class LogitsProcessor(ABC):
    """Changes logits before a token is chosen."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check the parameters of a request before it begins.

        Raises:
            ValueError: it is refused. The client is told which processor refuses it; the text is
                for the log, unless it is a `quire.errors.InvalidRequest`.
        """
        return None

    @classmethod
    def applies_to(cls, sampling_params: SamplingParams) -> bool:
        """Whether a request needs this processor at all. One that needs none does not pay for any.
        vLLM does not ask this."""
        return True

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Made once for each request, so whatever is expensive belongs to the class or module."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The new logits, float32 `[1, vocab]`; those given may be changed in place."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest. If so, it is applied after temperature
        and min-p, and not for greedy requests."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called with the request, and then with `None` after each token of its output."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a logits processor of functions, one for each request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request; `None`: it needs none."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Ask for the function of a request that came."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Tensor) -> Tensor:
        """Give each request's row to its function."""
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits

    def _new_state(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function: Any = self.new_req_logits_processor(params)
        if function is None:
            return None
        if len(inspect.signature(function).parameters) == 3:
            return lambda logits: function(prompt, output, logits)
        return lambda logits: function(output, logits)


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep a table of what processors hold of each request, by its place in the batch.

    Args:
        req_entries: The table; changed.
        batch_update: What has changed.
        new_state: What to hold of a request; `None`: nothing.

    Returns:
        Whether the table has changed.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        state = new_state(params, prompt, output)
        req_entries.pop(index, None)
        if state is not None:
            req_entries[index] = state
    for one, other, direction in batch_update.moved:
        first, second = req_entries.pop(one, None), req_entries.pop(other, None)
        if first is not None:
            req_entries[other] = first
        if second is not None and direction is MoveDirectionality.SWAP:
            req_entries[one] = second
    return req_entries != before
