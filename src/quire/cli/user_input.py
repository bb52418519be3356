"""What the user types, or a pipe holds, as messages: one a line, or several lines between `\"\"\"`.

On a terminal, Ctrl-C clears the current input; pressed twice in a row, it ends the program, as does
Ctrl-D. Knows nothing of conversations.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

FENCE: Final = '"""'
_PROMPT, _MORE = "> ", "... "

ReadLine = Callable[[str], str]
"""Shows a prompt and returns a line without its newline; raises EOFError at the end of the
input."""


def read_messages(read: ReadLine) -> Iterator[str]:
    """The messages until the input ends."""
    warned = False
    while True:
        try:
            message = _message(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            if warned:
                print(file=sys.stderr)
                return
            warned = True
            print("\n(Ctrl-C again or Ctrl-D leaves)", file=sys.stderr)
        else:
            warned = False
            yield message


def _message(read: ReadLine) -> str:
    line = read(_PROMPT)
    if not line.startswith(FENCE):
        return line
    line, lines = line.removeprefix(FENCE), []
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        try:
            line = read(_MORE)
        except EOFError:  # whoever ends the input ends the message
            return "\n".join(lines).strip("\n")
    lines.append(line.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip("\n")


def piped(prompt: str) -> str:
    """Reads a line from a pipe, without a prompt."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def typed(prompt: str) -> str:
    """Reads a line from a terminal."""
    if sys.stdout.isatty():
        return _typed_with_history(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout is somebody's file
    return input()


def _typed_with_history(prompt: str) -> str:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` history and editing)
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        raise
