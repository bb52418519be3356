"""Random JSON schemas over everything that is enforced."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ["a", "b c", "été", "kind", "n/m", "x_1"]


def schema(rng: random.Random, depth: int = 2) -> Schema:
    """One schema whose values are finite and short."""
    makers = [integer, number, string, choice, boolean]
    if depth:
        makers += [record, record, array, either]
    return rng.choice(makers)(rng, depth)


def integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-200, 200)
    found: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 3000)}
    if rng.random() < 0.2:
        found = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40}
    if rng.random() < 0.2:
        found = {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0,
                 "maximum": 5000}  # fmt: skip
    return found


def number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([1, 2.5, 40])}


def string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)},
            {
                "type": "string",
                "pattern": rng.choice([r"^[a-c]{2,5}$", r"^\d{3}-\d{2}$", "^(x|yy)$"]),
            },
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
        ]
    )


def choice(rng: random.Random, depth: int) -> Schema:
    values = [1, -2.5, "one", "twö", None, True, {"a": [1]}, [], 'with "quotes" and \\']
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def record(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    found: Schema = {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        found["additionalProperties"] = {"type": "boolean"}
        found["maxProperties"] = len(names) + 2
        found["required"] = names
    return found


def array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        items = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": least,
            "maxItems": least + rng.randint(0, 3)}  # fmt: skip


def either(rng: random.Random, depth: int) -> Schema:
    if depth == 2 and rng.random() < 0.3:
        part = schema(rng, depth - 1)
        return {"$defs": {"part": part}, "type": "array", "items": {"$ref": "#/$defs/part"},
                "maxItems": 3}  # fmt: skip
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
