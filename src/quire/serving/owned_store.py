"""Things kept in memory for the callers they belong to, within limits on number, size and age.

A caller finds only its own: to anybody else a thing that belongs to another is as unknown as one
that never was. Knows neither what is kept nor who callers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.utils.timing import Clock

T = TypeVar("T")


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    size: int
    at: float


class OwnedStore(Generic[T]):
    """The store.

    Args:
        most: How many things are kept; with 0 none are.
        most_bytes: Their size together.
        seconds: For how long each is kept.
        clock: Monotonic time.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float, clock: Clock) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[tuple[bytes, str], _Entry[T]] = {}
        """In the order in which they were put here, the oldest first."""
        self._pinned: dict[tuple[bytes, str], T] = {}
        self.bytes = 0
        """Size of what is kept."""

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept."""
        return self._most > 0

    def __len__(self) -> int:
        return len(self._kept) + len(self._pinned)

    def pin(self, owner: bytes, name: str, value: T) -> None:
        """Keep a thing that is not finished, whatever the limits, until `put` or `remove`."""
        self._pinned[owner, name] = value

    def put(self, owner: bytes, name: str, value: T, size: int) -> None:
        """Keep a thing, in place of the one of that name; the oldest make room for it. One that is
        larger than the whole store is not kept."""
        self.remove(owner, name)
        self._drop_old()
        if size > self._most_bytes or not self.enabled:
            return
        while self._kept and (
            len(self._kept) >= self._most or self.bytes + size > self._most_bytes
        ):
            self.remove(*next(iter(self._kept)))
        self._kept[owner, name] = _Entry(value, size, self._clock.now())
        self.bytes += size

    def get(self, owner: bytes, name: str) -> T | None:
        """A thing of this owner."""
        if (owner, name) in self._pinned:
            return self._pinned[owner, name]
        self._drop_old()
        entry = self._kept.get((owner, name))
        return None if entry is None else entry.value

    def remove(self, owner: bytes, name: str) -> bool:
        """Forget a thing of this owner; whether there was one."""
        if (owner, name) in self._pinned:
            del self._pinned[owner, name]
            return True
        entry = self._kept.pop((owner, name), None)
        if entry is not None:
            self.bytes -= entry.size
        return entry is not None

    def _drop_old(self) -> None:
        limit = self._clock.now() - self._seconds
        while self._kept:
            key, entry = next(iter(self._kept.items()))
            if entry.at >= limit:
                return
            self.remove(*key)
