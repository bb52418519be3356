"""The limit on paper: seconds of a case below which no engine can be that computes all of it.

A step reads every weight of a product once, and the keys and values that its requests see. It does
two operations per weight and token (the head's only for tokens that are sampled), scales and adds
the sum of every group of codes, and does four operations per head, dimension and position that a
token sees. It takes as long as the longer of the two. A prompt is taken as one step: more would
read weights more often. For a mixture of experts it is too high, because a step may leave experts
out. Knows the machine by its `Rates` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.bench.engine.options import Case
from quire.kernels.probe import Rates

_GROUP: Final = re.compile(r"in groups of (\d+)")


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What quire has to do for a model, in the form in which it keeps it."""

    weight_bytes: int
    """Of all products, the head's included."""
    body: int
    """Weights that every token is multiplied with."""
    body_codes8: int
    """Of these, those that are multiplied as whole numbers of eight bits."""
    body_codes4: int
    """And of four."""
    body_groups8: int
    """Groups of these codes, each with a scale of its own."""
    body_groups4: int
    head: int
    """Weights of the head."""
    head_codes8: int
    head_codes4: int
    head_groups8: int
    head_groups4: int
    kv_bytes: int
    """Of a token's keys and values in all layers."""
    attention: int
    """Dimensions of all heads of queries in all layers."""


def codes_of(form: str) -> tuple[int, int] | None:
    """Bits of the codes that a layer kept in this form (`LinearMethod.form`) is multiplied as, and
    columns of a group, 0 if it has none. `None`: it is multiplied as floats."""
    if not form.startswith("int") or "products in" in form or "with float activations" in form:
        return None
    group = _GROUP.search(form)
    return 4 if form.startswith("int4") else 8, int(group[1]) if group else 0


def work_of(engine: Any) -> dict[str, int]:
    """The fields of `ModelWork`, of an `LLMEngine` whose core is in this process."""
    from quire.models.inspection import linears

    core, found = engine.core, dict.fromkeys(ModelWork.__slots__, 0)
    shape = core.executor.model.shape
    for linear in linears(core.executor.model):
        method = linear.method
        weights = method.spec.out_features * method.spec.in_features
        part = "head" if weights == shape.vocab_size * shape.hidden_size else "body"
        found["weight_bytes"] += method.nbytes
        found[part] += weights
        if (codes := codes_of(method.form)) is not None:
            bits, group = codes
            found[f"{part}_codes{bits}"] += weights
            found[f"{part}_groups{bits}"] += weights // group if group else 0
    info = core.info
    found["kv_bytes"] = info.kv_cache_bytes // (info.num_blocks * info.block_size)
    found["attention"] = shape.num_layers * shape.num_heads * shape.head_dim
    return found


def limit(case: Case, work: Mapping[str, int], rates: Rates) -> float:
    """Seconds of a whole case at these rates."""
    known = ModelWork(**work)
    seen = case.inputs * (case.inputs + 1) // 2
    total = _step(case.prompts, known, rates, tokens=case.inputs, seen=seen)
    for done in range(1, case.outputs):
        total += _step(case.prompts, known, rates, tokens=1, seen=case.inputs + done)
    return total


def decode_limit(requests: int, seen: int, work: Mapping[str, int], rates: Rates) -> float:
    """Seconds of a step that gives each request one token, which sees `seen` positions."""
    return _step(requests, ModelWork(**work), rates, tokens=1, seen=seen)


def _step(rows: int, work: ModelWork, rates: Rates, tokens: int, seen: int) -> float:
    """Of `tokens` new ones of each of `rows` prompts, which see `seen` positions together."""
    new = rows * tokens
    codes8 = work.body_codes8 * new + work.head_codes8 * rows
    codes4 = work.body_codes4 * new + work.head_codes4 * rows
    plain = work.body * new + work.head * rows - codes8 - codes4
    plain += 2 * work.attention * seen * rows
    groups8 = work.body_groups8 * new + work.head_groups8 * rows
    groups4 = work.body_groups4 * new + work.head_groups4 * rows
    computing = 2 * (
        plain / rates.multiply + codes8 / rates.multiply_codes8 + codes4 / rates.multiply_codes4
    )
    computing += groups8 * rates.seconds_per_group(8) + groups4 * rates.seconds_per_group(4)
    # A prompt's own keys and values are in caches while it is computed.
    kept = work.kv_bytes * seen * rows if tokens == 1 else 0
    return max(computing, (work.weight_bytes + kept) / rates.read)
