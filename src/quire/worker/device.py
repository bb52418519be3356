"""Devices as siblings: each tells its free memory and types, and waits for its work.

A new kind of device is a class and a row of `config.model.DEVICES`; what computes on it is a row of
`kernels.dispatch.IMPLEMENTATIONS` and perhaps an attention backend.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from quire import envs
from quire.config.model import DEVICES
from quire.errors import ConfigError
from quire.kernels.compiled import set_num_threads
from quire.kernels.dispatch import Ops, choose, default_ops
from quire.logger import get_logger
from quire.utils.host import available_cores, available_memory

logger = get_logger(__name__)

THREADED_HIDDEN_SIZE: Final = 768
"""Models at least this wide compute each operator with all cores."""


class Device(Protocol):
    """Where a model runs."""

    name: str
    """Its row."""
    where: str
    """What it is, for people: `the CPU`."""
    torch_device: torch.device
    dtypes: Sequence[str]
    """Names of the types it can compute in, the preferred substitute first."""

    @property
    def default_kv_bytes(self) -> int | None:
        """Most memory the KV cache takes if nobody says how much; `None`: no such limit."""
        ...

    def free_memory(self) -> int:
        """Bytes that this process can still take."""
        ...

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""
        ...


class CpuDevice:
    """The host's processor and its RAM."""

    name = "cpu"
    where = "the CPU"
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32")

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    @property
    def default_kv_bytes(self) -> int | None:
        """4 GiB, or what `QUIRE_CPU_KVCACHE_SPACE` says."""
        return int((envs.CPU_KVCACHE_SPACE or 4.0) * 2**30)

    def free_memory(self) -> int:
        """Free RAM within the control group."""
        return available_memory()

    def synchronize(self) -> None:
        """CPU work is done when its call returns."""


class CudaDevice:
    """One GPU: the current CUDA device."""

    name = "cuda"
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32")
    default_kv_bytes = None

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.where = f"the GPU {torch.cuda.get_device_name(self.torch_device)}"

    def free_memory(self) -> int:
        """Free device memory."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.torch_device)


def select_device(name: str) -> Device:
    """The device by option: `auto` (a GPU if there is one), `cpu`, `cuda`.

    Raises:
        ConfigError: there is no such device here.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    if name not in DEVICES:
        raise ConfigError(
            f"--device must be one of auto, {', '.join(DEVICES.names())}, got {name!r}"
        )
    if name == "cuda" and not has_gpu:
        reason = "torch sees no GPU" if torch.version.cuda else "this torch was built without CUDA"
        raise ConfigError(f"--device cuda: {reason}; use --device cpu or leave it out")
    device: Device = DEVICES.get(name)()
    return device


def place(device: Device, option: str) -> str:
    """Where the model runs and why, for people: `the CPU: no CUDA device was found`."""
    where = device.where
    if option != "auto":
        return f"{where}: --device {option} was given"
    if device.name == "cuda":
        return f"{where}: --device auto takes a GPU where there is one"
    built = torch.version.cuda is not None
    return f"{where}: " + ("no CUDA device was found" if built else "torch has no CUDA support")


def resolve_dtype(option: str, checkpoint: str, device: Device) -> str:
    """Name of the type of weights and activations.

    Args:
        option: `--dtype`; `auto` means the checkpoint's, or the device's first choice if it
            cannot compute in that.
        checkpoint: Name of the checkpoint's type.
        device: Where the model runs.

    Raises:
        ConfigError: the device cannot compute in the type asked for.
    """
    if option != "auto":
        if option not in device.dtypes:
            raise ConfigError(
                f"--dtype {option} does not work on {device.name}: use auto, "
                + " or ".join(sorted(device.dtypes))
            )
        return option
    checkpoint = checkpoint.removeprefix("torch.")
    if checkpoint in device.dtypes:
        return checkpoint
    chosen = device.dtypes[0]
    logger.info("dtype = %s (%s does not compute in %s)", chosen, device.name, checkpoint)
    return chosen


def set_compile_cache() -> None:
    """Let torch keep what it compiles where `QUIRE_TORCH_COMPILE_CACHE_DIR` says.

    Raises:
        ConfigError: the folder cannot be made.
    """
    folder = envs.TORCH_COMPILE_CACHE_DIR
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"QUIRE_TORCH_COMPILE_CACHE_DIR {folder}: {error.strerror}") from None
    # The variable that torch itself reads, each time it compiles.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(folder)


def choose_kernels(device: Device) -> Ops:
    """The operations of a model on a device, which it keeps.

    On the CPU those of the process. Native ones read the host's memory, so other devices compute
    with kernels of their own, or with torch's.

    Raises:
        ConfigError: `QUIRE_KERNELS` names kernels for another device, or some that are not built.
    """
    return default_ops() if device.name == "cpu" else choose(device=device.name)


def set_torch_threads(hidden_size: int, generates: bool, ops: Ops) -> int:
    """Let kernels use the cores available to this process.

    A small model gets one thread: its operators take microseconds, and a second thread, which
    spins while it waits, costs more than it brings (ten times more on a busy machine). So does
    torch beside compiled kernels, which have threads of their own and leave it little to do in
    a model that generates.

    Returns:
        The number of threads of compiled kernels.
    """
    cores = available_cores() if hidden_size >= THREADED_HIDDEN_SIZE else 1
    cores = set_num_threads(cores)
    torch.set_num_threads(1 if generates and ops.name == "native" else cores)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            # Too late in a process whose program has used torch before; it costs little.
            logger.debug("torch's inter-operator threads are set already")
    return cores
