"""Environments of the clients: one for each, because their dependencies contradict one another.

    python tests/clients/environments.py openai-2 anthropic     # these; all without arguments

A Python client has a file `environments/NAME.txt` with the version of every package; those for Node
share `node/package-lock.json`. Environments are made in `build/clients` and made again when their
file changes. Knows nothing of the tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "clients"
NODE = "node"
PEER = "vllm"
NAMES = (NODE, *sorted(path.stem for path in (HERE / "environments").glob("*.txt")))


class Unmade(Exception):
    """An environment is not there, or its file has changed since it was made."""


def program(name: str) -> Path:
    """The interpreter of an environment: Python, or Node. That of vLLM is nothing to install for
    a test: `QUIRE_PEER_VLLM` says where it is.

    Raises:
        Unmade: `make` has not made this version of it.
    """
    if name == PEER:
        return Path(os.environ["QUIRE_PEER_VLLM"])
    if not _stamp(name).exists():
        raise Unmade(f"no environment for {name}: python tests/clients/environments.py {name}")
    if name == NODE:
        found = shutil.which("node")
        assert found is not None
        return Path(found)
    return BUILD / name / "bin" / "python"


def make(name: str) -> None:
    """Make an environment, unless this version of it is there.

    Raises:
        SystemExit: an installer failed, or Node is needed and absent.
    """
    stamp = _stamp(name)
    if stamp.exists():
        return
    began = time.monotonic()
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name == NODE:
        if shutil.which("npm") is None:
            sys.exit(
                "The clients for Node need npm and node (20 or later); neither is in the PATH."
            )
        for file in (HERE / "node").iterdir():
            shutil.copy(file, folder)
        _run("npm", "ci", "--no-fund", "--no-audit", "--loglevel=error", cwd=folder)
    else:
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
        _run(*pip, "install", "--quiet", "--no-deps", "-r", str(_source(name)))
    stamp.touch()
    print(f"{name}: made in {time.monotonic() - began:.0f} s", flush=True)


def _source(name: str) -> Path:
    return (
        HERE / "node" / "package-lock.json" if name == NODE else HERE / f"environments/{name}.txt"
    )


def _stamp(name: str) -> Path:
    """Present when the environment is complete; programs for Node are part of theirs."""
    files = sorted((HERE / "node").iterdir()) if name == NODE else [_source(name)]
    content = b"".join(file.read_bytes() for file in files)
    return BUILD / name / f".made-{hashlib.sha256(content).hexdigest()[:16]}"


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(NAMES)
    if unknown := [name for name in wanted if name not in NAMES]:
        sys.exit(f"no environment {unknown[0]!r}; there are {', '.join(NAMES)}")
    for wanted_name in wanted:
        make(wanted_name)
