"""What a reader meant who misspelled a name: the one nearest, or nobody's.

Every table with names that people type suggests one in its errors. Knows no table.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable
from typing import Final

_LONGEST: Final = 64
"""Letters of a name that are compared: it may come from a request."""


CUTOFF: Final = 0.8
"""Likeness (`difflib`'s ratio) from which one name can be a misspelling of another."""
CUTOFF_OF_WORDS: Final = 0.6
"""The same for a name that only lacks words of the other (`max-seqs`: `max-num-seqs`), and for the
words that differ between two."""
LOWERS_SECURITY: Final = ("allow-", "trust-", "insecure", "unsafe", "disable-auth")
"""Names that begin so are never suggested: nobody shall open a door because of a typing error."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name a reader most likely meant, or `None` if nothing is close.

    A far-fetched suggestion is worse than none: it is followed.
    """
    plain = {_plain(entry): entry for entry in known}
    wanted = _plain(name[:_LONGEST])
    likeness = {
        entry: _likeness(wanted, entry)
        for entry in plain
        if entry and not entry.removeprefix("no-").startswith(LOWERS_SECURITY)
    }
    best = max(likeness, key=likeness.__getitem__, default="")
    return plain[best] if likeness.get(best) else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").strip("-")


def _likeness(wanted: str, entry: str) -> float:
    """How like two names are; 0 if one is hardly meant by the other."""
    import difflib

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, b, a).ratio()

    if min(len(wanted), len(entry)) >= 3 and _one_slip(wanted, entry):
        return 1.0
    words, others = wanted.split("-"), entry.split("-")
    rest = "-".join(word for word in words if word not in others)
    lacks = "-".join(word for word in others if word not in words)
    if rest and lacks and ratio(rest, lacks) < CUTOFF_OF_WORDS:
        return 0.0  # a whole word differs: it is something else
    like = ratio(wanted, entry)
    return like if like >= (CUTOFF if rest else CUTOFF_OF_WORDS) else 0.0


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter is missing, too many or another, or two neighbours are swapped."""
    same = len(os.path.commonprefix((a, b)))
    a, b = a[same:], b[same:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or swapped


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The rest of an error sentence: `; did you mean 'x'?`, or nothing."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
