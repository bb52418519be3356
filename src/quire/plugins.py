"""Rows that installed distributions add to quire's tables.

A distribution offers a row by an entry point of the group `quire.plugins`. Its name says for which
table and under which name, its value says where:

    [project.entry-points."quire.plugins"]
    "policy.lifo" = "my_package.policies:Lifo"

Names and places are metadata: to look for them imports none of that code. They are looked for once
in a process, when a table is first asked for a name that it does not have, or for all its names.
The engine core, which is another process, looks for itself. `QUIRE_PLUGINS` limits what counts.

Knows the names of the tables and where they are, and nothing of what is in them.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from quire import envs
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.spelling import did_you_mean

logger = get_logger(__name__)

GROUP: Final = "quire.plugins"
TABLES: Final = {
    "policy": "quire.config.scheduler:POLICIES",
    "model": "quire.models.registry:MODELS",
    "verb": "quire.engine.verbs:VERBS",
    "route": "quire.serving.app:ROUTES",
    "load_format": "quire.config.model:FORMATS",
    "weight_format": "quire.layers.linear_method:WEIGHT_FORMATS",
    "output_parser": "quire.serving.parsing:PARSERS",
    "reasoning_parser": "quire.serving.parsing:REASONING_PARSERS",
    "attention_backend": "quire.attention.select:BACKENDS",
    "device": "quire.config.model:DEVICES",
    "kernels": "quire.kernels.dispatch:IMPLEMENTATIONS",
    "executor": "quire.executor.base:EXECUTORS",
    "draft_proposer": "quire.worker.proposer:PROPOSERS",
}
"""First part of an entry point's name, and the table it stands for."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A row that a distribution offers."""

    entry_point: str
    """Its whole name: `policy.lifo`."""
    target: str
    """`package.module:attribute`."""
    distribution: str
    """Name and version."""
    rival: Plugin | None = None
    """Another distribution's entry point of the same name: neither is taken."""

    def __str__(self) -> str:
        return f"entry point {self.entry_point} of {self.distribution}"


def plugins_of(table: str, built_in: Collection[str]) -> Mapping[str, Plugin]:
    """What distributions offer for a table, by name. One that has the name of a built-in row is
    left out, with a warning.

    Raises:
        ConfigError: `QUIRE_PLUGINS` names one that is not installed.
    """
    found = _all_plugins().get(table, {})
    taken = [plugin for name, plugin in found.items() if name in built_in]
    for plugin in taken:
        _warn(f"{plugin} is ignored: that name is quire's own")
    return {name: plugin for name, plugin in found.items() if plugin not in taken}


def check_wanted() -> None:
    """Make sure that what `QUIRE_PLUGINS` names is installed; nothing is looked for if it is unset.

    Raises:
        ConfigError: it is not.
    """
    if envs.PLUGINS is not None:
        _all_plugins()


def forget() -> None:
    """Look again at the next question: distributions were installed or removed."""
    _all_plugins.cache_clear()


@functools.cache
def _all_plugins() -> Mapping[str, Mapping[str, Plugin]]:
    """By table, then by name."""
    wanted = envs.PLUGINS
    missing = set(wanted or ())
    tables: dict[str, dict[str, Plugin]] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        distribution = entry.dist
        name = "" if distribution is None else distribution.name
        version = "" if distribution is None else distribution.version
        plugin = Plugin(entry.name, entry.value, f"{name} {version}")
        missing -= {entry.name, name}
        if wanted is not None and not {entry.name, name} & set(wanted):
            continue
        table, _, row = entry.name.partition(".")
        if table not in TABLES or not row:
            hint = did_you_mean(table, TABLES) or f"; there are: {', '.join(TABLES)}"
            _warn(f"{plugin} is ignored: its name must be TABLE.NAME{hint}")
            continue
        rows = tables.setdefault(table, {})
        first = rows.get(row)
        if first is not None and first != plugin:
            plugin = Plugin(first.entry_point, first.target, first.distribution, plugin)
        rows[row] = plugin
    if missing:
        raise ConfigError(
            f"QUIRE_PLUGINS names {', '.join(sorted(missing))}, which no installed distribution "
            f"offers as an entry point of {GROUP}"
        )
    return tables


@functools.cache
def _warn(sentence: str) -> None:
    """Once per process."""
    logger.warning("%s", sentence)
