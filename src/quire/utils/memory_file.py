"""Memory that has a descriptor: it lives as long as any process holds that, and has no name.

One process fills it and seals it: from then on nobody can change it, not even by a stray write, and
others may map it and trust what they find. Linux only (memfd_create(2), fcntl(2)); return values
say where it cannot be had. Knows nothing of contents.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path
from typing import Any, Final

from quire.utils.math import align_up

LARGE_PAGE: Final = 2 << 20
_NONE: Final = 0
# PROT_NONE
_FIXED: Final = 0x10
_NORESERVE: Final = 0x4000
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23
_COLLAPSE: Final = 25
# MAP_ and MADV_ constants that Python's mmap lacks, from asm-generic/mman-common.h
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


def create(name: str) -> int | None:
    """A descriptor of new, empty memory, closed in programs that this one runs; `None` where there
    is no such thing. `name` is what /proc shows."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # a sandbox may forbid it
        return None


def is_sealed(descriptor: int) -> bool:
    """Whether `seal` has succeeded on this memory, in whichever process."""
    import fcntl

    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return bool(seals & fcntl.F_SEAL_WRITE)


def seal(descriptor: int) -> None:
    """Forbid every change, for good.

    Raises:
        OSError: some process has it mapped in a way that could be written to.
    """
    import fcntl

    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def read_only(descriptor: int) -> int:
    """Another descriptor of the same memory, through which nothing can be mapped for writing.

    Raises:
        OSError: there is no /proc.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def _mmap(at: int, size: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    found = _libc().mmap(at or None, size, protection, flags, descriptor, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def map_memory(descriptor: int, size: int, offset: int = 0, writable: bool = False) -> int:
    """Map `size` bytes, until the process ends, where a large page may begin.

    They may lie behind the end of the memory; it has to grow before they are touched.

    Returns:
        The address.

    Raises:
        OSError: it cannot be mapped.
    """
    size = align_up(size, LARGE_PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    room = _mmap(0, size + LARGE_PAGE, _NONE, flags, -1, 0)
    address = align_up(room, LARGE_PAGE)
    if address > room:
        _libc().munmap(room, address - room)
    if address - room < LARGE_PAGE:
        _libc().munmap(address + size, LARGE_PAGE - (address - room))
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    _mmap(address, size, protection, mmap.MAP_SHARED | _FIXED, descriptor, offset)
    if not writable:
        _libc().madvise(address, size, _POPULATE_READ)  # or page by page, when they are read
    return address


def unmap(address: int, size: int) -> None:
    """Let go of the end of a mapping; whole pages."""
    if size:
        _libc().munmap(address, size)


def map_again(address: int, descriptor: int, size: int, offset: int) -> None:
    """Put a read-only mapping in the place of one of `map_memory`: same address, same contents.

    Raises:
        OSError: it cannot be mapped; the old mapping may be gone.
    """
    _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor, offset)
    _libc().madvise(address, size, _POPULATE_READ)


def take_large_pages(address: int, size: int) -> bool:
    """Have memory that is mapped there, and not used yet, lie on large pages.

    Whether the system gives large pages to memory with a descriptor is a setting of its own, and
    mostly off. But it makes them of small ones on demand (MADV_COLLAPSE, Linux 6.1), which is
    cheap as long as there is only one small page of each.

    Returns:
        False where that cannot be had.
    """
    libc = _libc()
    libc.madvise(address, size, mmap.MADV_HUGEPAGE)
    for page in range(address, address + size, LARGE_PAGE):
        ctypes.memset(page, 0, 1)
    if libc.madvise(address, size, _COLLAPSE) == 0:
        return True
    return _setting("shmem_enabled") in ("always", "within_size", "advise", "force")


def provide_pages(address: int, size: int) -> bool:
    """Have the system provide the whole pages within, as if they were written to; what they hold
    stays (MADV_POPULATE_WRITE, Linux 5.14).

    Returns:
        False where it does not.
    """
    if not sys.platform.startswith("linux"):
        return False
    start, end = align_up(address, mmap.PAGESIZE), (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    return end <= start or _libc().madvise(start, end - start, _POPULATE_WRITE) == 0


def private_memory_has_large_pages() -> bool:
    """Whether memory without a descriptor gets large pages here."""
    return _setting("enabled") in ("always", "madvise")


def _setting(name: str) -> str:
    """What is in brackets in a file such as `always [madvise] never`."""
    try:
        text = (_THP / name).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text.partition("[")[2].partition("]")[0]
