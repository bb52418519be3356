"""A `quire serve` for a benchmark that asks over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[int]:
    """The port of a server on this machine, ready; it ends with the block."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    with open(os.devnull, "w") as nothing:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=nothing, text=True)
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "quire is ready at" in line), "")
        found = re.search(r":(\d+)", line)
        assert found is not None, "the server did not start"
        yield int(found.group(1))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
