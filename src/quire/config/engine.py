"""The tree of sections, and `resolve`, which settles what was left open.

`resolve()` returns a new tree and the list of decisions it made; nothing changes a section
afterwards. Numbers that depend on memory (KV blocks) are settled by the worker, which can measure
it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.checkpoint.config_files import as_object, read_json
from quire.config import neutral
from quire.config.cache import CacheConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.pooling import read_pooler
from quire.config.recovery import RecoveryConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ServerConfig
from quire.config.shape import ModelShape
from quire.errors import ConfigError
from quire.spelling import did_you_mean

SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "observability": ObservabilityConfig,
    "recovery": RecoveryConfig,
}
"""Fields of `EngineConfig` and their classes."""


_OFF: Final = {"shutdown_timeout": 0}
# Values of options of servers that ask for nothing where there is no server. It is vLLM's default,
# so scripts for vLLM may pass it.


@dataclass(frozen=True, slots=True)
class Decision:
    """One automatic choice, for the log at start and for later questions."""

    what: str
    chose: str
    why: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine core needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build the tree from flat options named like the fields.

        Raises:
            ConfigError: an option is unknown (the nearest name is offered) or has a bad value, or
                asks for something that quire does not do.
        """
        owner = {f.name: s for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)}
        servers = {f.name: f.default for f in dataclasses.fields(ServerConfig)}
        given: dict[str, dict[str, Any]] = {s: {} for s in SECTIONS}
        for name, value in options.items():
            row = neutral.row(name)
            if name in owner:
                if value is not None:  # `None` is how scripts for vLLM leave an option open
                    given[owner[name]][name] = value
            elif row is not None and not row.server:
                neutral.check(row, value)
            elif row is None and name not in servers:
                raise ConfigError(_unknown(name, list(owner)))
            elif value is not None and value not in (servers.get(name), _OFF.get(name)):
                raise ConfigError(f"{name} is an option of servers: give it to `quire serve`")
        return cls(**{s: kind(**given[s]) for s, kind in SECTIONS.items()})

    def resolve(self, shape: ModelShape) -> tuple[EngineConfig, list[Decision]]:
        """Settle what depends on the model's shape.

        Raises:
            ConfigError: an option contradicts the model or another option.
        """
        decisions: list[Decision] = []
        self.model.online_plan(shape)  # refuses what contradicts the checkpoint
        pooler = read_pooler(self.model, shape)
        most = pooler.max_positions if pooler else shape.length_limit
        limit = min(shape.length_limit, most)
        length = self.model.max_model_len
        if length is None:
            usual = (pooler and pooler.max_seq_length) or shape.default_length
            length = min(limit, usual)
            decisions.append(Decision("max_model_len", str(length), "from the model's config"))
        elif length > limit:
            raise ConfigError(
                f"--max-model-len {length} is more than the {limit} positions of the model's config"
            )
        scheduler, cache = self.scheduler, self.cache
        if pooler is not None and pooler.whole_prompts:
            scheduler, cache = _for_whole_prompts(scheduler, cache, length, decisions)
        if scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
            seqs = scheduler.max_num_batched_tokens
            scheduler = dataclasses.replace(scheduler, max_num_seqs=seqs)
            decisions.append(
                Decision(
                    "max_num_seqs",
                    str(seqs),
                    "each running request needs a token of --max-num-batched-tokens",
                )
            )
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < length:
            raise ConfigError(
                "without chunked prefill a whole prompt must fit one step: "
                f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is less than "
                f"--max-model-len {length}"
            )
        runner = "generate" if pooler is None else "pooling"
        if runner != self.model.runner:
            decisions.append(Decision("runner", runner, "from the model's config"))
        model = dataclasses.replace(self.model, max_model_len=length, runner=runner)
        resolved = dataclasses.replace(self, model=model, scheduler=scheduler, cache=cache)
        return resolved, decisions

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for messages and reports."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: that did not write it, or the one of another version.
        """
        return cls(
            **{name: _section(name, kind, data.get(name)) for name, kind in SECTIONS.items()}
        )


def _section(name: str, kind: Any, given: Any) -> Any:
    again = "another version of quire wrote it, so record it again, or use that version"
    if not isinstance(given, dict):
        raise ConfigError(f"the recorded configuration has no settings {name!r}: {again}")
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [setting for setting in given if setting not in known]:
        raise ConfigError(
            f"the recorded configuration has an unknown setting {name}.{unknown[0]}: {again}"
        )
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"the recorded configuration's {name}: {error}") from None


def _for_whole_prompts(
    scheduler: SchedulerConfig, cache: CacheConfig, length: int, decisions: list[Decision]
) -> tuple[SchedulerConfig, CacheConfig]:
    """Settings for an encoder, which computes a prompt in one step and has no KV cache to reuse.

    Raises:
        ConfigError: an option asks for prompts to be split.
    """
    if scheduler.long_prefill_token_threshold or scheduler.long_prefill_token_threshold_adaptive:
        raise ConfigError(
            "--long-prefill-token-threshold cannot be used with an encoder: its prompts are "
            f"computed whole, got {scheduler.long_prefill_token_threshold}"
        )
    decisions.append(Decision("enable_prefix_caching", "off", "an encoder has no KV cache"))
    budget = max(scheduler.max_num_batched_tokens, length)
    if budget != scheduler.max_num_batched_tokens:
        why = "a prompt of an encoder is computed in one step"
        decisions.append(Decision("max_num_batched_tokens", str(budget), why))
    scheduler = dataclasses.replace(
        scheduler, max_num_batched_tokens=budget, enable_chunked_prefill=False
    )
    return scheduler, dataclasses.replace(cache, enable_prefix_caching=False)


def _unknown(name: str, known: list[str]) -> str:
    return f"unknown option {name!r}{did_you_mean(name, known)}"


def read_generation_config(model: ModelConfig) -> dict[str, Any]:
    """Default sampling parameters of a model: its `generation_config.json`, then overrides.

    Raises:
        ModelLoadError: the file is not a JSON object.
        ConfigError: `--generation-config` names a folder without the file.
    """
    defaults: dict[str, Any] = {}
    if model.generation_config != "vllm":
        auto = model.generation_config == "auto"
        folder = model.folder if auto else Path(model.generation_config)
        path = folder / "generation_config.json"
        if path.exists():
            defaults = as_object(read_json(path), path)
        elif not auto:
            raise ConfigError(f"--generation-config: there is no {str(path)!r}")
    return {**defaults, **model.override_generation_config}
