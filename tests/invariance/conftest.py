"""Every test here runs once per instruction set that this machine has."""

import pytest
import torch

from quire.kernels import compiled
from quire.kernels.dispatch import ops, select


@pytest.fixture(scope="module", params=compiled.available_isas() or ["none"])
def isa(request):
    if request.param == "none":
        pytest.skip("the native kernels are not built")
    before, threads, kernels = compiled.lib.isa(), compiled.lib.num_threads(), ops.name
    torch.set_num_threads(1)
    select("native")
    assert compiled.lib.set_isa(request.param)
    yield request.param
    compiled.lib.set_num_threads(threads, [])
    compiled.lib.set_isa(before)
    select(kernels)
