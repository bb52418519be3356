"""The kernels' threads: every item of every job exactly once, within its job."""

import subprocess
import sys

import pytest
import torch

from kernel_kit import needs_native, same
from patience import PATIENCE
from quire.kernels import native_linear
from quire.kernels.compiled import lib
from quire.quantization.online_floats import fp8_per_channel

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


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_thread_that_flushes_denormal_numbers(threads: int, narrow: bool) -> None:
    """As libraries built with -ffast-math do to those that load them: no bit changes."""
    if narrow:  # rows may be made larger before they are multiplied
        x, weight = torch.full((3, 64), 2.0**-130), torch.full((512, 64), 2.0)
        coded = fp8_per_channel(weight)
        prepared = native_linear.prepare_coded(coded, dtype=torch.bfloat16)
        x = x.bfloat16()
    else:
        x, weight = torch.full((3, 64), 2.0**-70), torch.full((512, 64), 2.0**-70)
        prepared = native_linear.prepare_linear(weight, dtype=torch.float32)
    before, wanted = lib.num_threads(), native_linear.linear(x, prepared, torch.float32)
    if not narrow:
        assert wanted.min() == 2.0**-134  # denormal
    flushes = torch.set_flush_denormal(True)
    try:
        lib.set_num_threads(threads, [])
        for _ in range(50):
            assert same(native_linear.linear(x, prepared, torch.float32), wanted)
        assert not flushes or torch.tensor(2.0**-134) * 1.0 == 0, "the caller's own is as it was"
    finally:
        torch.set_flush_denormal(False)
        lib.set_num_threads(before, [])
