"""What kernel tests share: bits, errors, and the instruction set that a test runs on."""

import pytest
import torch

from quire import envs
from quire.kernels import compiled

SANITIZED = "asan" in (envs.KERNELS_FILE or "")
"""Whether kernels check every access (`make test-asan`): a hundred times slower on plain C++."""
needs_native = pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built")
on_every_isa = [needs_native, pytest.mark.usefixtures("isa")]
"""`pytestmark` of a file: each test on each instruction set that this machine has."""


def same(a, b):
    """Equal bits (and NaN equals NaN)."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def error(got, want):
    """Relative norm of the difference, in float64."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())
