"""What is simulated: a configuration, the sizes of its KV cache, and how long steps take.

Reads settings such as `max_num_batched_tokens=1024`. Knows no trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from quire.config import EngineConfig
from quire.config.cache import CacheConfig
from quire.config.engine import SECTIONS
from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError
from quire.sim.simulator import Pool
from quire.spelling import did_you_mean
from quire.utils.math import parse_size

SETTABLE: Final = {
    **dict.fromkeys((f.name for f in dataclasses.fields(SchedulerConfig)), "scheduler"),
    **dict.fromkeys((f.name for f in dataclasses.fields(CacheConfig)), "cache"),
    "max_model_len": "model",
}
"""Settings that a scenario may have, and their sections."""
_SIZED: Final = frozenset(
    {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_dtype",
     "block_size", "swap_space", "max_model_len", "disable_hybrid_kv_cache_manager"}
)  # fmt: skip
"""Those that change how many blocks there are, or what they hold."""


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `name=value` pairs.

    Raises:
        ConfigError: a name is unknown, or a value cannot be read.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in SETTABLE:
            raise ConfigError(
                f"--set: unknown setting {name!r}{did_you_mean(name, list(SETTABLE))}"
            )
        if not equals:
            raise ConfigError(f"--set wants name=value, got {pair!r}")
        found[name] = _read(name, text.strip())
    return found


def _read(name: str, text: str) -> Any:
    hint = get_type_hints(SECTIONS[SETTABLE[name]])[name]
    if hint is int or hint == (int | None):
        try:
            return parse_size(text)
        except ConfigError:
            pass
    try:
        return msgspec.convert(text.lower() if hint is bool else text, hint, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(
            f"--set {name}: {text!r} is no {getattr(hint, '__name__', hint)}"
        ) from None


def with_settings(config: EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration with some settings changed.

    Raises:
        ConfigError: a value is out of range.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        sections.setdefault(SETTABLE[name], {})[name] = value
    changed = {
        section: dataclasses.replace(getattr(config, section), **values)
        for section, values in sections.items()
    }
    return dataclasses.replace(config, **changed)


def changes_sizes(settings: Mapping[str, Any]) -> list[str]:
    """The settings with which the KV cache would have other sizes."""
    return sorted(_SIZED & settings.keys())


def recorded_config(said: dict[str, Any]) -> EngineConfig:
    """The configuration that a recording was made with.

    Raises:
        ConfigError: it is none, or one that no engine ran with.
    """
    config = EngineConfig.from_dict(said)
    if config.model.max_model_len is None:
        raise ConfigError("the recorded configuration has no model.max_model_len")
    return config


class _Said(msgspec.Struct):
    """Of `ExecutorInfo`, the sizes of the KV cache."""

    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    kv_windows: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)] | None, ...], msgspec.Meta(min_length=1)
    ]
    num_swap_blocks: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def pool_of(info: Mapping[str, Any]) -> Pool:
    """The KV cache that an engine said it has (`ExecutorInfo.to_dict`).

    Raises:
        ConfigError: it said something else.
    """
    try:
        said = msgspec.convert({name: info.get(name) for name in _Said.__struct_fields__}, _Said)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the recorded sizes of the engine's KV cache: {error}") from None
    return Pool(said.num_blocks, said.kv_windows, said.num_swap_blocks)
