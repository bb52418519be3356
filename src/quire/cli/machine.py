"""Checks of this machine for `quire doctor`. Each gives a verdict, what was found, and a remedy.

Reads files, tries a port and a connection; loads neither torch nor a model.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from quire import envs
from quire.cli.collect_env import collect
from quire.errors import QuireError
from quire.utils.math import human_bytes

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"
ENOUGH_MEMORY: Final = 2 * 2**30
ENOUGH_FILES: Final = 4096
HUB_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome."""

    name: str
    verdict: str
    """`ok`, `warn` or `fail`."""
    found: str
    remedy: str = ""


def check_machine(port: int) -> list[Check]:
    """Run all local checks; `port` is the one a server would listen on."""
    facts = collect()
    return [
        _environment(),
        _cpu(facts["cpu"]["features"], facts["kernels"]),
        _threads(facts["cpu"]["affinity"], facts["cpu"]["cgroup_cores"]),
        *_load(facts["cpu"]["affinity"]),
        _memory(facts["memory"]["available"], facts["memory"]["cgroup_limit"]),
        _packages(facts["packages"]),
        _files(),
        _port(port),
        _hub(),
        _gpu(),
    ]


def _environment() -> Check:
    try:
        envs.ensure_valid()
    except QuireError as error:
        return Check("environment", FAIL, error.message, "correct or unset the variable")
    idle = list(envs.without_effect())
    if idle:
        return Check("environment", WARN, "; ".join(idle), "unset what has no effect")
    return Check("environment", OK, "all variables are valid")


_ISAS: Final = (
    (("amx_bf16", "amx_int8", "avx512_bf16"), "AMX"),
    (("avx512_bf16",), "AVX-512 with bfloat16"),
    (("avx512f", "avx512bw", "avx512_vnni"), "AVX-512 with VNNI"),
    (("avx512f", "avx512bw"), "AVX-512"),
    (("avx2", "fma", "avx_vnni"), "AVX2 with AVX-VNNI"),
    (("avx2", "fma"), "AVX2"),
    (("asimd",), "NEON"),
)


def _cpu(features: list[str], kernels: str) -> Check:
    best = next((name for needed, name in _ISAS if set(needed) <= set(features)), None)
    found = f"{best or 'neither AVX2, AVX-512 nor NEON'}; QUIRE_KERNELS={kernels}"
    if best is None:
        return Check("cpu", WARN, found, "use a CPU with AVX2 or NEON; it works, but slowly")
    return Check("cpu", OK, found)


def _threads(usable: int | None, quota: float | None) -> Check:
    cores = usable or os.cpu_count() or 1
    found = f"{cores} cores usable" + (f", quota {quota:g}" if quota is not None else "")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    allowed = min(float(cores), quota or float(cores))
    if asked.isdecimal() and int(asked) > allowed:
        text = f"{found}, but OMP_NUM_THREADS={asked}"
        return Check("threads", WARN, text, f"OMP_NUM_THREADS={max(1, int(allowed))}, or unset it")
    if quota is not None and quota < cores:
        remedy = f"OMP_NUM_THREADS={max(1, int(quota))}: more threads than quota get throttled"
        return Check("threads", OK if asked else WARN, found, "" if asked else remedy)
    return Check("threads", OK, found)


def _load(usable: int | None) -> list[Check]:
    """Whether other processes keep the cores busy; no check if the system does not say."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return []
    cores = usable or os.cpu_count() or 1
    found = f"{load:.1f} threads want to run, on {cores} cores (mean of the last minute)"
    if load > cores:
        return [Check("load", WARN, found, "other work has the cores: steps will wait for one")]
    return [Check("load", OK, found)]


def _memory(available: int, limit: int | None) -> Check:
    least = min(available, limit) if limit else available
    found = f"{human_bytes(available)} available"
    found += f", control group limit {human_bytes(limit)}" if limit else ", no control group limit"
    if least < ENOUGH_MEMORY:
        remedy = "free memory or raise the limit; --gpu-memory-utilization bounds what is taken"
        return Check("memory", WARN, found, remedy)
    return Check("memory", OK, found)


def _packages(packages: dict[str, str | None]) -> Check:
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        return Check("packages", FAIL, f"missing: {', '.join(missing)}", "pip install quire")
    return Check("packages", OK, f"all {len(packages)} are installed")


def _files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} open files allowed"
    if 0 <= soft < ENOUGH_FILES:
        return Check("open files", WARN, found, f"ulimit -n {ENOUGH_FILES}: a stream needs one")
    return Check("open files", OK, found)


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            found = f"{port} is not available: {error.strerror}"
            return Check("port", WARN, found, "quire serve --port 0 picks a free one")
    return Check("port", OK, f"{port} is free")


def _hub() -> Check:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if offline:
        return Check("hub", OK, "HF_HUB_OFFLINE is set: only folders and the local cache are used")
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if url.scheme not in ("http", "https") or not url.hostname:
        return Check("hub", FAIL, f"HF_ENDPOINT={url.geturl()} is no URL", "https://HOST")
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return Check("hub", OK, f"{url.hostname}, through the proxy of HTTPS_PROXY (not tried)")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), HUB_SECONDS).close()
    except OSError as error:
        remedy = "folders work as before; HF_HUB_OFFLINE=1 saves the attempt, HF_ENDPOINT a mirror"
        reason = error.strerror or error
        return Check("hub", WARN, f"{url.hostname} cannot be reached: {reason}", remedy)
    return Check("hub", OK, f"{url.hostname} can be reached")


def _gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> Check:
    try:
        line = driver.read_text("utf-8").splitlines()[0]
    except (OSError, IndexError):
        return Check("gpu", OK, "no NVIDIA driver: the CPU is used")
    return Check("gpu", OK, " ".join(line.split()))
