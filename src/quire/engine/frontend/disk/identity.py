"""What a token depends on beside its request: the program, the weights, and where they compute.

A request from a journal goes on only where all of it is the same. Weights are told apart by samples
of their files, because to read all of a large model would take longer than to start it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quire import envs
from quire.config import EngineConfig
from quire.version import __version__

SAMPLE_BYTES: Final = 4096
SAMPLES: Final = 64
"""Of each file: its beginning, its end, and so many places in between."""
_SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".json", ".model", ".tiktoken")


def identity(config: EngineConfig, info: Mapping[str, Any]) -> dict[str, str]:
    """By what it is called in messages.

    Args:
        config: Of the engine, resolved.
        info: What its executor said of itself.
    """
    model, cache = config.model, config.cache
    return {
        "version of quire": __version__,
        "weights or tokenizer": _digest_of([model.folder, Path(model.tokenizer_folder)]),
        "dtype": str(info.get("dtype")),
        "device": f"{info.get('device')}: {info.get('place')}",
        "kernels": f"{info.get('kernels')} on {_processor()}",
        "quantisation": f"{model.quantization}, {json.dumps(model.quantization_config)}, "
        f"W4A8: {envs.CPU_INT4_W4A8}",
        "type of keys and values": f"{cache.kv_cache_dtype}, {cache.kv_cache_dtype_skip_layers}",
        "attention backend": str(model.attention_backend),
        "logits processors": repr(model.logits_processors),
        "overrides of the model": repr(sorted(model.hf_overrides.items())),
    }


def _digest_of(places: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in dict.fromkeys(places):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and (file == path or file.suffix in _SUFFIXES):
                digest.update(file.name.encode())
                _sample(file, digest)
    return digest.hexdigest()[:32]


def _sample(file: Path, digest: Any) -> None:
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        for at in sorted({last * i // SAMPLES for i in range(SAMPLES + 1)}):
            digest.update(os.pread(stream.fileno(), SAMPLE_BYTES, at))


def _processor() -> str:
    """The processor's instructions, which choose the kernels."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(line.encode()).hexdigest()[:16]
    except OSError:
        pass  # not Linux
    return os.uname().machine
