"""A request as the scheduler sees it: tokens, progress and status. No text, no tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.repetition import RepetitionWatch
from quire.outputs import FinishReason
from quire.params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from hashlib import _Hash


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything after `PREEMPTED` is finished."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    """Its grammar is being compiled. It joins the queue when that is done."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    """It waits again, because its KV blocks were taken away; its output tokens are kept."""
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self > RequestStatus.PREEMPTED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class _EveryStep:
    """What each step reads of every running request; the rest is read when something happens.

    With thousands of requests a step costs as much as it fetches into the cache. Slots of a base
    class stand first in an object, so these share one or two cache lines.
    """

    __slots__ = (
        "all_token_ids",
        "num_computed_tokens",
        "num_quiet_tokens",
        "request_id",
        "spec_token_ids",
        "stop_ids",
    )


class Request(_EveryStep):
    """One completion in the making.

    There is no prefill or decode phase: each step lets `num_computed_tokens` catch up with
    `num_tokens`.
    """

    __slots__ = (
        "adapter",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "client",
        "error",
        "length_limit",
        "num_cached_tokens",
        "num_found_tokens",
        "num_preemptions",
        "num_promoted_tokens",
        "num_prompt_tokens",
        "number",
        "pooling_params",
        "prefix_hash",
        "priority",
        "queued_ts",
        "repetitions",
        "sampling_params",
        "scheduled_ts",
        "status",
        "stop_reason",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        output_token_ids: list[int] | None = None,
        client: str = "",
        pooling_params: PoolingParams | None = None,
    ) -> None:
        self.request_id = request_id
        self.pooling_params = pooling_params
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter = adapter
        """Name and version of a LoRA adapter: it changes the KV of equal tokens."""
        self.client = client
        """The client that asked, for the `fair` policy; empty: no particular one."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.all_token_ids = [*prompt_token_ids, *(output_token_ids or ())]
        """The prompt, then the output so far."""
        self.num_computed_tokens = 0
        """Tokens that have KV, or will have it once the scheduled step has run."""
        self.block_hashes: list[bytes] = []
        """Hashes of the full blocks of `all_token_ids`; the KV manager extends them when it needs
        more."""
        self.spec_token_ids: Sequence[int] = ()
        """Draft tokens to be verified in the next step; they are not part of the request. Where
        there are none it is the one empty tuple, because an empty list of each request's own would
        be one more cache line to fetch in every step."""
        self.number = 0
        """What the records of `core.facts` call it."""
        self.prefix_hash: _Hash | None = None
        """The running hash that `block_hashes` were read from."""
        self.num_quiet_tokens = 0
        """A decode that leaves at most this many computed tokens is *quiet*: there is a slot for
        it, no block becomes full, and what it samples is neither the first output nor the last
        that the length limit allows. Nothing but the token itself need be looked at. 0 while the
        request holds no blocks, and if its output is watched for repetitions. Kept by the KV
        manager and `limit_quiet_tokens`."""
        self.stop_ids = frozenset(sampling_params.stop_token_ids).union(
            () if sampling_params.ignore_eos else sampling_params.eos_token_ids
        )
        """Token ids that end it."""
        most = sampling_params.max_tokens
        self.length_limit = 2**62 if most is None else self.num_prompt_tokens + most
        """Number of tokens, prompt and output, at which it ends: by `max_tokens`, or by the context
        once the scheduler knows the request."""
        watched = sampling_params.repetition_detection
        self.repetitions = (
            None if watched is None else RepetitionWatch(watched, self.num_prompt_tokens)
        )
        """Looks for repetitions at the end of the output, if the request asks for that."""
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache at first admission; -1 before it."""
        self.num_found_tokens = 2**62
        """The fewest tokens found there at any admission: KV of what follows was computed for this
        very request, and cannot be trusted if it fails."""
        self.num_promoted_tokens = 0
        """Those of `num_cached_tokens` that came from the second tier."""
        self.queued_ts = 0.0
        self.scheduled_ts = 0.0

    def limit_quiet_tokens(self, num_computed: int) -> None:
        """Take from the quiet tokens, as the KV manager has settled them, those of which more than
        the token is to be told: the first output token and the last, and any that may complete a
        repetition.

        Args:
            num_computed: Computed tokens after the step that is being put together.
        """
        if num_computed <= self.num_prompt_tokens or self.repetitions is not None:
            self.num_quiet_tokens = 0
        elif self.num_quiet_tokens > self.length_limit - 2:
            # A quiet decode leaves as many computed tokens as there are, and samples one more.
            self.num_quiet_tokens = self.length_limit - 2

    def forget_progress(self) -> None:
        """Start again from nothing computed. The hashes go, too: a change that was left by an
        exception may have fed the running hash and not kept the digest."""
        self.num_computed_tokens = self.num_quiet_tokens = 0
        self.spec_token_ids = ()
        self.block_hashes = []
        self.prefix_hash = None

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens."""
        return len(self.all_token_ids)

    @property
    def num_readable_tokens(self) -> int:
        """Most tokens that may come from a cache: the last must be computed to get logits, and so
        must those whose states a score of the prompt is made of, until the first output has it."""
        most, first = self.num_tokens - 1, self.sampling_params.first_scored
        return most if first is None or self.num_output_tokens else min(most, first)

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt, output and draft tokens."""
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output so far."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; `None` while it has not."""
        return FINISH_REASONS.get(self.status)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
