"""One thread unless a test says otherwise: small operations are faster so, and a busy machine
makes torch's second thread wait for whole time slices."""

import pytest
import torch

from quire.kernels import compiled


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=compiled.available_isas(), ids=str)
def isa(request):
    """Native kernels with this instruction set and two threads."""
    before, threads = compiled.lib.isa(), compiled.lib.num_threads()
    assert compiled.lib.set_isa(request.param)
    compiled.lib.set_num_threads(2, [])
    yield request.param
    compiled.lib.set_isa(before)
    compiled.lib.set_num_threads(threads, [])
