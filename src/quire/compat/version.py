"""`vllm.__version__`, as scripts compare it."""

from __future__ import annotations

from typing import Final

from quire.compat.modules import VLLM_VERSION

__version__: Final = VLLM_VERSION
__version_tuple__: Final = tuple(map(int, VLLM_VERSION.split(".")))
