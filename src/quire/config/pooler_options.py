"""`--pooler-config`: a user's word on how a model pools, which wins over the model's files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from quire.checkpoint.sentence_transformers import POOLINGS
from quire.config.pooler_spec import PoolerSpec
from quire.errors import ConfigError

_KEYS: Final = (
    "pooling_type", "seq_pooling_type", "use_activation", "normalize", "dimensions",
    "is_matryoshka", "matryoshka_dimensions",
)  # fmt: skip


def pooler_config(**options: Any) -> dict[str, Any]:
    """vLLM's `PoolerConfig(...)`, for scripts: the value of the option `pooler_config`."""
    return {name: value for name, value in options.items() if value is not None}


def with_options(spec: PoolerSpec, options: dict[str, Any]) -> PoolerSpec:
    """A specification with the option's entries over it.

    Raises:
        ConfigError: an entry is unknown, or its value is not for this model.
    """
    for name in options:
        if name not in _KEYS:
            raise ConfigError(
                f"--pooler-config: unknown key {name!r}; known are {', '.join(_KEYS)}"
            )
    pooling = options.get("seq_pooling_type", options.get("pooling_type"))
    if pooling is not None:
        chosen = POOLINGS.get(str(pooling).lower())
        if chosen is None:
            allowed = ", ".join(dict.fromkeys(POOLINGS.values())).upper()
            raise ConfigError(
                f"--pooler-config: pooling_type must be one of {allowed}, got {pooling!r}"
            )
        spec = replace(spec, pooling=chosen)
    wanted = options.get("use_activation", options.get("normalize"))
    if wanted is not None:
        if not isinstance(wanted, bool):
            raise ConfigError(
                f"--pooler-config: use_activation must be true or false, got {wanted!r}"
            )
        spec = replace(spec, use_activation=wanted)
    return _cut(spec, options)


def _cut(spec: PoolerSpec, options: dict[str, Any]) -> PoolerSpec:
    """Lengths that embeddings may be cut to, and the one they are cut to."""
    listed = dimension_list(options.get("matryoshka_dimensions"))
    if listed or options.get("is_matryoshka"):
        spec = replace(
            spec, matryoshka=True, matryoshka_dimensions=listed or spec.matryoshka_dimensions
        )
    dimensions = options.get("dimensions")
    if dimensions is None:
        return spec
    if spec.task != "embed" or type(dimensions) is not int or not 1 <= dimensions <= spec.size:
        raise ConfigError(
            f"--pooler-config: dimensions must be from 1 to {spec.size}, the size of this model's "
            f"embeddings, got {dimensions!r}"
        )
    return replace(spec, dimensions=dimensions, matryoshka=True)


def dimension_list(value: object) -> tuple[int, ...]:
    """`matryoshka_dimensions` as it stands in a file or option; empty if it is missing.

    Raises:
        ConfigError: it is no list of positive numbers.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(v) is int and v > 0 for v in value):
        raise ConfigError(
            f"matryoshka_dimensions must be a list of positive numbers, got {value!r}"
        )
    return tuple(value)
