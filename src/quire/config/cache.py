"""The KV cache: block size, memory and prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.bounds import check_section
from quire.config.kv_dtypes import KV_CACHE_DTYPES, WINDOWED
from quire.errors import ConfigError

BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much memory holds keys and values, and in what units."""

    block_size: int = 16
    """Tokens per KV block: 8, 16, 32, 64 or 128."""
    gpu_memory_utilization: float = 0.92
    """Share of the memory free at start (device memory on a GPU, else RAM within the control
    group's limit) that weights and KV cache may use."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache; takes precedence over `--gpu-memory-utilization`. On a CPU the
    default is at most 4 GiB, or `VLLM_CPU_KVCACHE_SPACE` GiB."""
    num_gpu_blocks_override: int | None = None
    """Number of KV blocks, whatever the memory says (for tests and experiments)."""
    swap_space: float | None = None
    """GiB of the second KV tier: host memory, or a file with `--swap-dir`. Preempted requests are
    swapped out to it, and evicted prefixes are kept in it. Default: 4 with a GPU, else 0."""
    swap_dir: str | None = None
    """Folder for a file that is the second KV tier instead of memory. The file has no name and
    disappears with the process. If writing to it fails, preempted requests are recomputed."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of an equal prefix."""
    disable_hybrid_kv_cache_manager: bool = False
    """Keep the KV of all tokens in layers with a sliding window, too, instead of giving back the
    blocks that fell out of it."""
    kv_cache_dtype: str = "auto"
    """Type that keys and values are kept in: `auto` (the model's), `bfloat16`, `float16`, `fp8` or
    `fp8_e4m3`, `fp8_e5m2`, or `int8_per_token_head`, which has a scale for each token and head."""
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    """Layers that keep the model's type: their numbers, or `sliding_window` for all that have
    one."""
    prefix_caching_hash_algo: str = "sha256"
    """Hash of a block's content: `sha256`."""

    def __post_init__(self) -> None:
        skipped: Any = self.kv_cache_dtype_skip_layers
        if isinstance(skipped, (list, tuple)):
            texts = [str(one) if type(one) is int else one for one in skipped]
            object.__setattr__(self, "kv_cache_dtype_skip_layers", texts)
        check_section(self)
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"--block-size must be one of {sizes}, got {self.block_size}")
        if self.swap_dir is not None and not self.swap_space:
            raise ConfigError(
                f"--swap-dir {self.swap_dir} needs --swap-space, the size of the file in GiB"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"--kv-cache-dtype must be one of {', '.join(KV_CACHE_DTYPES)}, "
                f"got {self.kv_cache_dtype!r}"
            )
        for one in self.kv_cache_dtype_skip_layers:
            if one != WINDOWED and not (one.isascii() and one.isdigit()):
                raise ConfigError(
                    "--kv-cache-dtype-skip-layers takes numbers of layers and "
                    f"{WINDOWED!r}, got {one!r}"
                )
        if self.prefix_caching_hash_algo != "sha256":
            raise ConfigError(
                f"--prefix-caching-hash-algo must be sha256, got {self.prefix_caching_hash_algo!r}"
            )
