"""What is kept for callers stays within its limits, and is found by its owner alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.serving.owned_store import OwnedStore
from quire.utils.timing import ManualClock


def test_the_oldest_make_room() -> None:
    store: OwnedStore[str] = OwnedStore(3, 100, 60, ManualClock())
    for name in "abcd":
        store.put(b"me", name, name.upper(), 10)
    assert [store.get(b"me", name) for name in "abcd"] == [None, "B", "C", "D"]
    store.put(b"me", "e", "E", 85)
    assert (len(store), store.bytes) == (2, 95)
    store.put(b"me", "f", "F", 101)
    assert store.get(b"me", "f") is None and store.get(b"me", "e") == "E", "too large to be kept"


def test_what_is_old_is_gone() -> None:
    clock = ManualClock()
    store: OwnedStore[str] = OwnedStore(9, 100, 60, clock)
    store.put(b"me", "a", "A", 1)
    clock.advance(30)
    store.put(b"me", "b", "B", 1)
    clock.advance(31)
    assert store.get(b"me", "a") is None and store.get(b"me", "b") == "B"
    assert (len(store), store.bytes) == (1, 1)


def test_only_its_owner_finds_a_thing() -> None:
    store: OwnedStore[str] = OwnedStore(9, 100, 60, ManualClock())
    store.put(b"me", "a", "A", 1)
    assert store.get(b"you", "a") is None and not store.remove(b"you", "a")
    assert store.get(b"me", "a") == "A"


def test_what_is_pinned_stays_until_it_is_put() -> None:
    store: OwnedStore[str] = OwnedStore(1, 10, 60, clock := ManualClock())
    store.pin(b"me", "a", "making")
    store.put(b"me", "b", "B", 10)
    clock.advance(100)
    assert store.get(b"me", "a") == "making" and store.get(b"me", "b") is None
    store.put(b"me", "a", "made", 10)
    assert store.get(b"me", "a") == "made" and len(store) == 1


operations = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 20)), max_size=40
)


@given(operations)
def test_its_limits_hold_whatever_is_put(steps: list[tuple[str, int, int]]) -> None:
    clock = ManualClock()
    store: OwnedStore[int] = OwnedStore(4, 60, 30, clock)
    kept: dict[str, tuple[int, float]] = {}
    for name, size, seconds in steps:
        clock.advance(seconds)
        store.put(b"me", name, size, size)
        kept[name] = (size, clock.now())
        assert len(store) <= 4 and store.bytes <= 60
        found = {n: v for n in kept if (v := store.get(b"me", n)) is not None}
        assert store.bytes == sum(found.values())
        assert all(kept[n][0] == v and clock.now() - kept[n][1] <= 30 for n, v in found.items())
        assert name in found or size > 60
