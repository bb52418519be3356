"""What the tree over leaves costs: products of a layer with leaves and without, in turns.

    python benchmarks/cpu_leaves.py [--shape qwen2.5-0.5b] [--pairs N] [--json]

Processor time of one thread, all products of all layers as in a step, each layer with weights of
its own. A line says how long the layers with leaves take, one without being 1: the median of all
pairs, and the interval that holds 95 % of the medians of pairs drawn again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from make_model import SHAPES

from quire.config.leaves import head_leaves, inner_leaves
from quire.kernels import native_linear
from quire.kernels.compiled import choose_isa, set_num_threads

ROWS = (1, 8, 32, 512)


class Layers:
    """Query, key and value, output, gate and up, down projections of all layers."""

    def __init__(self, shape: dict, has_leaves: bool) -> None:
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = hidden // heads
        leaves = (head_leaves(heads, kv_heads, dim), inner_leaves(inner)) if has_leaves else (1, 1)
        sizes = (
            (hidden + 2 * dim * kv_heads, hidden, False, 1),
            (hidden, hidden, False, leaves[0]),
            (2 * inner, hidden, True, 1),
            (hidden, inner, False, leaves[1]),
        )
        self._prepared = []
        for n, k, gated, count in sizes:
            weight = torch.randn(n, k).bfloat16()
            layers = range(shape["num_hidden_layers"])
            made = [native_linear.prepare_linear(weight, gated=gated, leaves=count) for _ in layers]
            self._prepared.append((gated, k, made))

    def seconds(self, rows: int) -> float:
        """Processor time of one step's products."""
        x = [torch.randn(rows, k).bfloat16() for _, k, _ in self._prepared]
        start = time.process_time()
        for index in range(len(self._prepared[0][2])):
            for given, (gated, _, layers) in zip(x, self._prepared, strict=True):
                call = native_linear.gated_linear if gated else native_linear.linear
                call(given, layers[index], keep="bench")
        return time.process_time() - start


def compare(plain: Layers, tree: Layers, rows: int, pairs: int) -> dict[str, float]:
    """The ratio with its interval; who goes first changes from pair to pair."""
    ratios = []
    for i in range(pairs + 2):
        first, second = (plain, tree) if i % 2 else (tree, plain)
        taken = {first: first.seconds(rows)}
        taken[second] = second.seconds(rows)
        ratios.append(taken[tree] / taken[plain])
    ratios = ratios[2:]  # pages and clocks settle
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(ratios, k=pairs)) for _ in range(1000))
    found = statistics.median(ratios), drawn[25], drawn[975]
    names = ("ratio", "low", "high")
    return {"rows": rows} | {n: round(v, 4) for n, v in zip(names, found, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    isa, shape = choose_isa(), SHAPES[options.shape]
    set_num_threads(1)
    torch.set_num_threads(1)
    plain, tree = Layers(shape, has_leaves=False), Layers(shape, has_leaves=True)
    lines = [compare(plain, tree, n, max(8, options.pairs // (1 + n // 128))) for n in ROWS]
    if options.json:
        print(json.dumps({"isa": isa, "shape": options.shape, "leaves": lines}))
        return
    print(f"isa {isa}, shape {options.shape}, one thread")
    for line in lines:
        print("{:4} rows: {:.4f} ({:.4f} to {:.4f})".format(*line.values()))


if __name__ == "__main__":
    main()
