"""Where a quantised copy is written, and what is said if that fails.

All is made in a folder beside OUT, on the same disk, and gets its name when it is complete. Knows
no tensor.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quire.compress.report import give_out
from quire.errors import ConfigError, StartupError
from quire.weights.files import SafetensorError

_PREFIX: Final = 40
"""Characters of OUT's name in that of the folder beside it, which must not be too long."""
_OTHER_NAMES: Final = 1000
_ELSE: Final = "give an OUT in a folder where files can be made"


@contextlib.contextmanager
def told_of_writing() -> Iterator[None]:
    """Around what writes files alone.

    Raises:
        StartupError: the disk is full, or whatever else the system says.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StartupError(
            f"the quantised copy cannot be written ({reason(error)}): make room on that disk, or "
            "give an OUT on another one"
        ) from error


def reason(error: Exception) -> str:
    """What the system says, without the number and the path."""
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def check_out(out: Path) -> None:
    """Refuse a name that is taken or that cannot be made.

    Raises:
        ConfigError: saying which.
    """
    try:
        taken, inside = out.exists() or out.is_symlink(), out.parent.is_dir()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(out)!r} cannot be written ({reason(error)}): {_ELSE}") from None
    if taken:
        raise ConfigError(f"{str(out)!r} exists: give a name that is free, or delete it")
    if not inside:
        raise ConfigError(f"there is no folder {str(out.parent)!r} for {out.name!r}")


@contextlib.contextmanager
def folder_for(out: Path) -> Iterator[Path]:
    """A folder beside `out`, on the same disk, that vanishes at the end.

    Raises:
        ConfigError: nothing can be made there.
    """
    try:
        made = tempfile.TemporaryDirectory(
            prefix=f".{out.name[:_PREFIX]}-", dir=out.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(
            f"nothing can be written in {str(out.parent)!r} ({reason(error)}): {_ELSE}"
        ) from None
    with made as name:
        yield Path(name)


def give_name(made: Path, out: Path) -> None:
    """Rename a complete folder to `out`, or to a name beside it if something has that by now: then
    its report says so.

    Raises:
        ConfigError: it has another name, which the message tells.
    """
    try:
        made.rename(out)
        return
    except OSError as error:
        said = reason(error)
    for number in range(2, _OTHER_NAMES):
        other = out.with_name(f"{out.name}-{number}")
        with contextlib.suppress(OSError):
            if not other.exists():
                made.rename(other)
                break
    else:
        raise ConfigError(f"{str(out)!r} cannot be given to what was written ({said}): {_ELSE}")
    # The copy is complete whatever its report says.
    with contextlib.suppress(OSError):
        give_out(other)
    raise ConfigError(
        f"{str(out)!r} was made by something else meanwhile ({said}): the quantised copy is "
        f"complete and is {str(other)!r}; rename it"
    )
