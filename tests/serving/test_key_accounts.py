"""The books of keys by themselves, with a clock that the tests turn."""

from __future__ import annotations

import random

import pytest

from quire.config.key_file import KeyLine
from quire.config.key_limits import KeyLimits
from quire.errors import KeyLimitReached, QuireError, TooManyRequests
from quire.serving import errors
from quire.serving.errors import CutShort, InternalError
from quire.serving.key_accounts import (
    MOST_GONE,
    MOST_LABELS,
    OTHER,
    Account,
    Bucket,
    KeyAccounts,
    outcome_of_error,
)
from quire.utils.timing import ManualClock


def line(name: str, **limits: float) -> KeyLine:
    return KeyLine(name, name.encode().ljust(32), limits=KeyLimits(**limits))  # type: ignore[arg-type]


def account(clock: ManualClock, **limits: float) -> Account:
    made = Account("ann", "ann", clock)
    made.set_limits(KeyLimits(**limits))  # type: ignore[arg-type]
    return made


def told_wait(error: QuireError) -> tuple[int, float]:
    """What a client reads: seconds, and the finer ones."""
    found = dict(errors.headers(error))
    return int(found[b"retry-after"]), int(found[b"retry-after-ms"]) / 1000


@pytest.mark.parametrize("limit", [1, 7, 60, 1000, 10**9])
def test_who_waits_as_told_gets_in_and_not_before(limit: int) -> None:
    clock = ManualClock(1e6)
    ann = account(clock, requests_per_minute=limit)
    bucket = ann.requests_used
    bucket.take(limit - 1)
    ann.check()
    bucket.take(1)
    for _ in range(20):
        with pytest.raises(KeyLimitReached) as caught:
            ann.check()
        seconds, finer = told_wait(caught.value)
        assert finer <= seconds < finer + 1
        if limit < 10**4:  # otherwise a millisecond is many requests
            clock.advance(finer - 0.0021)
            with pytest.raises(KeyLimitReached):
                ann.check()
            finer = 0.0021
        clock.advance(finer)
        ann.check()
        bucket.take(int(limit - bucket.used + 1e-6))


def test_never_more_than_twice_the_limit_in_a_minute_and_the_limit_over_time() -> None:
    clock, rng = ManualClock(), random.Random(4)
    ann = account(clock, requests_per_minute=30)
    taken: list[float] = []
    for _ in range(20000):
        clock.advance(rng.choice([0.001, 0.05, 0.3]))
        if not ann.requests_used.wait():
            ann.requests_used.take(1)
            taken.append(clock.now())
    spans = [sum(1 for t in taken if start <= t < start + 60) for start in taken[::20]]
    assert max(spans) <= 60
    assert len(taken) <= 30 + clock.now() / 2 + 1 and len(taken) >= clock.now() / 2


def test_a_debt_of_tokens_is_paid_off_at_the_rate() -> None:
    clock = ManualClock()
    ann = account(clock, tokens_per_minute=600)
    ann.check()
    ann.meter.charge(5000)
    with pytest.raises(KeyLimitReached) as caught:
        ann.check()
    assert caught.value.extra == {"limit": "tokens_per_minute", "limit_value": 600, "key": "ann"}
    assert "The key 'ann' has reached its limit tokens_per_minute=600" in caught.value.message
    assert told_wait(caught.value) == (441, 440.1)
    clock.advance(440.1)
    ann.check()
    assert ann.told()["free"] == {"tokens_per_minute": 1}
    # A debt of more than an hour is told as it is.
    ann.meter.charge(600 * 120)
    with pytest.raises(KeyLimitReached) as caught:
        ann.check()
    assert told_wait(caught.value)[0] > 7000


def test_a_refused_request_takes_nothing() -> None:
    clock = ManualClock()
    ann = account(clock, requests_per_minute=2, concurrent=1)
    place = ann.enter()
    for _ in range(5):
        with pytest.raises(KeyLimitReached, match="limit concurrent=1: 1 of its requests"):
            ann.check()
    place.release("completed")
    place.release("failed")
    ann.check()
    assert ann.outcomes["completed"] == 1 and ann.outcomes["failed"] == 0
    assert ann.told()["free"] == {"requests_per_minute": 1, "concurrent": 1}


def test_other_limits_count_at_once_and_lose_nothing() -> None:
    clock = ManualClock()
    accounts = KeyAccounts(clock)
    accounts.use([line("ann", requests_per_minute=10, concurrent=3)])
    ann = accounts.find("ann")
    assert ann is not None
    places = [ann.enter() for _ in range(2)]
    for _ in range(6):
        ann.requests_used.take(1)
    accounts.use([line("ann", requests_per_minute=8, concurrent=2)])
    assert accounts.find("ann") is ann
    with pytest.raises(KeyLimitReached, match="concurrent=2"):
        ann.check()
    places[0].release("completed")
    with pytest.raises(KeyLimitReached, match="requests_per_minute=8"):
        ann.check()
    accounts.use([line("ann", requests_per_minute=9)])
    ann.check()
    accounts.use([line("bob")])  # a key that is gone for a moment has still used what it has
    accounts.use([line("ann", requests_per_minute=8), line("bob")])
    with pytest.raises(KeyLimitReached, match="requests_per_minute=8"):
        ann.check()
    accounts.use([line("ann"), line("bob")])
    ann.check()
    assert len(ann.places) == 1
    accounts.check_integrity()


def test_labels_are_few_and_nothing_that_was_counted_is_lost() -> None:
    clock = ManualClock()
    accounts = KeyAccounts(clock)
    total = 0
    for turn in range(8):
        names = [f"k{turn}-{i}" for i in range(300)]
        accounts.use([line(name) for name in names])
        for name in names:
            found = accounts.find(name)
            assert found is not None
            place = found.enter()
            found.meter.generated_tokens += 2
            if turn == 3 and name == "k3-5":
                continue  # runs on
            place.release("completed")
            total += 1
        rows = accounts.now()
        labels = [row.label for row in rows]
        assert len(labels) == len(set(labels)) <= MOST_LABELS + 1 and OTHER in labels
        assert sum(row.requests["completed"] for row in rows) == total
        assert sum(row.tokens["generated"] for row in rows) == 600 * (turn + 1)
        accounts.check_integrity()
        # Keys of the file come before keys that are gone.
        assert sum(label.startswith(f"k{turn}-") for label in labels) >= MOST_LABELS - 1
    assert len(accounts._accounts) <= MOST_GONE + 301
    assert sum(row.running for row in accounts.now()) == 1
    assert len(accounts.told()) == 300


def test_without_a_key_file_nothing_is_counted() -> None:
    accounts = KeyAccounts(ManualClock())
    assert accounts.find("") is None and accounts.now() == [] and accounts.told() == []
    accounts.use([line("ann")])
    rest = accounts.find("")
    assert rest is not None and rest.label == OTHER
    assert [one["key"] for one in accounts.told()] == ["ann"]
    assert accounts.told("bob") == accounts.told("") == []


def test_a_wrong_book_is_found() -> None:
    for spoil in (
        lambda a: setattr(a.meter, "num_entering", 1),
        lambda a: setattr(a.meter, "num_waiting", 1),
        lambda a: setattr(a.meter, "cached_tokens", 1),
        lambda a: setattr(a.requests_used, "limit", 3),
        lambda a: a.count("completed", "concurrent"),
    ):
        accounts = KeyAccounts(ManualClock())
        accounts.use([line("ann")])
        accounts.check_integrity()
        spoil(accounts.find("ann"))
        with pytest.raises(AssertionError):
            accounts.check_integrity()


@pytest.mark.parametrize(
    ("error", "begun", "outcome"),
    [
        (KeyLimitReached("a", "concurrent", 1, "x"), False, "limited"),
        (TooManyRequests("full"), False, "refused"),
        (CutShort(), False, "refused"),
        (CutShort(), True, "failed"),
        (InternalError("x"), True, "failed"),
        (ValueError(), False, "failed"),
        (KeyboardInterrupt(), True, "disconnected"),
    ],
)
def test_outcomes(error: BaseException, begun: bool, outcome: str) -> None:
    assert outcome_of_error(error, begun) == outcome


def test_a_bucket_without_a_limit_counts_nothing() -> None:
    bucket = Bucket(ManualClock())
    bucket.take(10**9)
    assert bucket.wait() == 0.0 and bucket.used == 0.0
    bucket.limit = 1
    assert bucket.wait() == 0.0
