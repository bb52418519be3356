"""Queue limits, checked where requests come in, without asking the engine core.

Two facts say how much waits: the requests accepted beyond the seats (`max_num_seqs`), and the queue
that the last step reported, which may be longer because memory is full. The larger one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.messages import EngineCoreRequest
from quire.errors import TooManyRequests


class QueueLimits(Listener):
    """Counts requests that have no output yet, and refuses more than the limits allow.

    Args:
        count_rejection: Called with `max_num_queued_reqs` or `max_num_queued_tokens` for each
            refusal.
    """

    def __init__(self, count_rejection: Callable[[str], None]) -> None:
        self._count_rejection = count_rejection
        self._silent: dict[str, int] = {}
        # prompt tokens of the requests that have no output yet
        self._num_tokens = 0
        self._reported = 0

    def accepted(self, accepted: AcceptedRequest) -> None:
        """A request has joined the queue."""
        self.add(accepted.requests)

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Requests with output are no longer in the queue."""
        self.step(outputs, stats.num_waiting if stats else None)

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Stop counting completions that ended on this side."""
        self.drop(internal_ids)

    def check_integrity(self, silent: Mapping[str, int]) -> None:
        """Check the count against what others know.

        Args:
            silent: Prompt tokens of the completions that have no output yet, by internal id.

        Raises:
            AssertionError: they differ; a bug.
        """
        assert self._silent == silent, f"queued {self._silent}, without output {silent}"
        assert self._num_tokens == sum(silent.values()), "the sum of prompt tokens is off"

    def check(
        self, requests: Sequence[EngineCoreRequest], config: SchedulerConfig, num_unfinished: int
    ) -> None:
        """Refuse requests that would make the queue too long. A prompt is never refused for its
        length when nothing is ahead of it.

        Args:
            requests: The completions of one request.
            config: With the limits.
            num_unfinished: Completions accepted before that have not ended.

        Raises:
            TooManyRequests: naming the limit and what waits now.
        """
        count = len(requests)
        behind_memory = min(self._reported, len(self._silent))
        waiting = max(0, num_unfinished - config.max_num_seqs, behind_memory)
        beyond_seats = num_unfinished + count - config.max_num_seqs
        after = max(beyond_seats, behind_memory + count if behind_memory else 0)
        limit = config.max_num_queued_reqs
        if limit is not None and after > limit:
            self._refuse("max_num_queued_reqs", limit, waiting, count, "requests wait")
        limit, tokens = config.max_num_queued_tokens, sum(map(_num_tokens, requests))
        if limit is not None and self._silent and self._num_tokens + tokens > limit:
            what = "prompt tokens wait or are being computed"
            self._refuse("max_num_queued_tokens", limit, self._num_tokens, tokens, what)

    def _refuse(self, reason: str, limit: int, current: int, more: int, what: str) -> None:
        self._count_rejection(reason)
        option = "--" + reason.replace("_", "-")
        raise TooManyRequests(
            f"The queue is full: {current} {what}, this request would add {more}, and the limit "
            f"is {limit} ({option}). Try again later."
        )

    def add(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Count requests that were accepted."""
        for request in requests:
            self._silent[request.request_id] = tokens = _num_tokens(request)
            self._num_tokens += tokens

    def step(self, outputs: Iterable[EngineCoreOutput], num_waiting: int | None) -> None:
        """Stop counting requests that have output, and note how many the core says wait."""
        if num_waiting is not None:
            self._reported = num_waiting
        if self._silent:
            self.drop(output.request_id for output in outputs)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop counting requests that ended or were aborted; unknown ids are ignored."""
        for request_id in request_ids:
            self._num_tokens -= self._silent.pop(request_id, 0)


def _num_tokens(request: EngineCoreRequest) -> int:
    return len(request.prompt_token_ids)
