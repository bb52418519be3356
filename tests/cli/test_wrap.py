"""Line breaks of a reply on a terminal."""

from __future__ import annotations

import io
import random

import pytest

from quire.cli.wrap import Wrapped, columns


def wrapped(text: str, width: int, rng: random.Random | None = None) -> str:
    """What a terminal shows; the text comes in pieces of random length."""
    out = io.StringIO()
    wrap, rest = Wrapped(out, lambda: width), text
    while rest:
        size = rng.randint(1, 9) if rng else len(rest)
        wrap.feed(rest[:size])
        rest = rest[size:]
    wrap.end()
    return out.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree\n"),
        ("12345678 12", "12345678\n12\n"),
        ("1234567890", "1234567890\n"),
        ("12345678901234 5", "12345678901234 5\n"),
        ("123456789012345 6", "123456789012345\n6\n"),
        ("a\n\n  b c d e f", "a\n\n  b c d\ne f\n"),
        ("if x:\n\ty", "if x:\n    y\n"),
        ("日本語日本語", "日本語日\n本語\n"),
        ("ein e\u0301te\u0301", "ein e\u0301te\u0301\n"),
        ("a \x1b[31mred\x07\r", "a\n[31mred\n"),
        ("", "\n"),
    ],
)
def test_breaks(text: str, shown: str) -> None:
    assert wrapped(text, 8) == shown


def test_pieces_do_not_matter_and_nothing_is_lost() -> None:
    rng = random.Random(5)
    for _ in range(200):
        words = ["".join(rng.choices("abcäß漢字é", k=rng.randint(1, 12))) for _ in range(30)]
        text = "".join(word + rng.choice([" ", " ", "  ", "\n", "\n\n"]) for word in words)
        width = rng.randint(13, 30)
        whole = wrapped(text, width)
        assert wrapped(text, width, rng) == whole
        assert "".join(whole.split()) == "".join(text.split())
        assert max(columns(line) for line in whole.split("\n")) <= width
