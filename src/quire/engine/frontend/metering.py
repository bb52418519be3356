"""What the requests of one party use of the engine: places in the queue, and tokens.

A party is whoever somebody gave a `Meter`; here nobody knows of keys. A meter is charged for what
was computed, step by step, whether or not anybody reads it. Of the queue's bounds a party may have
a share: what it has waiting is kept below that, so the rest stays free for others. Without meters
none of this costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from quire.config.scheduler import SchedulerConfig
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.frontend.meter import Entry, Meter
from quire.engine.frontend.queue_limits import Load, load_of
from quire.engine.messages import EngineCoreRequest
from quire.errors import KeyLimitReached, KeyShareTooSmall, QuireError

QUEUE_SHARE: Final = "queue_share"
Wait = Callable[[], float | None]
_NOTHING: Final = Load(0, 0)


class _Open(NamedTuple):
    """An unfinished completion."""

    meter: Meter
    load: Load | None
    """What it adds to the queue; `None` once it has output."""
    is_first: bool
    """Whether it stands for its prompt, which is charged once, however many completions it has."""


class Metering(Listener):
    """Counts what metered requests use, and refuses what would take more than a party's share."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        # by internal id

    # ---- the gate --------------------------------------------------------------------------------

    def check_room(self, meter: Meter, config: SchedulerConfig, wait: Wait) -> None:
        """Refuse a further HTTP request of a party whose share of the queue is full.

        Args:
            meter: The party's.
            config: With the limits of the queue.
            wait: Asked for the seconds until there is likely room; `None` if that is not known.

        Raises:
            KeyLimitReached: naming share and limit.
        """
        if meter.share is not None:
            self._check_count(meter, meter.num_entering, 1, config, wait)
            self._check_size(meter, [_NOTHING], config, wait)

    def check_fits(self, meter: Meter, count: int, config: SchedulerConfig) -> None:
        """Refuse an HTTP request whose completions would not fit a party's share if nothing else
        of it waited: to try again is useless.

        Args:
            meter: The party's.
            count: Completions of all prompts.
            config: With the limits of the queue.

        Raises:
            KeyShareTooSmall: naming share and limit.
        """
        limit = config.server_limit("max_num_queued_reqs")
        if meter.share is not None and limit is not None and count > _part(meter, limit):
            raise KeyShareTooSmall(
                meter.name,
                meter.share,
                f"This request asks for {count} completions (prompts times n), and the key "
                f"{meter.name!r} may have {_part(meter, limit)} waiting: its limit {QUEUE_SHARE}="
                f"{meter.share} of {limit} (--max-num-queued-reqs). Ask for fewer at a time.",
            )

    def check(
        self,
        entry: Entry,
        requests: Sequence[EngineCoreRequest],
        config: SchedulerConfig,
        wait: Wait,
    ) -> None:
        """Refuse completions that would take more of the queue than their party's share.

        Args:
            entry: Theirs.
            requests: The completions of one prompt.
            config: With the limits of the queue.
            wait: Asked for the seconds until there is likely room; `None` if that is not known.

        Raises:
            KeyLimitReached: naming share and limit.
        """
        meter = entry.meter
        if meter.share is not None:
            entering = meter.num_entering - entry.is_open
            self._check_count(meter, entering, len(requests), config, wait)
            self._check_size(meter, [load_of(one) for one in requests], config, wait)

    def _check_count(
        self, meter: Meter, entering: int, count: int, config: SchedulerConfig, wait: Wait
    ) -> None:
        limit = config.server_limit("max_num_queued_reqs")
        if limit is None:
            return
        # Which of its requests have a seat is known to the core alone. Those without output may all
        # be waiting for one; and of the others, as many as there are seats can have one.
        beyond_seats = meter.num_unfinished - config.max_num_seqs
        taken = max(meter.num_waiting, beyond_seats) + entering
        if taken + count > _part(meter, limit):
            raise _refusal(meter, "max_num_queued_reqs", limit, taken, count, "requests", wait)

    def _check_size(
        self, meter: Meter, loads: Sequence[Load], config: SchedulerConfig, wait: Wait
    ) -> None:
        if not meter.num_waiting:
            return  # a prompt is never refused for its length alone
        for name, taken, more, what in (
            (
                "max_num_queued_tokens",
                meter.waiting_tokens,
                sum(load.tokens for load in loads),
                "prompt tokens",
            ),
            ("max_queued_bytes", meter.waiting_bytes, sum(load.bytes for load in loads), "bytes"),
        ):
            limit = config.server_limit(name)
            if limit is not None and taken + more > _part(meter, limit):
                raise _refusal(meter, name, limit, taken, more, what, wait)

    # ---- what happens ----------------------------------------------------------------------------

    def accepted(self, accepted: AcceptedRequest) -> None:
        """Count what a request takes of the queue, and the tokens of its prompt. Further steps of a
        request that was accepted before have its prompt in theirs, which is not charged again."""
        entry = accepted.entry
        if entry is None:
            return
        meter, is_first = entry.meter, not accepted.continues
        for request in accepted.requests:
            load = load_of(request)
            self._open[request.request_id] = _Open(meter, load, is_first)
            meter.num_unfinished += 1
            _count_waiting(meter, load, 1)
            if is_first:
                meter.prompt_tokens += load.tokens
                meter.charge(load.tokens)
            is_first = False
        entry.close()

    def adopt(self, entry: Entry, internal_ids: Sequence[str]) -> None:
        """Count completions that another process accepted, and charged for what they had then."""
        for internal_id in internal_ids:
            self._open[internal_id] = _Open(entry.meter, None, is_first=False)
            entry.meter.num_unfinished += 1
        entry.close()

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """Charge for what a step has computed."""
        if not self._open:
            return
        used: dict[Meter, int] = {}
        for output in outputs:
            one = self._open.get(output.request_id)
            if one is None:
                continue
            meter, load, is_first = one
            if load is not None:
                self._open[output.request_id] = _Open(meter, None, is_first)
                _count_waiting(meter, load, -1)
                meter.cached_tokens += output.num_cached_tokens if is_first else 0
            if num_tokens := len(output.new_token_ids):
                used[meter] = used.get(meter, 0) + num_tokens
            if output.finish_reason is not None:
                del self._open[output.request_id]
                meter.num_unfinished -= 1
        for meter, num_tokens in used.items():
            meter.generated_tokens += num_tokens
            meter.charge(num_tokens)

    def closed(self, internal_ids: Sequence[str]) -> None:
        """These use nothing any more."""
        for internal_id in internal_ids if self._open else ():
            one = self._open.pop(internal_id, None)
            if one is not None:
                one.meter.num_unfinished -= 1
                if one.load is not None:
                    _count_waiting(one.meter, one.load, -1)

    def failed(self, error: QuireError) -> None:
        """Nothing is used any more."""
        self.closed(list(self._open))

    def check_integrity(self, unfinished: Collection[str], silent: Collection[str]) -> None:
        """Check the counts against what others know.

        Args:
            unfinished: Internal ids of all completions.
            silent: Of these, those without output.

        Raises:
            AssertionError: they differ; a bug.
        """
        assert self._open.keys() <= set(unfinished), "metered, but not unfinished"
        by_meter: dict[Meter, list[Load | None]] = {}
        for internal_id, one in self._open.items():
            assert (one.load is not None) == (internal_id in silent), f"{internal_id} has output?"
            by_meter.setdefault(one.meter, []).append(one.load)
        for meter, loads in by_meter.items():
            waiting = [load for load in loads if load is not None]
            assert meter.num_unfinished == len(loads), f"{meter.name}: unfinished"
            assert meter.num_waiting == len(waiting), f"{meter.name}: waiting"
            assert meter.waiting_tokens == sum(load.tokens for load in waiting), meter.name
            assert meter.waiting_bytes == sum(load.bytes for load in waiting), meter.name


def _count_waiting(meter: Meter, load: Load, times: int) -> None:
    meter.num_waiting += times
    meter.waiting_tokens += times * load.tokens
    meter.waiting_bytes += times * load.bytes


def _part(meter: Meter, limit: int) -> int:
    """What the party may take of a limit, but at least 1."""
    assert meter.share is not None
    return max(1, math.floor(meter.share * limit))


def _refusal(
    meter: Meter, name: str, limit: int, taken: int, more: int, what: str, wait: Wait
) -> KeyLimitReached:
    assert meter.share is not None
    option = "--" + name.replace("_", "-")
    return KeyLimitReached(
        meter.name,
        QUEUE_SHARE,
        meter.share,
        f"{taken} of its {what} wait, this request would add {more}, and its share of "
        f"{limit} ({option}) is {_part(meter, limit)}.",
        retry_after=wait(),
    )
