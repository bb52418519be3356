"""The books of API keys: what each key of the key file has used, and what it may use.

One account per key, under the key's name. Requests of a minute and tokens of a minute are each a
bucket that drains evenly: what was used goes in, and while it is full, requests are refused. Tokens
are charged when they have been computed, because nobody knows before how many there will be; so the
bucket may run over, and the key waits until that has drained. Knows neither HTTP nor what a request
is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from quire.config.key_file import KeyLine
from quire.config.key_limits import KeyLimits
from quire.engine.frontend.meter import Entry, Meter
from quire.errors import KeyLimitReached, QuireError, TooManyRequests
from quire.observability.metrics.http_metrics import KeyNow
from quire.utils.timing import Clock

OTHER: Final = "other"
"""Label of the keys that have no label of their own."""
MOST_LABELS: Final = 100
"""Keys with a label of their own in the metrics."""
MOST_GONE: Final = 1000
"""Accounts that are kept of keys that are no longer in the file."""
MINUTE: Final = 60.0
_TINY: Final = 1e-6
OUTCOMES: Final = ("completed", "limited", "refused", "invalid", "failed", "disconnected")
"""What became of a request: answered in full; refused by a limit of its key; refused because the
server had no room; wrong; failed; left by its caller or ended on request."""


class Bucket:
    """What was used lately of so much a minute.

    Args:
        clock: Monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limit: int | None = None
        self._used = 0.0
        self._at = clock.now()

    @property
    def limit(self) -> int | None:
        """Units per minute; `None`: nothing is counted."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        """From now on; what has been used stays."""
        self._drain()
        self._limit = limit

    @property
    def used(self) -> float:
        """Units that have not drained yet; more than the limit if the bucket ran over."""
        self._drain()
        return self._used

    def wait(self) -> float:
        """Seconds until a whole unit is free; 0 if one is."""
        if self._limit is None:
            return 0.0
        over = self.used + 1 - self._limit
        return over * MINUTE / self._limit if over > _TINY else 0.0

    def take(self, count: int) -> None:
        """Units that were used, whether or not they are free."""
        if self._limit is not None:
            self._drain()
            self._used += count

    def _drain(self) -> None:
        now = self._clock.now()
        if self._limit is None:
            self._used = 0.0
        else:
            self._used = max(0.0, self._used - (now - self._at) * self._limit / MINUTE)
        self._at = now


class Place:
    """An admitted HTTP request, from admission to its end."""

    __slots__ = ("_account", "entry")

    def __init__(self, account: Account) -> None:
        self._account = account
        self.entry: Final = Entry(account.meter)

    def release(self, outcome: str, limit: str | None = None) -> None:
        """It has ended. Only the first call counts.

        Args:
            outcome: One of `OUTCOMES`.
            limit: Which one it met, if it was limited.
        """
        if self in self._account.places:
            self._account.places.remove(self)
            self.entry.close()
            self._account.count(outcome, limit)


class Account:
    """What one key uses.

    Args:
        name: Of the key.
        label: In the metrics.
        clock: Monotonic time.
    """

    def __init__(self, name: str, label: str, clock: Clock) -> None:
        self.name: Final = name
        self.label: Final = label
        self.limits = KeyLimits()
        self.requests_used = Bucket(clock)
        self.tokens_used = Bucket(clock)
        self.meter: Final = Meter(name, self.tokens_used.take)
        self.places: set[Place] = set()
        """Requests that are being answered."""
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        """Requests that have ended."""
        self.limited: dict[str, int] = {}
        """Requests that were refused, by the limit."""

    @property
    def is_busy(self) -> bool:
        """Whether something of it has not ended."""
        return bool(self.places or self.meter.num_unfinished)

    def set_limits(self, limits: KeyLimits) -> None:
        """Have other limits from now on. What was used counts against them."""
        self.limits = limits
        self.requests_used.limit = limits.requests_per_minute
        self.tokens_used.limit = limits.tokens_per_minute
        self.meter.share = limits.queue_share

    def check(self) -> None:
        """Refuse a request that a limit does not allow. Costs the same whatever runs.

        Raises:
            KeyLimitReached: naming limit and key, with the time after which there is room again.
        """
        most = self.limits.concurrent
        if most is not None and len(self.places) >= most:
            why = f"{len(self.places)} of its requests are being answered."
            raise KeyLimitReached(self.name, "concurrent", most, why)
        for limit, bucket, why in (
            ("requests_per_minute", self.requests_used, "so many have come lately."),
            ("tokens_per_minute", self.tokens_used, "so many have been used lately."),
        ):
            if wait := bucket.wait():
                why = f"{why} Try again in {_shown(wait)}."
                assert bucket.limit is not None
                raise KeyLimitReached(
                    self.name, limit, bucket.limit, why, retry_after=wait, exact=True
                )

    def enter(self) -> Place:
        """Count a request that is answered from now on, until its place is released."""
        place = Place(self)
        self.places.add(place)
        self.requests_used.take(1)
        return place

    def refuse(self, error: TooManyRequests) -> None:
        """Count a request that did not get in."""
        self.count(outcome_of_error(error, begun=False), getattr(error, "limit", None))

    def count(self, outcome: str, limit: str | None = None) -> None:
        """Count a request that has ended, and the limit that it met."""
        self.outcomes[outcome] += 1
        if limit is not None:
            self.limited[limit] = self.limited.get(limit, 0) + 1

    def absorb(self, other: Account) -> None:
        """Take over what an account has counted that is given up."""
        for mine, theirs in ((self.outcomes, other.outcomes), (self.limited, other.limited)):
            for name, number in theirs.items():
                mine[name] = mine.get(name, 0) + number
        self.meter.prompt_tokens += other.meter.prompt_tokens
        self.meter.cached_tokens += other.meter.cached_tokens
        self.meter.generated_tokens += other.meter.generated_tokens

    def told(self) -> dict[str, Any]:
        """What its caller may know, as JSON has it."""
        meter = self.meter
        free = {
            name: max(0, int(bucket.limit - bucket.used + _TINY))
            for name, bucket in (
                ("requests_per_minute", self.requests_used),
                ("tokens_per_minute", self.tokens_used),
            )
            if bucket.limit is not None
        }
        if self.limits.concurrent is not None:
            free["concurrent"] = max(0, self.limits.concurrent - len(self.places))
        return {
            "object": "key_usage",
            "key": self.name,
            "limits": self.limits.given(),
            "free": free,
            "requests": {"running": len(self.places), **self.outcomes},
            "limited": dict(self.limited),
            "tokens": {
                "prompt": meter.prompt_tokens,
                "cached": meter.cached_tokens,
                "generated": meter.generated_tokens,
            },
        }


class KeyAccounts:
    """The accounts of all keys of a key file. Nothing is counted on a server without one.

    Args:
        clock: Monotonic time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        # also those of keys that are gone, the first to go first
        self._present: frozenset[str] = frozenset()
        self._rest: Account | None = None
        # keys of the command line, and accounts that were given up

    def use(self, lines: Sequence[KeyLine]) -> None:
        """Have the keys and limits of a key file. Accounts of keys that are gone stay, in case they
        return; beyond `MOST_GONE` the oldest are added up under `OTHER`."""
        if self._rest is None:
            self._rest = Account("", OTHER, self._clock)
        gone = self._present - {line.name for line in lines}
        for name in gone:  # they are the last to go
            self._accounts[name] = self._accounts.pop(name)
        self._present = frozenset(line.name for line in lines)
        new = [line for line in lines if line.name not in self._accounts]
        free = MOST_LABELS - sum(a.label != OTHER for a in self._accounts.values())
        free += self._give_up(self._rest, len(new) - free)
        for line in new:
            label = line.name if free > 0 else OTHER
            free -= label != OTHER
            self._accounts[line.name] = Account(line.name, label, self._clock)
        for line in lines:
            self._accounts[line.name].set_limits(line.limits)

    def _give_up(self, rest: Account, wanted: int) -> int:
        """Add up accounts of keys that are gone, the oldest first: those that are too many, and as
        many with a label as are wanted; returns how many labels are free by that."""
        gone = [account for name, account in self._accounts.items() if name not in self._present]
        surplus, freed = len(gone) - MOST_GONE, 0
        for account in gone:
            has_label = account.label != OTHER
            if account.is_busy or not (surplus > 0 or (has_label and freed < wanted)):
                continue
            rest.absorb(self._accounts.pop(account.name))
            surplus, freed = surplus - 1, freed + has_label
        return freed

    def find(self, key: str) -> Account | None:
        """The account of a key of the file by its name, or the one of all other keys. `None` if
        nothing is counted."""
        return self._accounts.get(key, self._rest)

    def told(self, key: str | None = None) -> list[dict[str, Any]]:
        """The accounts of all keys of the file, by name, or of the one that is named."""
        names = sorted(self._present) if key is None else {key} & self._present
        return [self._accounts[name].told() for name in names]

    def now(self) -> list[KeyNow]:
        """What metrics show: one row per label. May be called on any thread."""
        rows: dict[str, KeyNow] = {}
        rest = () if self._rest is None else (self._rest,)
        for account in (*tuple(self._accounts.values()), *rest):
            row = rows.setdefault(account.label, KeyNow(account.label))
            meter = account.meter
            row.running += len(account.places)
            row.waiting += meter.num_waiting
            for mine, theirs in (
                (row.requests, account.outcomes),
                (row.limited, account.limited),
                (
                    row.tokens,
                    {
                        "prompt": meter.prompt_tokens,
                        "cached": meter.cached_tokens,
                        "generated": meter.generated_tokens,
                    },
                ),
            ):
                for name, number in tuple(theirs.items()):
                    mine[name] = mine.get(name, 0) + number
        return list(rows.values())

    def check_integrity(self) -> None:
        """Check the books against themselves.

        Raises:
            AssertionError: they are wrong; a bug.
        """
        assert self._present <= self._accounts.keys(), "keys without an account"
        labels = [a.label for a in self._accounts.values() if a.label != OTHER]
        assert len(labels) == len(set(labels)) <= MOST_LABELS, "labels"
        for account in _all(self._accounts.values(), self._rest):
            name, meter = account.name, account.meter
            entering = sum(place.entry.is_open for place in account.places)
            assert meter.num_entering == entering, f"{name}: {entering} enter"
            assert 0 <= meter.num_waiting <= meter.num_unfinished, f"{name}: waiting"
            assert meter.waiting_tokens >= 0 and meter.waiting_bytes >= 0, f"{name}: sums"
            assert meter.num_waiting or not meter.waiting_bytes, f"{name}: sums of nothing"
            assert sum(account.limited.values()) == account.outcomes["limited"], f"{name}: limited"
            assert meter.cached_tokens <= meter.prompt_tokens, name
            limits = account.limits
            assert account.requests_used.limit == limits.requests_per_minute, f"{name}: requests"
            assert account.tokens_used.limit == limits.tokens_per_minute, f"{name}: tokens"
            assert meter.share == limits.queue_share, f"{name}: share"


def _all(accounts: Iterable[Account], rest: Account | None) -> Iterable[Account]:
    yield from accounts
    if rest is not None:
        yield rest


def outcome_of(status: int | None) -> str:
    """What became of a request, by the status of its complete reply; `None`: it has none."""
    if status is None:
        return "disconnected"
    if status < 400:
        return "completed"
    if status in (429, 503):
        return "refused"
    return "invalid" if status < 500 else "failed"


def outcome_of_error(error: BaseException, begun: bool) -> str:
    """What became of a request that an error ended.

    Args:
        error: As it was raised.
        begun: Whether its reply had begun, with a good status.
    """
    if not isinstance(error, Exception):  # cancelled
        return "disconnected"
    if not isinstance(error, QuireError):
        return "failed"
    if isinstance(error, KeyLimitReached):
        return "limited"
    if begun:
        return "failed" if error.status >= 500 else "disconnected"
    return outcome_of(error.status)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < MINUTE else f"{seconds / MINUTE:.1f} min"
