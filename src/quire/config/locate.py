"""From a model's name to its files: local folder, embedded model, local cache, hub.

`located()` runs once, when a command or an `LLM` starts. It resolves the revision to a commit, so
that every process of the engine, even one started much later, reads the same files.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.checkpoint import hub_cache
from quire.logger import get_logger

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.config.model import ModelConfig

logger = get_logger(__name__)


def located(config: EngineConfig) -> EngineConfig:
    """The configuration with model and tokenizer on this machine, downloaded if necessary.

    Raises:
        ModelLoadError: the model is not found, or cannot be downloaded.
    """
    model = config.model
    revision = _pinned(model, model.model, model.revision, model.load_format)
    tokenizer_revision = model.tokenizer_revision
    if model.tokenizer is not None:
        tokenizer_revision = _pinned(model, model.tokenizer, tokenizer_revision, "dummy")
    model = dataclasses.replace(model, revision=revision, tokenizer_revision=tokenizer_revision)
    return dataclasses.replace(config, model=model)


def _pinned(model: ModelConfig, name: str, revision: str | None, load_format: str) -> str | None:
    """The commit to read; for a folder, the revision unchanged."""
    if not model.is_remote(name):
        return revision
    folder = hub_cache.snapshot(name, revision, model.download_dir)
    if folder is not None and hub_cache.is_complete(folder, load_format):
        return folder.name
    from quire.checkpoint.hub import fetch

    return fetch(name, revision, model.download_dir, load_format, logger.info)
