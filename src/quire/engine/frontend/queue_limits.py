"""Queue limits, checked where requests come in, without asking the engine core.

Two facts say how many requests wait: those accepted beyond the seats (`max_num_seqs`), and the
queue that the last step reported, which may be longer because memory is full. The larger one
counts. Prompt tokens and bytes count until a request has its first output. How fast requests leave
the queue is measured, so a refusal can say when to try again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.drain_rate import DrainRate
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.messages import EngineCoreRequest
from quire.errors import DeadlineUnreachable, TooManyRequests
from quire.utils.timing import Clock

REQUEST_BYTES: Final = 8192
"""Memory of a waiting completion beside its lists: its records here and in the core."""
ENTRY_BYTES: Final = 40
"""Of a token or a list entry: a number and the place that points to it."""


class Load(NamedTuple):
    """What requests add to a queue."""

    tokens: int
    bytes: int


class QueueLimits(Listener):
    """Counts requests that have no output yet, and refuses more than the limits allow.

    Args:
        count_rejection: Called for each refusal with the limit's name, a row of `SERVER_LIMITS`.
        clock: Monotonic time.
    """

    def __init__(self, count_rejection: Callable[[str], None], clock: Clock) -> None:
        self._count_rejection = count_rejection
        self._clock = clock
        self._rate = DrainRate()
        self._silent: dict[str, Load] = {}
        # the sums over the requests that have no output yet
        self._num_tokens = self._num_bytes = 0
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
        counted = {name: load.tokens for name, load in self._silent.items()}
        assert counted == silent, f"queued {counted}, without output {silent}"
        assert self._num_tokens == sum(silent.values()), "the sum of prompt tokens is off"
        total = sum(load.bytes for load in self._silent.values())
        assert self._num_bytes == total, "the sum of bytes is off"

    def wait(self, config: SchedulerConfig, num_unfinished: int) -> float | None:
        """Seconds until the turn of a request that came now: the prompt tokens ahead of it, or the
        requests ahead of it that need a seat, at the rate at which the queue drained in the last
        seconds. It assumes the order of arrival.

        Args:
            config: With `max_num_seqs`.
            num_unfinished: Completions accepted before that have not ended.

        Returns:
            0 if nothing is ahead of it; `None` if too little has been measured.
        """
        beyond_seats = max(0, num_unfinished + 1 - config.max_num_seqs)
        if not self._silent and not beyond_seats:
            return 0.0
        return self._rate.seconds_for(self._clock.now(), self._num_tokens, beyond_seats)

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
            TooManyRequests: naming the limit and what waits now; `retry_after` is `wait`.
        """
        self.check_count(len(requests), config, num_unfinished)
        if self._silent:
            refusal = self._check_size([load_of(request) for request in requests], config)
            if refusal is not None:
                raise self._later(refusal, config, num_unfinished)

    def check_count(self, count: int, config: SchedulerConfig, num_unfinished: int) -> None:
        """Refuse so many completions if they would be too many, whatever they are.

        Args:
            count: Of them.
            config: With the limits.
            num_unfinished: Completions accepted before that have not ended.

        Raises:
            TooManyRequests: as `check` raises it.
        """
        behind_memory = min(self._reported, len(self._silent))
        waiting = max(0, num_unfinished - config.max_num_seqs, behind_memory)
        beyond_seats = num_unfinished + count - config.max_num_seqs
        after = max(beyond_seats, behind_memory + count if behind_memory else 0)
        limit = config.server_limit("max_num_queued_reqs")
        if limit is not None and after > limit:
            refusal = self._refuse("max_num_queued_reqs", limit, waiting, count, "requests wait")
            raise self._later(refusal, config, num_unfinished)

    def _later(self, refusal: str, config: SchedulerConfig, num_unfinished: int) -> TooManyRequests:
        wait = self.wait(config, num_unfinished)
        when = "later" if wait is None else f"in about {max(1, round(wait))} s"
        return TooManyRequests(f"{refusal} Try again {when}.", retry_after=wait)

    def check_deadline(self, max_wait: float, config: SchedulerConfig, num_unfinished: int) -> None:
        """Refuse a request whose turn would come too late.

        Args:
            max_wait: Seconds that its caller will wait.
            config: As in `wait`.
            num_unfinished: As in `wait`.

        Raises:
            DeadlineUnreachable: with both numbers. Without a measured rate nothing is refused.
        """
        wait = self.wait(config, num_unfinished)
        if wait is not None and wait > max_wait:
            self._count_rejection("deadline")
            raise DeadlineUnreachable(wait, max_wait)

    def _check_size(self, loads: Sequence[Load], config: SchedulerConfig) -> str | None:
        """Why requests of this size are refused, if they are."""
        for name, current, more, what in (
            ("max_num_queued_tokens", self._num_tokens, sum(x.tokens for x in loads), "tokens"),
            ("max_queued_bytes", self._num_bytes, sum(x.bytes for x in loads), "bytes"),
        ):
            limit = config.server_limit(name)
            if limit is not None and current + more > limit:
                what = f"{'prompt tokens' if what == 'tokens' else what} wait or are being computed"
                return self._refuse(name, limit, current, more, what)
        return None

    def _refuse(self, reason: str, limit: int, current: int, more: int, what: str) -> str:
        self._count_rejection(reason)
        option = "--" + reason.replace("_", "-")
        return (
            f"The queue is full: {current} {what}, this request would add {more}, and the limit "
            f"is {limit} ({option})."
        )

    def add(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Count requests that were accepted."""
        self._rate.busy(self._clock.now())
        for request in requests:
            self._silent[request.request_id] = load = load_of(request)
            self._num_tokens += load.tokens
            self._num_bytes += load.bytes

    def step(self, outputs: Iterable[EngineCoreOutput], num_waiting: int | None) -> None:
        """Stop counting requests that have output, and note how many the core says wait."""
        if num_waiting is not None:
            self._reported = num_waiting
        if self._silent:
            tokens, requests = self._num_tokens, len(self._silent)
            self._remove(output.request_id for output in outputs)
            if left := requests - len(self._silent):
                now = self._clock.now()
                self._rate.drained(now, tokens - self._num_tokens, left)
                if not self._silent:
                    self._rate.idle(now)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop counting requests that ended or were aborted; unknown ids are ignored. They did not
        leave because their turn came, so they do not count for the rate."""
        if self._silent:
            self._remove(request_ids)
            if not self._silent:
                self._rate.idle(self._clock.now())

    def _remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            load = self._silent.pop(request_id, None)
            if load is not None:
                self._num_tokens -= load.tokens
                self._num_bytes -= load.bytes


def load_of(request: EngineCoreRequest) -> Load:
    """What a completion adds to a queue: tokens of its prompt, and bytes."""
    params, tokens = request.sampling_params, len(request.prompt_token_ids)
    lists = (params.allowed_token_ids, params.stop_token_ids, params.logit_bias)
    entries = tokens + sum(len(one) for one in lists if one)
    words = sum(map(len, (*params.stop_strings, *(params.bad_words or ()))))
    return Load(tokens, REQUEST_BYTES + ENTRY_BYTES * entries + words)
