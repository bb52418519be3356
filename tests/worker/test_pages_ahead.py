"""Pages of the KV cache are there before they are used, and no more of them than that."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading

import pytest
import torch

from patience import wait_for
from quire.attention.kv_cache import allocate_kv_cache
from quire.config.shape import LayerKV
from quire.kernels.cache_tensors import KVCache
from quire.utils import memory_file
from quire.worker import pages_ahead
from quire.worker.cache_blocks import CacheBlocks
from quire.worker.device import CpuDevice
from quire.worker.pages_ahead import PagesAhead

BLOCK = 16
MIB = 1 << 20
PAGE = mmap.PAGESIZE


def tensors(count: int = 8, blocks: int = 4096) -> list[torch.Tensor]:
    """Of 32 MiB each: 256 blocks fill a large page."""
    layers = [LayerKV(4, 32, 32)] * (count // 2)
    caches = allocate_kv_cache(layers, blocks, BLOCK, "float32", "cpu")
    return [tensor for cache in caches for tensor in cache]


def held(some: list[torch.Tensor]) -> int:
    """Bytes of these tensors that the system has provided. Of the whole process it would be others'
    as well: what earlier tests left is given back at any time."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for tensor in some:
        begin = tensor.data_ptr() // PAGE * PAGE
        pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // PAGE)
        there = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * PAGE), there) == 0
        total += sum(byte & 1 for byte in there) * PAGE
    return total


def faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def are_provided() -> bool:
    """Whether this system provides pages that it is asked for."""
    (one,) = tensors(2, 1024)[:1]
    return memory_file.provide_pages(one.data_ptr(), one.nbytes)


provided = pytest.mark.skipif(not are_provided(), reason="before Linux 5.14")


@provided
def test_memory_grows_a_little_ahead_of_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "AHEAD", 32 * MIB)  # 512 blocks
    some = tensors()
    before = held(some)
    pages = PagesAhead(some)
    pages.wait()
    assert 24 * MIB < held(some) - before < 64 * MIB
    pages.used(1500)
    pages.wait()
    assert 110 * MIB < held(some) - before < 180 * MIB
    pages.used(4095)
    pages.used(4095)
    pages.wait()
    assert held(some) - before > 240 * MIB
    assert not any(tensor.any() for tensor in some)


@provided
def test_who_writes_to_used_blocks_waits_for_no_page() -> None:
    """All blocks, in the order in which a cache gives them out."""
    some = tensors()
    caches = [KVCache(k, v) for k, v in zip(some[::2], some[1::2], strict=True)]
    blocks = CacheBlocks(caches, BLOCK, CpuDevice())
    pages = blocks._pages
    assert pages is not None
    waited = 0
    for block in range(0, 4096, 16):
        blocks.note_fresh(([], list(range(block, block + 16))), 0)
        pages.wait()  # a step takes longer than that
        before = faults()
        for tensor in some:
            tensor[block : block + 16] = 1.0
        waited += faults() - before
    blocks.forget()
    untouched = tensors()
    before = faults()
    for tensor in untouched:
        tensor.fill_(1.0)
    # What Python itself asks for is counted too, and pages that the system moves.
    all_of_them = faults() - before
    assert all_of_them > 60, "else this counts nothing"
    assert waited < all_of_them / 4


@provided
def test_what_is_in_a_page_stays() -> None:
    some = tensors(2)
    for number, tensor in enumerate(some):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + number)
    pages = PagesAhead(some)
    pages.used(4000)
    pages.wait()
    for number, tensor in enumerate(some):
        wanted = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + number
        assert torch.equal(tensor, wanted)


def test_pages_that_are_given_back_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that is still at work."""
    begun, go, asked = threading.Event(), threading.Event(), []

    def slow(at: int, size: int) -> bool:
        begun.set()
        asked.append(at)
        return go.wait(60)

    monkeypatch.setattr(pages_ahead, "provide_pages", slow)
    monkeypatch.setattr(pages_ahead, "AHEAD", 1 << 40)  # all blocks, in 16 stages
    keys, values = tensors(2)
    blocks = CacheBlocks([KVCache(keys, values)], BLOCK, CpuDevice())
    assert begun.wait(60)
    releasing = threading.Thread(target=blocks.release, args=(range(100, 4096),))
    releasing.start()
    pages = blocks._pages
    assert pages is not None
    try:
        wait_for(lambda: pages._provided == pages._wanted, "a stop")
    finally:
        go.set()
    releasing.join()
    assert len(asked) == 2, "what was under way"


def test_nothing_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def provides(at: int, size: int) -> bool:
        asked.append((at, size))
        return True

    monkeypatch.setattr(pages_ahead, "provide_pages", provides)
    some = tensors(2)
    pages = PagesAhead(some)
    for block in (0, 5, 100, 3000, 2000, 0, 4095, 4095):
        pages.used(block)
        pages.wait()
    for tensor in some:
        first = tensor.data_ptr()
        mine = sorted(a for a in asked if first <= a[0] < first + tensor.nbytes)
        assert mine[0][0] == first and sum(size for _, size in mine) == tensor.nbytes
        assert all(a[0] + a[1] == b[0] for a, b in zip(mine, mine[1:], strict=False))


@pytest.mark.parametrize("fails", ["system", "thread"])
def test_where_pages_cannot_be_had_ahead_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    asked: list[int] = []

    def refuses(at: int, size: int) -> bool:
        asked.append(at)
        return False

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pages_ahead, "provide_pages", refuses)
    if fails == "thread":
        monkeypatch.setattr(threading.Thread, "start", none_left)
    pages = PagesAhead(tensors(4))
    pages.wait()
    for block in (100, 4000):
        pages.used(block)
        pages.wait()
    assert len(asked) == (1 if fails == "system" else 0)


def test_a_step_never_waits_for_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    was_in_time: list[bool] = []

    def waits(at: int, size: int) -> bool:
        was_in_time.append(go.wait(60))
        return True

    monkeypatch.setattr(pages_ahead, "provide_pages", waits)
    pages = PagesAhead(tensors(2))
    for block in range(4096):
        pages.used(block)
    go.set()
    pages.wait()
    assert all(was_in_time) and len(was_in_time) == 32


@pytest.mark.parametrize(("address", "size"), [(1, 4096), (4097, 4094), (4096, 0)])
def test_less_than_a_page_is_none(address: int, size: int) -> None:
    assert memory_file.provide_pages(address, size) is (sys.platform == "linux")


ENDS = """
import atexit, threading
import torch
from quire.worker import pages_ahead

calls, begun, hold = [], threading.Event(), threading.Event()
def provide(address, size):
    calls.append(threading.current_thread().daemon)
    begun.set()
    hold.wait(30)  # until the program ends
    return True
pages_ahead.provide_pages = provide
pages = pages_ahead.PagesAhead([torch.empty(1 << 14, 1 << 12, dtype=torch.uint8)])
pages.used(1 << 13)
begun.wait(30)
threading.Thread(target=lambda: (threading.main_thread().join(), hold.set())).start()
atexit.register(lambda: print([t.name for t in threading.enumerate()], calls))
"""


def test_a_program_that_ends_waits_for_what_is_under_way_alone() -> None:
    """The interpreter would end the thread within the call, and with it perhaps the process."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "['MainThread'] [False]\n", done
