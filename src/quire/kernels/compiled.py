"""The compiled module: whether it is there, which instruction set and threads it uses.

The only place that imports `quire.kernels._native`. Knows no operation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
from typing import Any, Final

from quire import envs
from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)

REMEDY: Final = (
    "quire's native kernels are not built, so it runs on plain torch, which is much slower: "
    "install a C++17 compiler (Debian: apt install g++) and install quire again"
)


def _import() -> Any:
    if envs.KERNELS_FILE is not None:
        return _import_file(envs.KERNELS_FILE)
    try:
        return importlib.import_module("quire.kernels._native")
    except ImportError as error:
        logger.debug("no native kernels: %s", error)
        return None


def _import_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("quire.kernels._native", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name is not that of a compiled module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ConfigError(f"QUIRE_KERNELS_FILE={path} cannot be loaded: {error}") from error
    return module


lib: Final[Any] = _import()
"""The module, or `None`."""


ISAS: Final = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "portable")
"""All instruction sets, the fastest first on most processors (`csrc/isa.cpp`)."""


def available_isas() -> list[str]:
    """Instruction sets that the kernels can use here, best first; empty without the module."""
    return [] if lib is None else list(lib.isas())


def choose_isa() -> str:
    """Use what `QUIRE_CPU_ISA` says, or the best of the slower ones if this machine lacks it.

    Says so once. Without the variable: the best.
    """
    wanted = envs.CPU_ISA
    here = available_isas()
    if wanted == "auto":
        chosen = here[0]
    elif wanted in here:
        chosen = wanted
    else:
        slower = ISAS[ISAS.index(wanted) :]
        chosen = next(isa for isa in here if isa in slower)
        logger.warning("this machine cannot run %s kernels: using %s", wanted, chosen)
    lib.set_isa(chosen)
    return chosen


@functools.cache
def build() -> str:
    """A digest of the module's file: another build may add in another order."""
    path = getattr(lib, "__file__", None)
    if path is None:
        return "none"
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def set_num_threads(cores: int) -> int:
    """Let kernels use `cores` threads, or those that `QUIRE_CPU_OMP_THREADS_BIND` lists.

    Returns:
        The number of threads.

    Raises:
        ConfigError: the variable names a core that this process may not use.
    """
    bind = envs.CPU_OMP_THREADS_BIND
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if isinstance(bind, tuple):
        foreign = set(bind) - set(allowed)
        if foreign:
            raise ConfigError(
                f"QUIRE_CPU_OMP_THREADS_BIND names cores {sorted(foreign)}, but this process may "
                f"use only {allowed}",
                param="QUIRE_CPU_OMP_THREADS_BIND",
            )
        cores, cpus = len(bind), list(bind)
    else:
        # Bound threads must not share a core, so with fewer threads than cores nobody is bound.
        cpus = allowed if bind == "auto" and cores == len(allowed) else []
    if lib is not None and lib.num_threads() != cores:
        lib.set_num_threads(cores, cpus)
    return cores


def forbid_pages(address: int, size: int) -> bool:
    """Make whole pages crash whoever touches them; False where that cannot be had."""
    return lib is not None and bool(lib.forbid_pages(address, size))


if __name__ == "__main__" and lib is None:
    print(REMEDY)  # one message at install: pip hides what the build said
