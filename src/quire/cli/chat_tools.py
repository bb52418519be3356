"""The tools of `quire chat --tools FILE`: their file, and where the results of calls come from.

Knows no model. A file holds a tool in OpenAI's form, or a list of them. Nothing is run for a call
unless the user names a command for it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any, Final

from quire.errors import InvalidRequest

MAX_FILE_BYTES: Final = 4 * 2**20
MAX_RESULT_CHARS: Final = 100_000


def read_file(path: str) -> list[dict[str, Any]]:
    """The tools of a file, checked.

    Raises:
        InvalidRequest: it cannot be read, or holds something else.
    """
    from quire.serving.conversation import read_tools

    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path!r} is too large for a file of tools")
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path!r} holds no tools: it is not JSON") from None
    tools = data if isinstance(data, list) else [data]
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{path!r} must hold a tool in OpenAI's form, or a list of them")
    read_tools(tools)
    return tools


def run_command(command: str, call: dict[str, Any]) -> str:
    """What a command prints for a call: it gets the tool's name as its last argument and the
    arguments as JSON on its standard input. A failure is a result, too: the model is told."""
    function = call["function"]
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*shlex.split(command), function["name"]],
            input=function["arguments"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, ValueError) as error:
        return f"error: {error}"
    if done.returncode:
        return f"error: exit code {done.returncode}: {done.stderr.strip()[:1000]}"
    return done.stdout.strip()[:MAX_RESULT_CHARS]
