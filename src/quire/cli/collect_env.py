"""`quire collect-env`: what a bug report should say about the machine and the installation.

Reads files and package metadata only, and does not import torch. Values of variables that hold keys
are not shown.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import quire
from quire import envs
from quire.cli.parser import Parser
from quire.utils.math import human_bytes

PACKAGES: Final = (
    "torch", "numpy", "msgspec", "tokenizers", "safetensors", "starlette", "uvicorn", "uvloop",
    "httptools", "jinja2", "prometheus_client",
)  # fmt: skip
FEATURES: Final = (
    "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm",
    "sve",
)  # fmt: skip
"""CPU features that matter to the kernels, as Linux spells them."""


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("collect-env", "Describe this machine and installation, for reports.")
    parser.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns the exit code."""
    namespace = build_parser().parse(arguments)
    facts = collect()
    if namespace.json:
        import json

        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return 0


def collect() -> dict[str, Any]:
    """All facts, as plain data."""
    return {
        "quire": quire.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "packages": {name: _version(name) for name in PACKAGES},
        "kernels": envs.KERNELS,
        "environment": _environment(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "features": [name for name in FEATURES if name in flags],
        "logical_cores": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "cgroup_cores": cgroup_cores(Path("/sys/fs/cgroup")),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    text = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "cgroup_limit": cgroup_bytes(Path("/sys/fs/cgroup")),
    }


def cgroup_cores(root: Path) -> float | None:
    """CPU quota of the control group in cores (cgroup v2 `cpu.max`, else v1); None: no limit."""
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if not quota:
        quota = _read(root / "cpu" / "cpu.cfs_quota_us")
        period = _read(root / "cpu" / "cpu.cfs_period_us")
    if not quota.isdecimal() or not period.isdecimal():  # "max", or -1
        return None
    return int(quota) / int(period)


def cgroup_bytes(root: Path) -> int | None:
    """Memory limit of the control group (v2 `memory.max`, else v1); None: no limit."""
    text = _read(root / "memory.max") or _read(root / "memory" / "memory.limit_in_bytes")
    # Version 1 says "no limit" with a huge number.
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _environment() -> dict[str, str]:
    """The variables that change how quire runs, without secrets."""
    prefixes = (*envs.PREFIXES, "OMP_", "MKL_", "TORCH_", "LD_PRELOAD")
    return {
        name: "(set)" if "KEY" in name or "TOKEN" in name else value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    cpu, memory = facts["cpu"], facts["memory"]
    limit = memory["cgroup_limit"]
    cores = f"{cpu['logical_cores']} logical, {cpu['affinity'] or 'all'} usable"
    if cpu["cgroup_cores"] is not None:
        cores += f", quota {cpu['cgroup_cores']:g}"
    rows = {
        "quire": facts["quire"],
        "python": facts["python"],
        "platform": facts["platform"],
        "cpu": cpu["model"],
        "cpu features": " ".join(cpu["features"]) or "none of those asked for",
        "cores": cores,
        "memory": f"{human_bytes(memory['total'])}, {human_bytes(memory['available'])} available",
        "memory limit": human_bytes(limit) if limit else "none",
        "kernels": facts["kernels"],
    }
    rows |= {name: version or "not installed" for name, version in facts["packages"].items()}
    rows |= facts["environment"]
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]
