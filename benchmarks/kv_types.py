"""How fast attention reads a KV cache of each type: decoding, many requests at a long context.

All types take turns in one run, because the machine's memory is not equally fast all the time; the
medians of the ratios to the model's own type are what to look at. With one thread it is processor
time, which other work on the machine disturbs less.

    python benchmarks/kv_types.py             # from memory
    python benchmarks/kv_types.py --threads 1 --requests 1 --context 1024 --calls 200  # from caches

`--calls` makes one time of so many calls, for contexts that take microseconds. `--ghz` says what a
cycle is, and tells the cycles of a token and pair of heads. `--sharp` makes queries so many times
as large, so that few positions have most of the weight.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from quire.attention.kv_cache import untouched_zeros
from quire.kernels import native_attention
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.cache_tensors import raw
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.kernels.kv_types import TAILS
from quire.utils.host import available_cores

KINDS = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}
BLOCK = 16


def fill(cache: torch.Tensor) -> None:
    """Numbers of its type, in the place of keys or values."""
    if cache.dtype.itemsize > 1:
        cache.normal_()
        return
    raw(cache).random_(0, 64)
    if tail := TAILS.get(cache.dtype, 0):  # scales behind the codes, as numbers about 1 have them
        cache[..., -tail:] = torch.tensor([0.03]).view(cache.dtype)


def caches(kind: torch.dtype, blocks: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Keys and values."""
    size = (blocks, BLOCK, heads, dim + TAILS.get(kind, 0))
    made = tuple(untouched_zeros(size, kind) for _ in range(2))  # on such pages as an engine's
    for cache in made:
        fill(cache)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=3, default=[14, 2, 64], metavar="N",
                        help="query heads, KV heads, dimensions of a head")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--calls", type=int, default=1, help="for one time")
    parser.add_argument("--sharp", type=float, default=1.0, help="times as large queries")
    parser.add_argument("--ghz", type=float, help="of a core; tells cycles")
    options = parser.parse_args()
    isa = choose_isa()
    set_num_threads(options.threads)
    heads, kv_heads, dim = options.heads
    blocks = -(-options.context // BLOCK)
    tables = [[1 + r * blocks + i for i in range(blocks)] for r in range(options.requests)]
    step = AttentionMetadata.build(
        [1] * options.requests, [options.context] * options.requests, tables, BLOCK
    )
    spec = AttentionSpec(dim**-0.5)
    q = (options.sharp * torch.randn(options.requests, heads, dim)).bfloat16()
    made = {
        name: caches(kind, 1 + options.requests * blocks, kv_heads, dim)
        for name, kind in KINDS.items()
    }
    clock = time.process_time if options.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, (keys, values) in made.items():
            start = clock()
            for _ in range(options.calls):
                native_attention.paged_attention(q, keys, values, step, spec)
            times[name].append((clock() - start) / options.calls)
    print(f"{options.requests} x {options.context}, {heads}/{kv_heads} heads of {dim}, {isa}")
    for name, (keys, _) in made.items():
        ratio = statistics.median(
            a / b for a, b in zip(times["bfloat16"], times[name], strict=True)
        )
        median = statistics.median(times[name])
        gib = 2 * keys.nbytes / median / 2**30
        cycles = ""
        if options.ghz:
            pairs = options.requests * options.context * kv_heads
            spent = min(times[name]) * options.threads * options.ghz * 1e9
            cycles = f"  {spent / pairs:5.1f} cycles at least for a token and pair of heads"
        print(f"{name:20} {median * 1e3:8.3f} ms  {gib:6.1f} GiB/s  {ratio:5.2f} x{cycles}")


if __name__ == "__main__":
    main()
