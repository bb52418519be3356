"""The `quire` command: finds the subcommand, and turns errors into one line and an exit code.

Importing this module loads nothing but the table below. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

import quire
from quire.errors import QuireError, StartupError, told
from quire.registry import Registry

Command = Callable[[Sequence[str]], int]

COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "serve": "quire.cli.serve:main",
        "chat": "quire.cli.chat:main",
        "complete": "quire.cli.complete:main",
        "run": "quire.cli.run:main",
        "run-batch": "quire.cli.run_batch:main",
        "pull": "quire.cli.models:pull",
        "ls": "quire.cli.models:ls",
        "rm": "quire.cli.models:rm",
        "verify": "quire.cli.models:verify",
        "inspect": "quire.cli.inspect:main",
        "plan": "quire.cli.plan:main",
        "calibrate": "quire.cli.calibrate:main",
        "simulate": "quire.cli.simulate:main",
        "replay": "quire.cli.replay:main",
        "tune": "quire.cli.tune:main",
        "eval": "quire.cli.eval:main",
        "quantize": "quire.cli.quantize:main",
        "bench": "quire.cli.bench:main",
        "lab": "quire.cli.lab:main",
        "explain": "quire.cli.explain:main",
        "timeline": "quire.cli.timeline:main",
        "top": "quire.cli.top:main",
        "doctor": "quire.cli.doctor:main",
        "chaos": "quire.cli.chaos:main",
        "keys": "quire.cli.api_keys:main",
        "profile": "quire.cli.profile:main",
        "collect-env": "quire.cli.collect_env:main",
    },
)
ABOUT = {
    "serve": "start the OpenAI-compatible server",
    "chat": "talk to a model in the terminal",
    "complete": "print the completion of a prompt",
    "run": "run a Python script written for vllm",
    "run-batch": "run the requests in a batch file, and write their replies to another",
    "pull": "download a model from the hub",
    "ls": "list the models on this machine",
    "rm": "delete a downloaded model",
    "verify": "check a model's files against their checksums",
    "inspect": "tell what a model is and needs, without loading it",
    "eval": "score a model on a text, and compare it with another",
    "plan": "tell how many users a model can serve here, without loading it",
    "calibrate": "measure how long steps take on this machine, for simulations",
    "simulate": "run a recorded trace on the scheduler without a model",
    "tune": "find settings that meet latency targets",
    "replay": "run a recorded trace again, and compare every decision",
    "bench": "measure a server or an engine: latencies, throughput",
    "lab": "measure what one setting does",
    "quantize": "write a quantised copy of a model, chosen by measurement",
    "explain": "tell where the time of one request went",
    "timeline": "write the last steps of a server as a trace for Perfetto",
    "top": "watch a running server",
    "doctor": "check this machine, or find out why a server is slow",
    "chaos": "attack a running server from outside, and tell what held",
    "keys": "add, list and revoke the keys of a server",
    "profile": "print the top kernels of prefill and of decode",
    "collect-env": "describe this machine and installation, for reports",
}
"""What each command does, for the overview. One row per command."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk or a quota that is full: the output was sent to a file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # its reader is gone (`quire ... | head`)
        return 1
    except OSError as error:
        if error.errno not in _FULL or _wants_traceback():
            raise
        _drop_output()
        print(f"quire: cannot write: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    except QuireError as error:
        if _wants_traceback():
            raise
        return report(error)


def _drop_output() -> None:
    """Python would complain once more when it flushes at exit, so it gets somewhere to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(overview())
        return 0
    if command in ("-v", "--version"):
        print(f"quire {quire.__version__}")
        return 0
    return COMMANDS.get(command)(arguments[1:])


def overview() -> str:
    """What `quire --help` prints."""
    rows = "\n".join(f"  {name:<14}{about}" for name, about in ABOUT.items())
    return (
        "usage: quire COMMAND [FLAGS]\n\n"
        f"commands:\n{rows}\n\n"
        "`quire COMMAND --help` tells its flags; `quire --version` the version.\n"
        "Without a model, commands use quire-demo, which ships with quire."
    )


def report(error: QuireError) -> int:
    """Print an expected error as one line; returns the exit code."""
    print(f"quire: {told(error)}", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, StartupError) else 1


def _wants_traceback() -> bool:
    from quire import envs

    try:
        return envs.LOGGING_LEVEL == "DEBUG"
    except QuireError:
        return False
