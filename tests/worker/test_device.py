"""Choice of device and type."""

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.dispatch import ops, select
from quire.worker.device import (
    CpuDevice,
    choose_kernels,
    place,
    resolve_dtype,
    select_device,
    set_torch_threads,
)


def test_cpu_is_there():
    device = select_device("cpu")
    assert device.name == "cpu"
    assert device.free_memory() > 2**20
    device.synchronize()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu():
    assert select_device("auto").name == "cpu"
    with pytest.raises(ConfigError, match="--device cuda: .*use --device cpu"):
        select_device("cuda")


def test_an_unknown_device():
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda, got 'tpu'"):
        select_device("tpu")


def test_the_place_is_told_with_its_reason(monkeypatch):
    device = CpuDevice()
    assert place(device, "cpu") == "the CPU: --device cpu was given"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert place(device, "auto") == "the CPU: torch has no CUDA support"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert place(device, "auto") == "the CPU: no CUDA device was found"

    class Gpu(CpuDevice):
        name = "cuda"
        where = "the GPU Abacus 9"

    assert place(Gpu(), "cuda") == "the GPU Abacus 9: --device cuda was given"
    assert place(Gpu(), "auto").startswith("the GPU Abacus 9: --device auto takes a GPU")


def test_dtype():
    device = CpuDevice()
    assert resolve_dtype("auto", "torch.float32", device) == "float32"
    assert resolve_dtype("auto", "float8_e4m3fn", device) == "bfloat16"
    assert resolve_dtype("float32", "bfloat16", device) == "float32"
    with pytest.raises(ConfigError, match="--dtype float64 does not work on cpu"):
        resolve_dtype("float64", "float32", device)


def test_native_kernels_are_for_the_cpu(monkeypatch):
    class Elsewhere(CpuDevice):
        name = "meta"

        def __init__(self):
            self.torch_device = torch.device("meta")

    before = ops.name
    try:
        assert choose_kernels(CpuDevice()).name == before
        assert choose_kernels(Elsewhere()).name == "reference"
        assert ops.name == before, "models of the CPU keep theirs"
        monkeypatch.setenv("QUIRE_KERNELS", "native")
        with pytest.raises(ConfigError, match="on the CPU only, and the device is meta: leave"):
            choose_kernels(Elsewhere())
    finally:
        select(before)


def test_kv_space(monkeypatch):
    assert CpuDevice().default_kv_bytes == 4 * 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert CpuDevice().default_kv_bytes == 2**29
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "2")
    assert CpuDevice().default_kv_bytes == 2**31


def test_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("quire.worker.device.available_cores", lambda: 3)
    try:
        assert set_torch_threads(hidden_size=2048, generates=False, ops=ops) == 3
        assert torch.get_num_threads() == 3
        small = set_torch_threads(hidden_size=256, generates=True, ops=ops)
        assert small == 1, "small operators gain nothing from more"
        assert set_torch_threads(hidden_size=2048, generates=True, ops=ops) == 3
        beside = 1 if ops.name == "native" else 3
        assert torch.get_num_threads() == beside, "compiled kernels bring their own"
    finally:
        torch.set_num_threads(before)
