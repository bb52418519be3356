"""Element types by their names in configurations: those quire computes with, and others that it
keeps.

Knows names and torch types, nothing of who uses them.
"""

from __future__ import annotations

from typing import Final

import torch

from quire.config.shape import KV_DTYPES
from quire.errors import ConfigError

TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a configuration name; a `torch.` prefix is allowed.

    Raises:
        ConfigError: quire does not compute with this type.
    """
    dtype = TORCH_DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {name!r}")
    return dtype


def stored_dtype(name: str) -> torch.dtype:
    """The torch type of a name of `config.shape.KV_DTYPES`."""
    dtype: torch.dtype = getattr(torch, name)
    assert dtype.itemsize == KV_DTYPES[name], f"{name} has another size in torch"
    return dtype
