"""What `quire serve` prints when it is ready: where it is, and a request to paste."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from quire.config import ServerConfig
from quire.logger import get_logger
from quire.serving.engine_protocol import EngineClient

logger = get_logger(__name__)


def announce(text: str) -> None:
    """Print, ignoring errors: a full disk behind stdout is no reason not to serve."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("stdout cannot be written: %s", error.strerror)
        # What stands in its buffer would fail again at exit, and change the exit code.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def greeting(
    config: ServerConfig, listener: socket.socket, engine: EngineClient, parsers: str = ""
) -> str:
    """The text printed when the server is ready: its address, the names of the parsers that read
    the model's output, and a request to paste."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds:
        place, options = f"{scheme}://localhost", f" --unix-socket {config.uds}"
        shown = config.uds
    else:
        host, port = listener.getsockname()[:2]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        name = f"[{name}]" if ":" in name and not name.startswith("[") else name
        shown = place = f"{scheme}://{name}:{port}"
        options = ""
    key = ' \\\n    -H "Authorization: Bearer $QUIRE_API_KEY"' if config.has_keys else ""
    path, body = _example(engine)
    parsed = f"{parsers}\n" if parsers and engine.pooler is None else ""
    return (
        f"quire is ready at {shown}\n{parsed}\n"
        f"  curl{options} {place}{path} \\\n"
        f"    -H 'Content-Type: application/json'{key} \\\n    -d '{body}'\n"
    )


def _example(engine: EngineClient) -> tuple[str, str]:
    """Path and body of a request that the model can answer."""
    name, text = engine.config.model.names[0], "What is the capital of France?"
    if engine.pooler is None:
        messages = f'[{{"role": "user", "content": "{text}"}}]'
        return "/v1/chat/completions", f'{{"model": "{name}", "messages": {messages}}}'
    path = "/v1/embeddings" if engine.pooler.task == "embed" else "/classify"
    return path, f'{{"model": "{name}", "input": "{text}"}}'
