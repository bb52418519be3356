"""Text as windows of tokens, each computed on its own. Knows no model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.tokenizer.tokenizer import Tokenizer

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Windows:
    """What is scored."""

    ids: Sequence[Sequence[int]]
    """Token ids of each window."""
    unscored: int
    """Tokens at the beginning of each window that are given and not scored."""

    @property
    def positions(self) -> int:
        """Tokens that are scored."""
        return sum(len(window) - self.unscored for window in self.ids)


def read_text(path: str) -> str:
    """The text of a file; `-` is stdin.

    Raises:
        ConfigError: there is none, or it is not UTF-8.
    """
    try:
        if path == STDIN:
            return sys.stdin.read()
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"the text {path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the text {path!r} must be UTF-8, and byte {error.start} is not: convert it"
        ) from None


def cut(
    tokenizer: Tokenizer, text: str, length: int, most: int | None = None, least: int = 1
) -> Windows:
    """Windows of `length` tokens one after another; the last may be shorter.

    Where the tokenizer puts a token before a text, each window begins with it, as what the model
    was trained on does. The first token of a window is given, the others are scored.

    Args:
        most: Windows, at most; `None`: all of the text.
        least: Tokens that must be scored.

    Raises:
        ConfigError: `length` is less than 2, or the text is too short.
    """
    if length < 2:
        raise ConfigError(f"a window must have at least 2 tokens, got {length}")
    before = tokenizer.encode("")
    bos = tokenizer.bos_token_id
    head = [bos] if bos is not None and before[:1] == [bos] else []
    ids = tokenizer.encode(text, add_special_tokens=False)
    room = length - len(head)
    cuts = [[*head, *ids[at : at + room]] for at in range(0, len(ids), room)]
    windows = Windows([window for window in cuts if len(window) > 1][:most], 1)
    if windows.positions < least:
        raise ConfigError(
            f"the text is too short: it has {windows.positions} tokens to score, and at least "
            f"{least} are needed"
        )
    return windows
