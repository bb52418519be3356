"""Names for profilers: operations and layers as ranges in torch's profiler and in NVTX.

Off, it costs nothing: the tables of operations hold the bare functions. `follow()` is asked once
per step and puts wrappers around them while a profiler records, whoever has started it, or always
with `QUIRE_NVTX_LOGGING=1` on CUDA. Knows no operation and no model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.autograd import profiler as autograd_profiler

from quire import envs
from quire.kernels.dispatch import OPERATIONS, tables
from quire.logger import get_logger

logger = get_logger(__name__)

PREFIX: Final = "quire::"
"""Before the name of an operation, as torch writes `aten::`."""
_ORIGINAL: Final = "_quire_unnamed"
"""Not `__wrapped__`: an operation's own decorator has that, and must stay."""


class _Scopes:
    """Whether names are on, and where they go."""

    def __init__(self) -> None:
        self.is_on = False
        self.nvtx: Any = None
        """`torch.cuda.nvtx`, or what stands for it in a test."""


_scopes: Final = _Scopes()


def enable_nvtx(nvtx: Any = None) -> None:
    """Send names to NVTX if `QUIRE_NVTX_LOGGING` asks for it and there is a GPU.

    Args:
        nvtx: Has `range_push` and `range_pop`; torch's unless given.
    """
    _scopes.nvtx = None
    if not envs.NVTX_LOGGING:
        return
    if nvtx is None and not torch.cuda.is_available():
        logger.warning("QUIRE_NVTX_LOGGING has no effect: there is no CUDA device")
        return
    _scopes.nvtx = nvtx or torch.cuda.nvtx


def follow() -> None:
    """Switch names on or off, as profilers come and go. Nanoseconds if nothing has changed."""
    wanted = bool(autograd_profiler._is_profiler_enabled) or _scopes.nvtx is not None
    if wanted != _scopes.is_on:
        _scopes.is_on = wanted
        _wrap() if wanted else _unwrap()


def names_are_on() -> bool:
    """Whether each operation should be a call of its own, so that its name is seen."""
    return _scopes.is_on


def scope(name: str) -> AbstractContextManager[Any]:
    """A range of this name while names are on."""
    return _range(name) if _scopes.is_on else nullcontext()


def _range(name: str) -> AbstractContextManager[Any]:
    if _scopes.nvtx is None:
        return torch.profiler.record_function(name)
    return _Nvtx(name)


class _Nvtx:
    """A range in NVTX, and in torch's profiler, which may record at the same time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inner = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        _scopes.nvtx.range_push(self._name)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _scopes.nvtx.range_pop()


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _range(name):
            return function(*args, **options)

    setattr(call, _ORIGINAL, function)
    return call


def _wrap() -> None:
    for ops in tables():
        for name in OPERATIONS:
            function = ops.__dict__[name]
            if function is not None:  # some kernels lack what another way does as well
                ops.__dict__[name] = _named(PREFIX + name, function)


def _unwrap() -> None:
    for ops in tables():
        for name in OPERATIONS:
            function = ops.__dict__[name]
            ops.__dict__[name] = getattr(function, _ORIGINAL, function)
