"""What is around a server and fails: its disk, its clock, its files, its descriptors, its memory.

For each, how it is prepared before the server starts (`Around`) and the driver that breaks it under
load. Drivers change only what they made: folders of the trial, limits of the server's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from live_server import QUIRE
from mixed_load import COMPLETIONS, Ask, client, run_one
from quire import assets
from quire.chaos.target import HttpTarget
from quire.chaos.vanishing import partial_requests

if TYPE_CHECKING:
    from conditions import Trial


@dataclass
class Around:
    """What a server is started with."""

    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    """For the driver."""


Surroundings = Callable[[Path], AbstractContextManager[Around]]


class Unavailable(Exception):
    """This machine does not allow the fault: no root, no compiler, no cgroups."""


# ---- disk ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Around]:
    """A file system of 512 KiB for all that a server writes: log, metrics, caches, temporary
    files."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "quire-chaos", str(disk)], capture_output=True
    )
    if mounted.returncode:
        raise Unavailable("a small file system needs root")
    try:
        log, config = disk / "log", folder / "logging.json"
        handler = {"class": "logging.FileHandler", "filename": str(log), "level": "INFO"}
        told = {
            "version": 1, "handlers": {"file": handler}, "disable_existing_loggers": False,
            "loggers": {"quire": {"handlers": ["file"], "level": "INFO"}},
        }  # fmt: skip
        config.write_text(json.dumps(told))
        names = ("TMPDIR", "XDG_CACHE_HOME", "HOME")
        env = {name: str(disk) for name in names} | {"QUIRE_LOGGING_CONFIG_PATH": str(config)}
        args = ("--tensorboard-dir", str(disk / "tb"), "--enable-log-requests")
        yield Around(args, env, {"disk": disk, "log": log})
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


async def fill_disk(trial: Trial, seconds: float) -> None:
    """Full, then read-only, then as before."""
    disk, log = trial.around.made["disk"], trial.around.made["log"]
    written = log.stat().st_size
    trial.must(written > 0, "nothing was logged to the small disk: the drill shows nothing")
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    full = log.stat().st_size
    await asyncio.sleep(seconds)
    trial.facts["log_bytes_while_full"] = log.stat().st_size - full
    # Files that are open stay writable, and full; whatever is opened by its path now is read-only.
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    with contextlib.suppress(OSError):
        filler.unlink()
    trial.must(filler.exists(), "the disk is not read-only: the drill shows nothing")
    await asyncio.sleep(seconds)
    subprocess.run(["umount", "-l", str(disk)], check=True)
    filler.unlink()
    before = log.stat().st_size
    await asyncio.sleep(seconds)
    trial.facts["log_bytes_afterwards"] = log.stat().st_size - before
    trial.must(log.stat().st_size > before, "nothing is logged any more once there is room")


# ---- clock ---------------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *at = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) offset = at;
  close(file);
}

int clock_gettime(clockid_t which, struct timespec *t) {
  int result = (int)syscall(SYS_clock_gettime, which, t);
  if (!result && offset && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
    t->tv_sec += *offset;
  return result;
}

int gettimeofday(struct timeval *t, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) { t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000; }
  return 0;
}

time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""
"""The wall clock with an offset, which is read from a file; the other clocks are untouched."""


@contextlib.contextmanager
def movable_clock(folder: Path) -> Iterator[Around]:
    """A clock that the driver can set, for the server and all it starts."""
    source, library, offset = folder / "clock.c", folder / "clock.so", folder / "offset"
    source.write_text(SHIM)
    offset.write_bytes(bytes(8))
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("a movable clock needs a C compiler")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    with offset.open("r+b") as file:
        clock = mmap.mmap(file.fileno(), 8)
        yield Around(
            env={"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offset)},
            made={"set": partial(struct.pack_into, "q", clock, 0)},
        )


JUMPS = (3600, -3600, 1, 86400, -86400, 0)
"""Seconds from the true time."""


async def jump_clock(trial: Trial, seconds: float) -> None:
    """Jumps to and fro, each while requests with a deadline run."""
    core, seen = trial.server.core(), []
    async with client(trial.server.url) as http:
        for jump in JUMPS:
            waiting = asyncio.create_task(_with_deadline(http))
            await asyncio.sleep(0.05)
            trial.around.made["set"](jump)
            reply = await waiting
            whole = reply.status_code == 200
            whole = whole and reply.json()["choices"][0]["finish_reason"] == "length"
            told = f"{reply.status_code} {reply.text[:80]!r} when the clock jumped by {jump} s"
            trial.must(whole, f"a request with a deadline of 60 s ended with {told}")
            later = await _with_deadline(http)
            seen.append(round(later.json()["created"] - time.time()))
            await asyncio.sleep(seconds / len(JUMPS))
    trial.facts["jumps_seen"] = seen
    moved = all(abs(a - b) <= 60 for a, b in zip(seen, JUMPS, strict=True))
    trial.must(moved, f"the server's clock shows {seen}, {JUMPS} were set: the drill shows nothing")
    trial.must(core == trial.server.core(), "the core was replaced")


async def _with_deadline(http: httpx.AsyncClient) -> httpx.Response:
    body = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Deadline-Ms": "60000"}
    return await http.post(COMPLETIONS, json=body, headers=headers)


# ---- weights -------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_weights(folder: Path) -> Iterator[Around]:
    """A copy of the embedded model, that the driver may break."""
    model = folder / "model"
    shutil.copytree(Path(assets.__file__).parent / "quire-demo", model)
    args = ("--model", str(model), "--served-model-name", "quire-demo")
    yield Around(args, made={"model": model, "folder": folder})


def _truncate(weights: Path) -> None:
    os.truncate(weights, weights.stat().st_size - 100)


def _cut_header(weights: Path) -> None:
    os.truncate(weights, 100)


def _flip_header(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    at = data.index(b'"shape":[') + 9
    data[at] ^= 1  # another digit
    weights.write_bytes(data)


def _flip_data(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[len(data) * 2 // 3] ^= 0x40
    weights.write_bytes(data)


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "truncated": (_truncate, (), "tensor"),
    "truncated within the header": (_cut_header, (), "model.safetensors"),
    "a bit of the header flipped": (_flip_header, (), "model"),
    "a bit of the data flipped, --verify": (_flip_data, ("--verify",), "model.safetensors"),
}
"""What is done to the file, the flags that notice it, and what the message must name."""


async def break_weights(trial: Trial, seconds: float) -> None:
    """Bad files at start are refused; what happens to the file afterwards harms nobody."""
    model, folder = trial.around.made["model"], trial.around.made["folder"]
    for number, (what, (spoil, flags, named)) in enumerate(BROKEN.items()):
        bad = folder / f"bad{number}"
        shutil.copytree(model, bad)
        spoil(bad / "model.safetensors")
        command = [*QUIRE, "serve", "--port", "0", "--model", str(bad), *flags]
        started = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            out, _ = await asyncio.wait_for(started.communicate(), 120)
        except TimeoutError:
            started.kill()
            out, _ = await started.communicate()
            trial.must(False, f"{what}: it was served")
            continue
        lines = out.decode().strip().splitlines() or [""]
        trial.facts[what] = f"exit code {started.returncode}: {lines[-1][:160]}"
        trial.must(started.returncode not in (0, None), f"{what}: exit code {started.returncode}")
        trial.must(named in lines[-1], f"{what}: {lines[-1][:200]!r} does not name {named!r}")
        trial.must("Traceback" not in out.decode(), f"{what}: a traceback was printed")
    core, weights = trial.server.core(), model / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 4096)
    await asyncio.sleep(seconds / 4)
    other = folder / "other"
    other.write_bytes(b"nothing of a model")
    other.replace(weights)
    await asyncio.sleep(seconds / 4)
    os.truncate(weights, 0)
    await asyncio.sleep(seconds / 4)
    weights.unlink()
    await asyncio.sleep(seconds / 4)
    trial.must(core == trial.server.core(), "the core was replaced")


# ---- descriptors ---------------------------------------------------------------------------------

HOGS = 200
"""Connections that do nothing and take descriptors."""


async def no_descriptors(trial: Trial, seconds: float) -> None:
    """A limit just above what is open, then connections that take the rest, then the old limit."""
    pid = trial.server.process.pid
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    api = psutil.Process(pid)
    trial.no_reply_is_allowed = trial.may_refuse = True
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (api.num_fds() + 32, old[1]))
    try:
        async with partial_requests(HttpTarget(trial.server.url, "quire-demo"), HOGS) as hogs:
            await asyncio.sleep(seconds)
            refused = sum(out.status == 503 for _, out in trial.load.done)
            trial.facts |= {"refused_with_503": refused, "livez": trial.server.status("/livez")}
            trial.must(refused > 0, "nobody got a 503")
            before, start = sum(api.cpu_times()[:2]), time.monotonic()
            trial.load.resting = trial.load.canary_rests = (
                True  # nothing is asked: what works now works in vain
            )
            await asyncio.sleep(3)
            busy = (sum(api.cpu_times()[:2]) - before) / (time.monotonic() - start)
            trial.facts |= {"connections": hogs, "api_cpu_without_descriptors": round(busy, 2)}
            trial.must(busy < 0.6, f"the API process is busy ({busy:.2f}) while it can do nothing")
            trial.load.resting = trial.load.canary_rests = False
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, old)
    back = trial.server.until("/readyz", 200, 15)
    trial.facts["seconds_until_back"] = back and round(back, 2)
    trial.must(back is not None, "it does not answer within 15 s, once there are descriptors again")
    await asyncio.sleep(1)


# ---- memory --------------------------------------------------------------------------------------


def _own_memory_group() -> Path | None:
    """This process's cgroup that limits memory; `None` if there is none that can be used."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if not kinds and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


class MemoryGroup:
    """A cgroup of the trial's own, below that of the harness, for the server's processes."""

    def __init__(self) -> None:
        parent = _own_memory_group()
        if parent is None:
            raise Unavailable("there is no memory cgroup")
        self.path = parent / f"quire-chaos-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise Unavailable(f"no cgroup can be made: {error.strerror}") from None
        names = ("memory.max", "memory.current") if self._is_v2 else _V1
        self._limit, self._used = (self.path / name for name in names)
        if not self._limit.exists():
            self.path.rmdir()
            raise Unavailable("the cgroup cannot limit memory")

    @property
    def _is_v2(self) -> bool:
        return (self.path / "cgroup.type").exists()

    def take(self, pid: int) -> None:
        """Move a process into it. What it held before is counted elsewhere."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def let_go(self, pid: int) -> None:
        """Move a process back to where this one's parent group is."""
        (self.path.parent / "cgroup.procs").write_text(str(pid))

    @property
    def used(self) -> int:
        """Bytes."""
        return int(self._used.read_text())

    def limit(self, size: int) -> None:
        """To bytes."""
        self._limit.write_text(str(size))

    @property
    def oom_kills(self) -> int:
        """Processes that the kernel ended."""
        events = self.path / ("memory.events" if self._is_v2 else "memory.oom_control")
        rows = dict(line.split() for line in events.read_text().splitlines())
        return int(rows.get("oom_kill", 0))

    def close(self) -> None:
        """Remove it; what is still in it goes to the parent."""
        for line in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self.path.parent / "cgroup.procs").write_text(line)
        with contextlib.suppress(OSError):
            self.path.rmdir()


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@contextlib.contextmanager
def memory_group(folder: Path) -> Iterator[Around]:
    """A cgroup for the server, whose limit the driver sets."""
    group = MemoryGroup()
    try:
        group.take(os.getpid())  # what is started from here on is counted in it
        yield Around(made={"group": group})
    finally:
        group.close()


async def press_memory(trial: Trial, seconds: float) -> None:
    """A limit of what is used, and clients that ask for more and more; then the limit goes. Where
    the kernel ends a process, that must be the core: it can be replaced."""
    group: MemoryGroup = trial.around.made["group"]
    group.let_go(os.getpid())  # the clients need memory as well
    await asyncio.sleep(1)
    group.limit(group.used + 24 * 2**20)
    at = time.monotonic()
    trial.rss_mib = 192  # the large requests are much larger than those of the load
    asking = asyncio.create_task(_ask_for_memory(trial, seconds))
    await asyncio.sleep(seconds)
    group.limit(2**40)
    await asking
    trial.struck.append((at, time.monotonic()))
    trial.facts |= {"oom_kills": group.oom_kills, "api_lives": trial.lives}
    trial.must(trial.lives, "the kernel ended the API process")


async def _ask_for_memory(trial: Trial, seconds: float) -> None:
    """Long prompts with log-probabilities, many at once."""
    body = {
        "prompt": [305] * 1500, "max_tokens": 200, "n": 4, "ignore_eos": True, "logprobs": 5,
        "prompt_logprobs": 5, "temperature": 1,
    }  # fmt: skip
    statuses: dict[str, int] = {}
    end = time.monotonic() + seconds

    async def work(http: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < end:
            out = await run_one(http, Ask("big", COMPLETIONS, body | {"seed": number}))
            statuses[str(out.status)] = statuses.get(str(out.status), 0) + 1
            trial.must(
                out.status in (200, 429, 503),
                f"a large request ended with {out.status} {out.error}",
            )

    async with client(trial.server.url) as http:
        await asyncio.gather(*(work(http, number) for number in range(24)))
    trial.facts["large_requests"] = statuses
