"""What each compiled kernel reaches of what this machine can do: a roofline, one row per kernel.

    python benchmarks/cpu_kernels.py [--shape qwen2.5-0.5b] [--threads N] [--json]

Every product has a weight of its own for each layer, so weights come from memory as in a step. The
roof of a row is its bytes at the speed of the memory or its operations at the speed of the
registers, whichever takes longer. Both are measured right before and after each row: the memory of
a shared machine is not equally fast for a minute. What stays in the caches can be above the roof of
the memory; nothing can be above that of the registers: then the figures are worth nothing, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from make_model import SHAPES

from quire.config.leaves import head_leaves, inner_leaves
from quire.kernels import native_attention, native_linear, native_sampling
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.attention_spec import AttentionSpec
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.kernels.probe import Probe, Rates
from quire.utils.host import available_cores

ROWS = (1, 8, 32, 128, 512)
BLOCK = 16
NOISE = 1.5
"""How much faster a machine may be in one moment than in the next."""


@dataclass
class Row:
    """A measured kernel."""

    kernel: str
    rows: int
    seconds: float
    bytes: float
    operations: float
    rates: Rates

    @property
    def roof(self) -> float:
        """Seconds below which it cannot be."""
        return max(self.bytes / self.rates.read, self.operations / self.rates.multiply)


class Clock:
    """Times kernels, and the machine beside them."""

    def __init__(self) -> None:
        self._probe = Probe()

    def row(
        self,
        kernel: str,
        rows: int,
        calls: list[Callable[[], object]],
        moved: float,
        operations: float,
        rounds: int = 5,
    ) -> Row:
        """The median of single calls, all of them in turn."""
        for call in calls[:2]:
            call()
        taken = []
        before = self._probe.measure(0.1)
        for _ in range(rounds):
            for call in calls:
                start = time.perf_counter()
                call()
                taken.append(time.perf_counter() - start)
        rates = before.mean(self._probe.measure(0.1))
        return Row(kernel, rows, statistics.median(taken), moved, operations, rates)


def products(clock: Clock, shape: dict, layers: int) -> list[Row]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = hidden // heads
    qkv = hidden + 2 * dim * kv_heads
    sizes = {
        "qkv": (qkv, hidden, False, 1),
        "out": (hidden, hidden, False, head_leaves(heads, kv_heads, dim)),
        "gate_up": (2 * inner, hidden, True, 1),
        "down": (hidden, inner, False, inner_leaves(inner)),
        "head": (shape["vocab_size"], hidden, False, 1),
    }
    found = []
    for name, (n, k, gated, leaves) in sizes.items():
        count = 1 if name == "head" else layers
        made = [torch.randn(n, k).bfloat16() for _ in range(count)]
        weights = [native_linear.prepare_linear(w, gated=gated, leaves=leaves) for w in made]
        del made
        for rows in ROWS:
            if name == "head" and rows > 32:
                continue
            x = torch.randn(rows, k).bfloat16()
            call = native_linear.gated_linear if gated else native_linear.linear
            calls = [lambda w=w, x=x, call=call: call(x, w, keep="bench") for w in weights]
            moved = 2.0 * n * k + 2.0 * rows * (k + n)
            found.append(clock.row(name, rows, calls, moved, 2.0 * rows * n * k))
    return found


def attention(clock: Clock, shape: dict, requests: int, query: int, context: int) -> Row:
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
    return clock.row(name, requests * query, calls, moved, 4.0 * pairs * heads * dim)


def rest(clock: Clock, shape: dict) -> list[Row]:
    """Norms and the search for the likeliest token."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    weight = torch.ones(hidden, dtype=torch.bfloat16)
    found = []
    for rows in (32, 512):
        x, y = torch.randn(rows, hidden).bfloat16(), torch.randn(rows, hidden).bfloat16()
        calls = [lambda x=x, y=y: native_linear.rms_norm_add(x, y, weight, 1e-6)]
        found.append(clock.row("norm + residual", rows, calls, 8.0 * rows * hidden, 0.0, 50))
    for rows in (1, 32):
        logits = torch.randn(rows, vocab)
        calls = [lambda x=logits: native_sampling.finite_rows(x)]
        found.append(clock.row("finite", rows, calls, 4.0 * rows * vocab, 0.0, 20))
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
    clock = Clock()
    table = products(clock, shape, shape["num_hidden_layers"])
    for requests, query, context in ((1, 512, 512), (4, 512, 4096), (32, 1, 256), (4, 1, 4096)):
        table.append(attention(clock, shape, requests, query, context))
    table += rest(clock, shape)
    lines = [
        {
            "kernel": row.kernel,
            "rows": row.rows,
            "microseconds": round(row.seconds * 1e6, 1),
            "gb_per_second": round(row.bytes / row.seconds / 1e9, 1),
            "gflop_per_second": round(row.operations / row.seconds / 1e9),
            "fraction_of_roof": round(row.roof / row.seconds, 2),
        }
        for row in table
    ]
    head = {"isa": isa, "threads": options.threads, "shape": options.shape}
    head |= {
        "gb_per_second": round(statistics.median(row.rates.read for row in table) / 1e9, 1),
        "gflop_per_second": round(statistics.median(row.rates.multiply for row in table) / 1e9),
    }
    if options.json:
        print(json.dumps(head | {"kernels": lines}))
        return _refuse_impossible(table)
    print(", ".join(f"{key} {value}" for key, value in head.items()))
    for line in lines:
        print(
            "{:28} {:4d} rows {:10.1f} us {:6.1f} GB/s {:4d} GFLOP/s {:5.2f} of the roof".format(
                *line.values()
            )
        )
    _refuse_impossible(table)


def _refuse_impossible(table: list[Row]) -> None:
    for row in table:
        reached = row.operations / row.seconds
        if reached > NOISE * row.rates.multiply:
            sys.exit(f"{row.kernel}, {row.rows} rows: faster than the registers; measure again")


if __name__ == "__main__":
    main()
