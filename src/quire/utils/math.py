"""Small arithmetic on integers and human-readable sizes."""

from __future__ import annotations

import re

from quire.errors import ConfigError

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"^\s*(\d{1,40}(?:\.\d{1,40})?)\s*([kmgtKMGT]?)(?:i?[bB])?\s*$")


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for non-negative integers."""
    return -(-a // b)


def align_up(a: int, b: int) -> int:
    """The smallest multiple of `b` that is at least `a`."""
    return cdiv(a, b) * b


def human_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_size(text: str) -> int:
    """A number with an optional suffix: `8k` is 8000, `8K` is 8192 (vLLM's convention).

    With a suffix it may have a fraction, as `7.3G`, and is rounded down.

    Raises:
        ConfigError: the text is not such a number.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(
            f"expected a whole number such as 2048, 8k (8000) or 8K (8192), got {text[:60]!r}"
        )
    number, suffix = match.groups()
    factor: int = {**_DECIMAL, **_BINARY, "": 1}[suffix]
    whole, point, part = number.partition(".")
    if point and not suffix:
        raise ConfigError(f"{text[:60]!r} is not a whole number")
    # In integers, which are exact at any size.
    value: int = int(whole + part) * factor // 10 ** len(part)
    return value
