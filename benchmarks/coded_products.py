"""How fast the products of a step are with quantised weights, bf16 being 1.

    python benchmarks/coded_products.py [--shape qwen2.5-0.5b] [--rounds N] [--kinds int8 fp8 ...]

Processor time of one thread, all linear layers and the head of a model as in a step, each layer
with weights of its own; the kinds take turns, and a ratio is the median over rounds. int8 and int4
(groups of 32; int4_64 and int4_128) take activations as codes and an 8-bit head, the others bf16
activations and a bf16 head, as their checkpoints have it: fp8 one scale for each row, fp8_block
128 x 128, nf4 groups of 64.
`QUIRE_CPU_ISA` chooses the instruction set.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from make_model import SHAPES

from quire.config.leaves import head_leaves, inner_leaves
from quire.kernels import native_linear
from quire.kernels.coded import KINDS as CODES
from quire.kernels.coded import CodedWeight
from quire.kernels.compiled import choose_isa, set_num_threads
from quire.quantization.online import int4, int8

ROWS = (1, 8, 32, 512)
CODED = {"int8": 0, "int4": 32, "int4_64": 64, "int4_128": 128}
FLOATS = {
    "fp8": ("e4m3", 0),
    "fp8_block": ("e4m3", 128),
    "mxfp8": ("e4m3", 32),
    "mxfp4": ("e2m1", 32),
    "nvfp4": ("e2m1", 16),
    "nf4": ("nf4", 64),
}
"""Kinds of codes, and columns of a group; 0: all."""
KINDS = ("bf16", *CODED, *FLOATS)


class Layers:
    """All linear layers of a model, kept in one way."""

    def __init__(self, shape: dict, kind: str) -> None:
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = hidden // heads
        sizes = (
            (hidden + 2 * dim * kv_heads, hidden, False, 1),
            (hidden, hidden, False, head_leaves(heads, kv_heads, dim)),
            (2 * inner, hidden, True, 1),
            (hidden, inner, False, inner_leaves(inner)),
        )
        self._layers = []
        for _ in range(shape["num_hidden_layers"]):
            for n, k, gated, leaves in sizes:
                self._layers.append((_made(kind, n, k, gated, leaves), k, gated))
        head = "int8" if kind in CODED else "bf16"
        self._head = _made(head, shape["vocab_size"], hidden, False, 1)
        self._hidden = hidden

    def seconds(self, rows: int) -> float:
        """Processor time of one step's products; a prompt has one row of the head."""
        x = {k: torch.randn(rows, k).bfloat16() for k in {k for _, k, _ in self._layers}}
        start = time.process_time()
        for layer, k, gated in self._layers:
            call = native_linear.gated_linear if gated else native_linear.linear
            call(x[k], layer, keep="bench")
        native_linear.likeliest(x[self._hidden][: rows if rows < 128 else 1], self._head)
        return time.process_time() - start


def _made(kind: str, n: int, k: int, gated: bool, leaves: int):
    weight = torch.empty(n, k).normal_(std=0.02)
    if kind == "bf16":
        return native_linear.prepare_linear(weight.bfloat16(), gated=gated, leaves=leaves)
    if kind in FLOATS:
        coded = _floats(kind, n, k)
    else:
        coded = int4(weight, _group(CODED[kind], k, leaves)) if CODED[kind] else int8(weight)
    return native_linear.prepare_coded(coded, gated=gated, leaves=leaves, dtype=torch.bfloat16)


def _group(group: int, k: int, leaves: int) -> int:
    """The largest up to `group` that does not cross from one leaf to the next, as at load."""
    while k % (leaves * group):
        group //= 2
    return group


def _floats(kind: str, n: int, k: int) -> CodedWeight:
    """Any codes and scales: how long a product takes does not depend on them."""
    codes, group = FLOATS[kind]
    group = group or k
    scales = torch.rand(n, -(-k // group)) + 0.5
    if kind.startswith("mx"):
        scales = torch.exp2(scales.mul(8).round())
    if codes == "e4m3":
        numbers = torch.randint(0, 126, (n, k), dtype=torch.uint8).view(CODES[codes].dtype)
    else:
        numbers = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return CodedWeight(codes, numbers, scales, None, group, "float")


def measure(shape: dict, rounds: int, kinds: list[str], counts: list[int]) -> list[dict]:
    """One entry per number of rows."""
    made = {kind: Layers(shape, kind) for kind in ["bf16", *kinds]}
    found = []
    for rows in counts:
        taken: dict[str, list[float]] = {kind: [] for kind in made}
        for _ in range(rounds if rows < 100 else max(3, rounds // 4)):
            for kind, layers in made.items():
                taken[kind].append(layers.seconds(rows))
        plain = statistics.median(taken["bf16"])
        entry = {"rows": rows, "bf16_ms": 1000 * plain}
        for kind in kinds:
            ratios = [a / b for a, b in zip(taken["bf16"], taken[kind], strict=True)]
            entry[kind] = statistics.median(ratios)
        found.append(entry)
    return found


def main() -> None:
    """Print a line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=["int8", "int4"], choices=KINDS[1:])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    isa = choose_isa()
    set_num_threads(1)
    torch.set_num_threads(1)
    found = measure(SHAPES[given.shape], given.rounds, given.kinds, given.rows)
    if given.json:
        print(json.dumps({"shape": given.shape, "isa": isa, "rows": found}, indent=2))
        return
    print(f"{given.shape}, {isa}, 1 thread; times as fast as bf16\n")
    print(f"| rows | bf16, ms | {' | '.join(given.kinds)} |\n|{'---:|' * (2 + len(given.kinds))}")
    for entry in found:
        ratios = " | ".join(f"{entry[kind]:.2f}" for kind in given.kinds)
        print(f"| {entry['rows']} | {entry['bf16_ms']:.1f} | {ratios} |")


if __name__ == "__main__":
    main()
