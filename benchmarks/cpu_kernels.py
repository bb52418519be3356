"""What each compiled kernel reaches of what this machine can do: a roofline, one row per kernel.

    python benchmarks/cpu_kernels.py [--shape qwen2.5-0.5b] [--threads N] [--json]

Every product has a weight of its own for each layer, so weights come from memory as in a step. The
roof of a row is its bytes at the measured read bandwidth or its operations at the measured rate of
products in registers (512 rows, the best of all shapes), whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from make_model import SHAPES

from quire.attention.metadata import AttentionMetadata
from quire.kernels import native_attention, native_linear, native_sampling
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.worker.host import available_cores

ROWS = (1, 8, 32, 128, 512)
BLOCK = 16


@dataclass
class Row:
    """A measured kernel."""

    kernel: str
    rows: int
    seconds: float
    bytes: float
    operations: float

    def roof(self, bandwidth: float, rate: float) -> float:
        """Seconds below which it cannot be."""
        return max(self.bytes / bandwidth, self.operations / rate)


def seconds_of(calls: list[Callable[[], object]], rounds: int = 5) -> float:
    """Median of single calls, all of them in turn."""
    for call in calls[:2]:
        call()
    taken = []
    for _ in range(rounds):
        for call in calls:
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bandwidth_of(threads: int) -> float:
    """Bytes per second that one row times a large weight reads, the best of many."""
    weight = native_linear.prepare_linear(torch.randn(65536, 1024).bfloat16())
    x = torch.randn(1, 1024).bfloat16()
    best = min(seconds_of([lambda: native_linear.linear(x, weight)], 3) for _ in range(8))
    return weight.memory.numel() / best


def products(shape: dict, layers: int) -> list[Row]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    dim = hidden // shape["num_attention_heads"]
    qkv = hidden + 2 * dim * shape["num_key_value_heads"]
    sizes = {
        "qkv": (qkv, hidden, False),
        "out": (hidden, hidden, False),
        "gate_up": (2 * inner, hidden, True),
        "down": (hidden, inner, False),
        "head": (shape["vocab_size"], hidden, False),
    }
    found = []
    for name, (n, k, gated) in sizes.items():
        count = 1 if name == "head" else layers
        made = [torch.randn(n, k).bfloat16() for _ in range(count)]
        weights = [native_linear.prepare_linear(w, gated=gated) for w in made]
        del made
        for rows in ROWS:
            if name == "head" and rows > 32:
                continue
            x = torch.randn(rows, k).bfloat16()
            call = native_linear.gated_linear if gated else native_linear.linear
            calls = [lambda w=w, x=x, call=call: call(x, w, keep="bench") for w in weights]
            moved = 2.0 * n * k + 2.0 * rows * (k + n)
            found.append(Row(name, rows, seconds_of(calls), moved, 2.0 * rows * n * k))
    return found


def attention(shape: dict, requests: int, query: int, context: int) -> Row:
    """`requests` with `query` new tokens each, at the end of `context` tokens."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["hidden_size"] // heads
    blocks = -(-context // BLOCK)
    tables = [[1 + r * blocks + i for i in range(blocks)] for r in range(requests)]
    step = AttentionMetadata.build([query] * requests, [context] * requests, tables, BLOCK)
    size = (1 + requests * blocks, BLOCK, kv_heads, dim)
    caches = [(torch.randn(size).bfloat16(), torch.randn(size).bfloat16()) for _ in range(4)]
    q = torch.randn(requests * query, heads, dim).bfloat16()
    spec = AttentionSpec(dim**-0.5)
    calls = [
        lambda k=k, v=v: native_attention.paged_attention(q, k, v, step, spec) for k, v in caches
    ]
    pairs = requests * (query * context - query * (query - 1) / 2)
    moved = 4.0 * requests * context * kv_heads * dim
    name = f"attention {requests} x {query} at {context}"
    return Row(name, requests * query, seconds_of(calls), moved, 4.0 * pairs * heads * dim)


def rest(shape: dict) -> list[Row]:
    """Norms and the search for the likeliest token."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    weight = torch.ones(hidden, dtype=torch.bfloat16)
    found = []
    for rows in (32, 512):
        x, y = torch.randn(rows, hidden).bfloat16(), torch.randn(rows, hidden).bfloat16()
        seconds = seconds_of([lambda x=x, y=y: native_linear.rms_norm_add(x, y, weight, 1e-6)], 50)
        found.append(Row("norm + residual", rows, seconds, 8.0 * rows * hidden, 0.0))
    for rows in (1, 32):
        logits = torch.randn(rows, vocab)
        seconds = seconds_of([lambda x=logits: native_sampling.finite_rows(x)], 20)
        found.append(Row("finite", rows, seconds, 4.0 * rows * vocab, 0.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape, isa = SHAPES[options.shape], choose_isa()
    set_num_threads(options.threads)
    torch.set_num_threads(1)
    bandwidth = bandwidth_of(options.threads)
    table = products(shape, shape["num_hidden_layers"])
    rate = max(row.operations / row.seconds for row in table)
    table += [attention(shape, 1, 512, 512), attention(shape, 4, 512, 4096)]
    table += [attention(shape, 32, 1, 256), attention(shape, 4, 1, 4096)]
    table += rest(shape)
    lines = [
        {
            "kernel": row.kernel,
            "rows": row.rows,
            "microseconds": round(row.seconds * 1e6, 1),
            "gb_per_second": round(row.bytes / row.seconds / 1e9, 1),
            "gflop_per_second": round(row.operations / row.seconds / 1e9),
            "fraction_of_roof": round(row.roof(bandwidth, rate) / row.seconds, 2),
        }
        for row in table
    ]
    head = {"isa": isa, "threads": options.threads, "shape": options.shape}
    head |= {"gb_per_second": round(bandwidth / 1e9, 1), "gflop_per_second": round(rate / 1e9)}
    if options.json:
        print(json.dumps(head | {"kernels": lines}))
        return
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for line in lines:
        print(
            "{:28} {:4d} rows {:10.1f} us {:6.1f} GB/s {:4d} GFLOP/s {:5.2f} of the roof".format(
                *line.values()
            )
        )


if __name__ == "__main__":
    main()
