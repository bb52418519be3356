"""The folder of a sweep, and the commands that its results are of.

Points are told apart by their parameters alone: results of other commands would pass for theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from quire.errors import ConfigError

FILE: Final = "commands.json"


def check_commands(root: Path, commands: Mapping[str, str | None]) -> None:
    """Compare the commands with those that the folder's results are of, if it has results and says.

    Args:
        root: Folder of the sweep; it need not be there.
        commands: By flag, as they were given.

    Raises:
        ConfigError: they are others.
    """
    before = _kept(root)
    if before is None or not any(root.glob("*/run=*.json")):
        return
    for flag in sorted({*before, *commands}):
        if before.get(flag) != commands.get(flag):
            raise ConfigError(
                f"{str(root)!r} has results of another command ({flag} was {before.get(flag)!r}): "
                "name another sweep with --experiment-name or --output-dir, or delete the folder"
            )


def open_folder(root: Path, commands: Mapping[str, str | None]) -> None:
    """Make the folder if it is not there, and keep the commands in it, which were checked.

    Raises:
        ConfigError: that cannot be done.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / FILE).write_text(json.dumps(commands, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output-dir: cannot write into {str(root)!r}: {error.strerror}"
        ) from None


def _kept(root: Path) -> dict[str, str | None] | None:
    try:
        found = json.loads((root / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None  # an older sweep, or one that was killed in its first moment
    return found if isinstance(found, dict) else None
