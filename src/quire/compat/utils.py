"""The small helpers of `vllm.utils` and `vllm.distributed` that scripts use."""

from __future__ import annotations

import asyncio
import gc
import socket
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final, TypeVar

T = TypeVar("T")

KiB_bytes: Final = 1 << 10
MiB_bytes: Final = 1 << 20
GiB_bytes: Final = 1 << 30


class Counter:
    """Numbers in ascending order, by `next()`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        value = self.counter
        self.counter += 1
        return value

    def reset(self) -> None:
        """Begin at 0 again."""
        self.counter = 0


def random_uuid() -> str:
    """A random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of `y` that is at least `x`."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """The largest multiple of `y` that is at most `x`."""
    return x // y * y


def is_list_of(value: object, typ: type, *, check: str = "first") -> bool:
    """Whether it is a list of `typ`: by its first entry, or with `check="all"` by all of them."""
    if not isinstance(value, list):
        return False
    looked_at = value if check == "all" else value[:1]
    return all(isinstance(entry, typ) for entry in looked_at)


def get_open_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def merge_async_iterators(
    *iterators: AsyncIterator[T],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of several iterators as they arrive, each with the index of its iterator."""
    waiting: dict[asyncio.Future[T], int] = {
        asyncio.ensure_future(anext(iterator)): index for index, iterator in enumerate(iterators)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = waiting.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(iterators[index]))] = index
                yield index, item
    finally:
        for future in waiting:
            future.cancel()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free unreferenced memory. There are no process groups to leave."""
    gc.collect()


def destroy_model_parallel() -> None:
    """Does nothing: the model runs in one process, so there are no groups to leave."""


def destroy_distributed_environment() -> None:
    """Does nothing: the model runs in one process, so there is no distributed environment."""


class _Platform:
    """What the model runs on, under the names of `vllm.platforms.current_platform`."""

    @property
    def device_type(self) -> str:
        """`cuda` if there is a GPU, else `cpu`."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """The same."""
        return self.is_cuda()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: False  # is_tpu, is_rocm, is_xpu: none of them
        raise AttributeError(f"quire's current_platform has no {name!r}")


current_platform: Final = _Platform()
