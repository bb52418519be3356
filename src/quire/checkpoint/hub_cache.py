"""The local cache of downloaded models, in the Hugging Face hub's own layout.

`<cache>/models--org--name/` holds `refs/<revision>` (a file with a commit), `snapshots/<commit>/`
(links to files) and `blobs/`. Every program that uses the hub shares it. This module only reads
folders: it neither imports the hub's library nor uses the network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.errors import ModelLoadError

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,200}")
DEFAULT_REVISION: Final = "main"
INDEXES: Final = {
    "safetensors": "model.safetensors.index.json",
    "pt": "pytorch_model.bin.index.json",
}
PATTERNS: Final = {"safetensors": "*.safetensors", "pt": "*.bin", "gguf": "*.gguf"}


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model in the cache."""

    name: str
    folder: Path
    bytes: int
    """Size of the files, each counted once."""
    revisions: tuple[str, ...]
    """Names of revisions, each followed by `@` and the beginning of its commit."""


def is_repo_id(name: str) -> bool:
    """Whether a name is spelled like a hub repository: `org/name`."""
    return bool(_REPO.fullmatch(name)) and ".." not in name and "--" not in name


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit id, which always means the same files."""
    return bool(revision and _COMMIT.fullmatch(revision))


def cache_folder(download_dir: str | None = None) -> Path:
    """Folder in which models are kept: `--download-dir`, or else the hub's own.

    That is `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
    """
    if download_dir is not None:
        return Path(download_dir)
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return _expanded(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def repo_folder(name: str, download_dir: str | None = None) -> Path:
    """Folder of a repository in the cache, whether it exists or not."""
    return cache_folder(download_dir) / f"models--{name.replace('/', '--')}"


def snapshot(name: str, revision: str | None, download_dir: str | None = None) -> Path | None:
    """Folder of a revision's files, if the cache has the revision. It is not necessarily complete.

    Raises:
        ModelLoadError: this cannot be the name of a revision.
    """
    revision = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelLoadError(f"--revision must be a branch, tag or commit, got {revision!r:.80}")
    repo = repo_folder(name, download_dir)
    commit = revision if is_commit(revision) else _read_ref(repo / "refs" / revision)
    if commit is None:
        return None
    folder = repo / "snapshots" / commit
    return folder if folder.is_dir() else None


def _read_ref(path: Path) -> str | None:
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.fullmatch(text) else None


def is_complete(folder: Path, load_format: str = "auto") -> bool:
    """Whether a snapshot has a configuration and all weight files of the format asked for."""
    formats = ("safetensors", "gguf") if load_format == "auto" else (load_format,)
    if load_format == "dummy":
        return (folder / "config.json").is_file()
    for kind in formats:
        if kind != "gguf" and not (folder / "config.json").is_file():
            continue
        index = folder / INDEXES.get(kind, "")
        if index.is_file():
            if all((folder / name).is_file() for name in _indexed(index)):
                return True
        elif any(path.is_file() for path in folder.glob(PATTERNS[kind])):
            return True
    return False


def _indexed(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [""]  # a folder is no file: the index counts as broken
    return [Path(str(name)).name for name in names] or [""]


def cached_models(download_dir: str | None = None) -> Iterator[CachedModel]:
    """The models in the cache, in order of their names."""
    for folder in sorted(cache_folder(download_dir).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if not is_repo_id(name) or not folder.is_dir():
            continue
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        yield CachedModel(
            name,
            folder,
            sum(path.stat().st_size for path in files),
            tuple(_revisions(folder)),
        )


def _revisions(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "refs").rglob("*")):
        commit = _read_ref(path) if path.is_file() else None
        if commit:
            yield f"{path.relative_to(folder / 'refs')}@{commit[:8]}"


def remove(name: str, download_dir: str | None = None) -> int:
    """Delete a model with all its revisions from the cache; returns the bytes freed.

    Raises:
        ModelLoadError: the cache does not have it, or it cannot be deleted.
    """
    found = next((m for m in cached_models(download_dir) if m.name == name), None)
    if found is None:
        raise ModelLoadError(f"there is no model {name!r} in {str(cache_folder(download_dir))!r}")
    try:
        shutil.rmtree(found.folder)
    except OSError as error:
        raise ModelLoadError(f"cannot delete {str(found.folder)!r}: {error.strerror}") from None
    return found.bytes
