"""`make test-asan` runs the kernels that it says, and their sanitizer speaks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_kit import SANITIZED, needs_native
from patience import PATIENCE
from quire.kernels.compiled import lib

READ_TOO_FAR = """
import numpy as np
from quire.kernels.compiled import lib
x, answers = np.zeros(1000, np.float32), np.zeros(1, bool)
lib.finite_rows(x.ctypes.data, 1, 5000, 5000, answers.ctypes.data)
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | env
    )


@pytest.mark.skipif(not SANITIZED, reason="not a build with sanitizers")
def test_a_read_beyond_the_end_is_reported() -> None:
    done = run(READ_TOO_FAR)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@needs_native
def test_another_build_can_be_loaded(tmp_path: Path) -> None:
    copy = shutil.copy(lib.__file__, tmp_path)
    done = run(
        "from quire.kernels.compiled import lib; print(lib.__file__)", QUIRE_KERNELS_FILE=copy
    )
    assert done.stdout.strip() == copy, done.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = run("import quire.kernels.compiled", QUIRE_KERNELS_FILE=str(tmp_path / "none.so"))
    assert done.returncode != 0
    assert "QUIRE_KERNELS_FILE" in done.stderr and "path of a file" in done.stderr


@pytest.mark.parametrize("name", ["broken.so", "notes.txt"])
def test_a_file_that_is_no_module(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("nothing")
    done = run("import quire.kernels.compiled", QUIRE_KERNELS_FILE=str(tmp_path / name))
    assert done.returncode != 0
    assert "ConfigError" in done.stderr and "cannot be loaded" in done.stderr
