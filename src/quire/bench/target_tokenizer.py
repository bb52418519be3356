"""The tokenizer of the model behind a server, if it is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.errors import QuireError
from quire.tokenizer.tokenizer import Tokenizer


def local_folder(name: str) -> Path | None:
    """The folder of a model, if it is on this machine: a path, an embedded model, or one in the
    hub's cache. Nothing is downloaded."""
    from quire.config.model import ModelConfig

    try:
        folder = ModelConfig(model=name).folder
    except (QuireError, ValueError):
        return None
    return folder if folder.exists() else None


def find_tokenizer_of(names: Sequence[str | None]) -> tuple[Tokenizer, str] | None:
    """The first of these models whose tokenizer is here, and its name."""
    for name in filter(None, names):
        folder = local_folder(name)
        if folder is None:
            continue
        try:
            return Tokenizer.from_folder(folder), name
        except QuireError:
            continue
    return None
