"""From the worker's numpy state to tensors on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.worker.device import Device


def to_device(array: np.ndarray, device: Device) -> Tensor:
    """An array as a tensor; on a CPU it shares the array's memory if that is contiguous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    where = device.torch_device
    return tensor if where.type == "cpu" else tensor.to(where, non_blocking=True)
