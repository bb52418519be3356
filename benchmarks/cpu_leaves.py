"""What the tree over leaves costs: products of a layer with leaves and without, in turns.

    python benchmarks/cpu_leaves.py [--shape qwen2.5-0.5b] [--pairs N] [--json]
    python benchmarks/cpu_leaves.py --experts   a mixture: 64 experts, 8 per token

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
from quire.kernels.dispatch import choose
from quire.kernels.moe import ExpertWeights, Routing, route_experts

ROWS = (1, 8, 32, 512)
EXPERT_ROWS = (1, 8, 32, 256, 2048)


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


class Experts:
    """One mixture layer, its router left out."""

    SIZE, INNER, COUNT, TOP_K = 2048, 1024, 64, 8

    def __init__(self, has_leaves: bool) -> None:
        self._ops = choose("native")
        leaves = inner_leaves(self.INNER) if has_leaves else 1
        self._layers = [
            ExpertWeights(
                self._ops.prepare_linear(torch.randn(2 * self.INNER, self.SIZE).bfloat16()),
                self._ops.prepare_linear(
                    torch.randn(self.SIZE, self.INNER).bfloat16(), leaves=leaves
                ),
            )
            for _ in range(self.COUNT)
        ]

    def seconds(self, rows: int) -> float:
        """Processor time of the layer once, for rows that choose their experts evenly."""
        x = torch.randn(rows, self.SIZE, generator=torch.Generator().manual_seed(rows)).bfloat16()
        logits = torch.randn(rows, self.COUNT, generator=torch.Generator().manual_seed(rows))
        chosen = route_experts(logits, None, Routing(self.COUNT, self.TOP_K))
        start = time.process_time()
        self._ops.grouped_experts(x, *chosen, self._layers, self._ops.silu_and_mul)
        return time.process_time() - start


def compare(
    plain: Layers | Experts, tree: Layers | Experts, rows: int, pairs: int
) -> dict[str, float]:
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
    parser.add_argument("--experts", action="store_true", help="a mixture layer instead")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    isa, shape = choose_isa(), SHAPES[options.shape]
    set_num_threads(1)
    torch.set_num_threads(1)
    if options.experts:
        name, counts = "mixture", EXPERT_ROWS
        plain, tree = Experts(has_leaves=False), Experts(has_leaves=True)
    else:
        name, counts = options.shape, ROWS
        plain, tree = Layers(shape, has_leaves=False), Layers(shape, has_leaves=True)
    lines = [compare(plain, tree, n, max(8, options.pairs // (1 + n // 128))) for n in counts]
    if options.json:
        print(json.dumps({"isa": isa, "shape": name, "leaves": lines}))
        return
    print(f"isa {isa}, {name}, one thread")
    for line in lines:
        print("{:4} rows: {:.4f} ({:.4f} to {:.4f})".format(*line.values()))


if __name__ == "__main__":
    main()
