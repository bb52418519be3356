"""Limits of keys: how they are written, and one clear error for each that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.key_file import KeyLine, parse
from quire.config.key_limits import KEY_LIMITS, KeyLimits, read_limits
from quire.errors import ConfigError

DIGEST = "0" * 64
numbers = st.none() | st.integers(1, 10**12)
shares = st.none() | st.integers(1, 1000).map(lambda n: n / 1000)
limits = st.builds(KeyLimits, numbers, numbers, numbers, shares)


@given(limits, st.booleans())
def test_a_line_is_read_as_it_was_written(limits: KeyLimits, expires: bool) -> None:
    line = KeyLine("a", bytes(32), "user", 1e9 if expires else None, limits)
    assert parse(str(line)) == [line]
    assert read_limits(str(limits)) == limits
    assert set(limits.given()) <= set(KEY_LIMITS)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("requests_per_minute=0", "must be a whole number from 1 to 1000000000000, got '0'"),
        ("requests_per_minute=-1", "got '-1'"),
        ("tokens_per_minute=1.5", "tokens_per_minute must be a whole number"),
        ("tokens_per_minute=1e6", "got '1e6'"),
        ("tokens_per_minute=1_000", "got '1_000'"),
        ("concurrent=9999999999999", "got '9999999999999'"),
        ("concurrent=", "got ''"),
        ("concurrent=\u0663", "got '\u0663'"),
        ("queue_share=0", "queue_share must be a part of the queue, above 0 and at most 1"),
        ("queue_share=1.01", "got '1.01'"),
        ("queue_share=nan", "got 'nan'"),
        ("queue_share=50%", "got '50%'"),
    ],
)
def test_a_bad_value_is_named(text: str, told: str) -> None:
    for read in (read_limits, lambda text: parse(f"a:{DIGEST}:user:{text}")):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert told in caught.value.message


def test_limits_are_for_those_who_send_requests() -> None:
    parse(f"a:{DIGEST}:admin:concurrent=1")
    with pytest.raises(ConfigError, match="line 1: a key of the role metrics sends no requests"):
        parse(f"a:{DIGEST}:metrics:concurrent=1")
    with pytest.raises(ConfigError, match="options are expires, requests_per_minute,"):
        parse(f"a:{DIGEST}:user:requests=1")
