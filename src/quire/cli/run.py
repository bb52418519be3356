"""`quire run script.py [args]`: run a script written for vllm, unmodified.

In this process `import vllm` gives quire: the names of `quire.compat` and nothing else. The script
sees the same `sys.argv`, `sys.path[0]` and `__name__ == "__main__"` as under `python script.py`,
and its tracebacks look the same. No file is changed, and no package is installed.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

from quire.cli.parser import Parser
from quire.compat.alias import Alias
from quire.errors import ConfigError, ModelLoadError


def build_parser() -> Parser:
    """The parser of what comes before the script."""
    parser = Parser("run", "Run a Python script written for vllm: `import vllm` gives quire.")
    parser.add_argument(
        "--model", metavar="MODEL", default=None,
        help="Model to use instead of the one the script names, for example quire-demo.",
    )  # fmt: skip
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", default=None,
        help="Everything after it is the script's.",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the script; returns 1 if it raised."""
    ours, script, theirs = _split(arguments)
    namespace = build_parser().parse([*ours, *script])
    path = namespace.script
    if path is None:
        raise ConfigError("no script is given; see quire run --help")
    if not os.path.isfile(path):
        raise ConfigError(f"there is no script {path!r}")
    Alias(namespace.model).install()
    sys.argv = [path, *theirs]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    return _execute(path)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """quire's own flags, the script (if any), and the script's arguments."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] == "--model" else 1
    return (
        list(arguments[:index]),
        list(arguments[index : index + 1]),
        list(arguments[index + 1 :]),
    )


def _execute(path: str) -> int:
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        trace = _from_script(error.__traceback__, path)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, ModelLoadError):
            hint = f"quire run --model quire-demo {path}"
            print(f"quire: to run it with the model that ships: {hint}", file=sys.stderr)
        return 1
    return 0


def _from_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The part of a traceback that `python script.py` would show, without the frames that led to
    the script."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != path:
        inner = inner.tb_next
    # A syntax error has no frame of the script; python shows none either.
    return inner
