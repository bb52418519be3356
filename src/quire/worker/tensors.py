"""From the worker's numpy state to tensors on its device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.worker.device import Device

ToTensor = Callable[[np.ndarray], Tensor]


def to_tensor_on(device: Device) -> ToTensor:
    """A function that turns arrays into tensors on a device. On a CPU they share the array's memory
    if it is contiguous.

    The device is looked at once, because a decode step makes ten small tensors and a look for each
    would cost noticeable time.
    """
    where = device.torch_device
    if where.type == "cpu":
        return _on_host
    return lambda array: _on_host(array).to(where, non_blocking=True)


def _on_host(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
