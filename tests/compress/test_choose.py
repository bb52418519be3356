"""The choice against all choices there are."""

import itertools
import random

import pytest

from quire.compress.choose import Option, nearest, smallest
from quire.errors import ConfigError


def case(rng, layers=5):
    found = {}
    for i in range(layers):
        size = rng.randrange(100, 2000)
        int8 = rng.uniform(0, 0.01)
        found[str(i)] = {
            "plain": Option(2 * size, 0.0),
            "int8": Option(size, int8),
            "int4": Option(size // 2, int8 * rng.uniform(0.5, 40)),
        }
    return found


def every(options):
    for names in itertools.product(*(of for of in options.values())):
        chosen = dict(zip(options, names, strict=True))
        picked = [options[layer][name] for layer, name in chosen.items()]
        yield sum(o.nbytes for o in picked), sum(o.kld for o in picked)


def total(options, chosen):
    picked = [options[layer][name] for layer, name in chosen.items()]
    return sum(o.nbytes for o in picked), sum(o.kld for o in picked)


@pytest.mark.parametrize("seed", range(40))
def test_few_bytes_within_a_divergence(seed):
    rng = random.Random(seed)
    options, budget = case(rng), rng.uniform(0, 0.1)
    nbytes, kld = total(options, smallest(options, budget))
    best = min(b for b, k in every(options) if k <= budget)
    assert kld <= budget and nbytes <= 1.35 * best


@pytest.mark.parametrize("seed", range(40))
def test_little_divergence_within_bytes(seed):
    rng = random.Random(seed)
    options = case(rng)
    sizes = [b for b, _ in every(options)]
    memory = rng.randrange(min(sizes), max(sizes) + 1)
    nbytes, kld = total(options, nearest(options, memory))
    best = min(k for b, k in every(options) if b <= memory)
    assert nbytes <= memory and kld <= max(0.02, 3 * best)


def test_what_cannot_be():
    options = {"a": {"int8": Option(100, 0.5)}}
    with pytest.raises(ConfigError, match="--budget-kld 0.1 cannot be kept"):
        smallest(options, 0.1)
    with pytest.raises(ConfigError, match="at least 100 bytes, and there is room for 99"):
        nearest(options, 99)
