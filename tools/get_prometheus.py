"""Fetches Prometheus and promtool for the tests, from Debian: `python tools/get_prometheus.py DIR`.

Where that cannot be done (no apt, no network) it says so and succeeds: the tests that need them
then say that they were skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

APT = ["apt-get", "-q", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0"]


def fetch(folder: Path) -> None:
    """Unpack the Debian package below `folder`.

    Raises:
        OSError: a program is missing.
        subprocess.SubprocessError: one failed or took too long.
    """
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [*APT, "download", "prometheus"],
            cwd=scratch,
            check=True,
            timeout=120,
            capture_output=True,
        )
        (package,) = Path(scratch).glob("prometheus_*.deb")
        unpacked = Path(scratch) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True, timeout=120)
        programs = folder / "usr" / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        for name in ("prometheus", "promtool"):
            shutil.copy(unpacked / "usr" / "bin" / name, programs / name)


def main() -> int:
    folder = Path(sys.argv[1])
    installed = (folder / "usr" / "bin" / "promtool").exists() or shutil.which("promtool")
    if installed:
        return 0
    try:
        fetch(folder)
        print(f"fetched Prometheus for the tests into {folder}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(
            f"no Prometheus for the tests; those that need it are skipped: {_why(error)}\n"
            "To run them, install prometheus so that it is in PATH, or have apt reach an archive."
        )
    return 0


def _why(error: Exception) -> str:
    """What the program that failed said last, rather than its exit status."""
    said = getattr(error, "stderr", None) or b""
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else str(error)


if __name__ == "__main__":
    sys.exit(main())
