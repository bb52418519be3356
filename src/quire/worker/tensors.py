"""From the worker's numpy state to tensors on its device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.worker.device import Device

ToTensor = Callable[[np.ndarray], Tensor]


def to_tensor_on(device: Device) -> ToTensor:
    """What makes tensors of arrays: on a CPU they share an array's memory if it is contiguous.

    Settled once: a decoding step makes ten small tensors, and each look at the device would show.
    """
    where = device.torch_device
    if where.type == "cpu":
        return _on_host
    return lambda array: _on_host(array).to(where, non_blocking=True)


def _on_host(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
