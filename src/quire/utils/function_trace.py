"""`QUIRE_TRACE_FUNCTION=1`: writes every call and return of quire's functions to a file per thread.

Use it to find where a process hangs, or which path it took. It slows everything down many times
over. It traces the thread that calls it and threads that start later.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)

_PACKAGE: Final = str(Path(__file__).resolve().parents[1]) + os.sep


def trace_functions(instance: str | None = None) -> Path:
    """Trace this thread, and threads that start later, from now on.

    The files are `<tmp>/<user>/quire/quire-instance-<id>/QUIRE_TRACE_FUNCTION_for_process_<pid>_
    thread_<id>_at_<time>.log`; only their owner can read them.

    Args:
        instance: Name of the folder; random unless given.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder belongs to somebody else.
    """
    folder = _own_folder(instance or uuid.uuid4().hex[:8])
    threading.settrace(lambda *event: _start(folder)(*event))
    sys.settrace(_start(folder))
    return folder


def stop_tracing() -> None:
    """Stop tracing this thread and new ones."""
    threading.settrace(None)
    sys.settrace(None)


def _own_folder(instance: str) -> Path:
    above = Path(tempfile.gettempdir()) / getpass.getuser()
    above.mkdir(mode=0o700, exist_ok=True)
    if above.is_symlink() or above.stat().st_uid != os.getuid():
        raise ConfigError(f"QUIRE_TRACE_FUNCTION: {str(above)!r} belongs to somebody else")
    folder = above / "quire" / f"quire-instance-{instance}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _start(folder: Path) -> Any:
    """A trace function for the thread that runs this."""
    moment = time.strftime("%Y-%m-%d_%H:%M:%S")
    name = f"process_{os.getpid()}_thread_{threading.get_ident()}_at_{moment}"
    path = folder / f"QUIRE_TRACE_FUNCTION_for_{name}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # One line is one write, so that the file is whole up to the moment of a crash.
    return _tracer(os.fdopen(descriptor, "w", buffering=1, encoding="utf-8"))


def _give_up(error: OSError) -> None:
    """Stop tracing, because the files cannot be written."""
    stop_tracing()
    logger.warning_once("QUIRE_TRACE_FUNCTION: nothing more is traced: %s", error.strerror)


def _tracer(file: TextIO) -> Any:
    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return None if event == "call" else trace
        frame.f_trace_lines = False
        back = frame.f_back
        caller = f"{back.f_code.co_filename}:{back.f_lineno}" if back else "the start of the thread"
        word, link = ("Call to", "from") if event == "call" else ("Return from", "to")
        line = (
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} {time.monotonic():.6f} {word} "
            f"{code.co_qualname} in {code.co_filename}:{frame.f_lineno} {link} {caller}\n"
        )
        try:
            file.write(line)
        except OSError as error:
            # An error of a trace function becomes one of the traced function.
            _give_up(error)
            return None
        return trace

    return trace
