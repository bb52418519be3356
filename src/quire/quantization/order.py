"""Columns in the order of their groups (`desc_act`, `actorder`): groups are contiguous then, and
the activations are gathered instead. Knows no format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.quantization.scheme import LayerData


def sorted_columns(layer: LayerData, name: str, group: int, groups: int) -> Tensor | None:
    """Columns `[K]` sorted by the group that `layer[name]` `[K]` has for each, the first column
    first among equals; `None` if they stand so already.

    Raises:
        ModelLoadError: a group is not there, or has not as many columns as it must.
    """
    of_column = layer[name].to(torch.int64)
    low, high = int(of_column.min()), int(of_column.max())
    if low < 0 or high >= groups:
        raise layer.refuse(
            name, f"groups must be 0 to {groups - 1}, got {low if low < 0 else high}"
        )
    expected = torch.arange(layer.columns) // group
    if torch.equal(of_column, expected):
        return None
    order = of_column.sort(stable=True).indices
    if not torch.equal(of_column[order], expected):
        sizes = of_column.bincount(minlength=groups)
        wrong = int((sizes != expected.bincount(minlength=groups)).nonzero()[0])
        raise layer.refuse(
            name, f"a group has {group} columns, but group {wrong} has {int(sizes[wrong])}"
        )
    return order
