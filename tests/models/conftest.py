"""Helpers beside the tests can be imported; one thread unless a test says otherwise (small
operations are faster so, and a busy machine makes torch's second thread wait)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
