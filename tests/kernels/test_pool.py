"""The kernels' threads: every item of every job exactly once, within its job."""

import subprocess
import sys

import pytest

from kernel_kit import needs_native
from patience import PATIENCE

JOBS = 300_000
"""A second of work. A pool that let a helper take a chunk while the next job was being written
down went wrong, or waited for ever, within the first thousands."""

CODE = """
from quire.kernels.compiled import lib
lib.set_num_threads({threads}, [])
print(lib.exercise_pool({jobs}))
"""


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_small_jobs_in_a_row(threads: int) -> None:
    # In a process of its own: what goes wrong here may never come back.
    code = CODE.format(threads=threads, jobs=JOBS // max(1, threads // 2))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE, check=True)
    assert done.stdout.strip() == "0"
