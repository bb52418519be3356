"""The roofs that benchmarks measure against are roofs: no kernel is above them."""

import time

import torch

from kernel_kit import needs_native
from quire.kernels import native_linear
from quire.kernels.probe import Probe

pytestmark = needs_native
NOISE = 3
"""How much faster a busy machine may be in one moment than in another."""


def fastest(call, rounds):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_products_stay_below_the_registers(isa):
    probe = Probe()
    rate = max(probe.measure(0.05).multiply for _ in range(4))
    weight = native_linear.prepare_linear(torch.randn(512, 1024).bfloat16())
    x = torch.randn(192, 1024).bfloat16()
    seconds = fastest(lambda: native_linear.linear(x, weight), 10)
    reached = 2 * 192 * 512 * 1024 / seconds
    assert reached < NOISE * rate
    assert reached > rate / 100


def test_weights_are_not_read_faster_than_memory():
    probe = Probe()
    rate = max(probe.measure(0.05).read for _ in range(4))
    weight = native_linear.prepare_linear(torch.randn(65536, 1024).bfloat16())
    x = torch.randn(1, 1024).bfloat16()
    seconds = fastest(lambda: native_linear.linear(x, weight), 5)
    reached = weight.memory.numel() / seconds
    assert rate / 100 < reached < NOISE * rate
