"""Throughput, latency and queue for TensorBoard, as a `StatSink` that writes event files.

Facts are summed up where they arrive, and a thread writes one point per `INTERVAL`. If the disk is
full, writing ends with one warning, and the engine goes on.

Format: TFRecord frames (length, masked CRC-32C of it, bytes, masked CRC-32C of them) around
`tensorflow.Event` messages with simple values; see
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from quire.core.stats import IterationStats, StepStats
from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)

INTERVAL: Final = 2.0
"""Seconds between two points."""


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE: Final = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes; RFC 3720, appendix B.4."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def frame(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def event(wall_time: float, step: int, values: Mapping[str, float] | None = None) -> bytes:
    """An `Event` message with scalars by tag, or, without any, with the version of the file
    format."""
    head = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    if values is None:
        return head + _bytes_field(3, b"brain.Event:2")
    parts = (
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in values.items()
    )
    return head + _bytes_field(5, b"".join(parts))


class _Window:
    """What happened since the last point."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.preemptions = 0
        self.means: dict[str, tuple[float, int]] = {}

    def add(self, tag: str, value: float) -> None:
        total, count = self.means.get(tag, (0.0, 0))
        self.means[tag] = (total + value, count + 1)


class TensorBoardSink:
    """Writes points into a new event file of a folder.

    Args:
        folder: Created if it does not exist.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: str) -> None:
        name = f"events.out.tfevents.{int(time.time())}.quire.{os.getpid()}"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Unbuffered: what a full disk did not take must not come back at the end.
            self._file: BinaryIO | None = (Path(folder) / name).open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--tensorboard-dir {folder}: {error.strerror}") from None
        self._last = StepStats()
        self._window = _Window()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._write(event(time.time(), 0))
        self._at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """Take the facts of one step."""
        with self._lock:
            window = self._window
            if step is not None:
                self._last = step
                window.prompt_tokens += step.num_prompt_tokens
                window.preemptions += step.num_preempted
                window.add("step/seconds", step.step_seconds)
            if iteration is not None:
                window.generation_tokens += iteration.num_generation_tokens
                for value in iteration.time_to_first_token:
                    window.add("latency/time_to_first_token_seconds", value)
                for value in iteration.inter_token_latency:
                    window.add("latency/inter_token_seconds", value)
                for ended in iteration.finished:
                    window.add("latency/e2e_seconds", ended.e2e_time)

    def close(self) -> None:
        """Write the last point."""
        if self._done.is_set():
            return
        self._done.set()
        atexit.unregister(self.close)
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._done.wait(INTERVAL):
            self._point()
        self._point()
        if self._file is not None:
            self._file.close()

    def _point(self) -> None:
        now = time.monotonic()
        with self._lock:
            window, self._window, last = self._window, _Window(), self._last
        seconds, self._at = max(1e-6, now - self._at), now
        if not last.step:
            return
        values = {
            "throughput/prompt_tokens_per_second": window.prompt_tokens / seconds,
            "throughput/generation_tokens_per_second": window.generation_tokens / seconds,
            "requests/running": last.num_running,
            "requests/waiting": last.num_waiting,
            "requests/preemptions": window.preemptions,
            "kv_cache/usage": last.kv_cache_usage,
        }
        values |= {tag: total / count for tag, (total, count) in window.means.items()}
        self._write(event(time.time(), last.step, values))

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(frame(data))
            self._file.flush()
        except OSError as error:
            logger.warning("--tensorboard-dir: nothing more is written: %s", error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
