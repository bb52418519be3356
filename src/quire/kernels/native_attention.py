"""Compiled attention and KV cache operations; the plain twins are in `reference.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

OPS: Final[dict[str, Callable[..., Any]]] = {}
"""Operations that replace those of the reference."""
