"""Lists a repository on the Hugging Face hub and downloads what a model needs. The only module that
imports the hub's library.

The library reads `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` itself, and is imported
only when something must be downloaded. Every failure becomes a `ModelLoadError`. Knows the names of
files, but not their contents.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.checkpoint.hub_cache import cache_folder
from quire.errors import ModelLoadError
from quire.utils.math import human_bytes

SMALL: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "ice_text.model",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_*/config.json",
    "*_*/*.safetensors",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "adapter_config.json",
    "SHA256SUMS",
)
"""Files besides the weights that are downloaded if they exist."""
WEIGHTS: Final = {
    "safetensors": ("*.safetensors", "*.safetensors.index.json"),
    "gguf": ("*.gguf",),
    "pt": ("*.bin", "*.bin.index.json"),
    "dummy": (),
}
NOT_WEIGHTS: Final = ("training_args.bin", "consolidated*.safetensors", "optimizer.bin")
"""Second copies of weights, and leftovers of training; ignored if there is anything else."""
SPARE: Final = 64 * 2**20
"""Bytes that must stay free on the disk."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    size: int


def fetch(
    repo: str,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    tell: Tell = lambda text: None,
) -> str:
    """Download what a model needs into the cache; returns the commit.

    If the connection breaks, the download resumes where it stopped. `tell` is called with one
    sentence at the start and one at the end; the hub's own progress bars go to the terminal.

    Raises:
        ModelLoadError: the repository, revision or a file is missing; access is refused; the hub
            cannot be reached; the disk is full.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelLoadError(
            f"there is no folder {repo!r}, the cache in {str(cache_folder(download_dir))!r} does "
            "not have all of it, and HF_HUB_OFFLINE forbids downloading it"
        )
    with _faults(repo, revision), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's advice on symlinks and disk space
        from huggingface_hub import HfApi, hf_hub_download

        info = HfApi(endpoint=endpoint()).model_info(repo, revision=revision, files_metadata=True)
        files = [RemoteFile(f.rfilename, f.size or 0) for f in info.siblings or ()]
        chosen = choose(files, load_format, repo)
        cache = cache_folder(download_dir)
        missing = [f for f in chosen if not _there(cache, repo, str(info.sha), f)]
        size = sum(file.size for file in missing)
        check_space(cache, size, repo)
        tell(f"downloading {repo}: {len(missing)} files, {human_bytes(size)}, to {cache}")
        for file in missing:
            # By commit and not by branch: all files are then of one version, whatever is pushed
            # meanwhile.
            hf_hub_download(
                repo, file.name, revision=info.sha, cache_dir=cache, endpoint=endpoint()
            )
        _write_ref(cache, repo, revision or "main", str(info.sha))
        tell(f"downloaded {repo}, commit {info.sha}")
        return str(info.sha)


def choose(files: Sequence[RemoteFile], load_format: str, repo: str) -> list[RemoteFile]:
    """The files of a repository that a model needs, without a second copy of the weights.

    Raises:
        ModelLoadError: the repository has no weights of the format.
    """
    small = [file for file in files if _matches(file.name, SMALL)]
    formats = ("safetensors", "gguf") if load_format == "auto" else (load_format,)
    for kind in formats:
        every = [f for f in files if "/" not in f.name and _matches(f.name, WEIGHTS[kind])]
        # A repository may hold nothing but files that look like leftovers; then they are the model.
        weights = [f for f in every if not _matches(f.name, NOT_WEIGHTS)] or every
        if kind == "gguf" and _models_in(weights) > 1:
            names = ", ".join(file.name for file in weights[:8])
            raise ModelLoadError(
                f"{repo!r} has {len(weights)} GGUF files ({names}): download one and give its path"
            )
        if weights or kind == "dummy":
            return [*small, *(file for file in weights if file not in small)]
    hint = "; it has *.bin files: see --load-format pt" if _has(files, "*.bin") else ""
    raise ModelLoadError(f"the repository {repo!r} has no {' or '.join(formats)} weights{hint}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
    )


def _models_in(weights: Sequence[RemoteFile]) -> int:
    return sum("-of-" not in f.name or "-00001-of-" in f.name for f in weights)


def _has(files: Sequence[RemoteFile], pattern: str) -> bool:
    return any(_matches(file.name, (pattern,)) for file in files)


def check_space(folder: Path, size: int, repo: str) -> None:
    """Refuse a download that the disk cannot hold, before it begins.

    Raises:
        ModelLoadError: there is too little room.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size and size + SPARE > free:
        raise ModelLoadError(
            f"{repo!r} needs {human_bytes(size)} on the disk of {str(folder)!r}, which has "
            f"{human_bytes(free)} free: make room, or give --download-dir on another disk"
        )


def _there(cache: Path, repo: str, commit: str, file: RemoteFile) -> bool:
    path = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit / file.name
    return path.is_file() and path.stat().st_size == file.size


def _write_ref(cache: Path, repo: str, revision: str, commit: str) -> None:
    """Store which commit a branch or tag stood for, because the files were requested by commit."""
    if revision == commit:
        return
    path = cache / f"models--{repo.replace('/', '--')}" / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, "utf-8")


class _faults:
    """Turns exceptions of the hub's library into one sentence with a remedy."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self._repo = repo
        self._revision = revision or "main"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, ModelLoadError):
            raise ModelLoadError(self._sentence(error)) from None

    def _sentence(self, error: Exception) -> str:
        from huggingface_hub import errors

        where, repo = endpoint(), self._repo
        status = getattr(getattr(error, "response", None), "status_code", None)
        token = (
            "the token in HF_TOKEN gives no access to it"
            if os.environ.get("HF_TOKEN")
            else "HF_TOKEN is not set"
        )
        if isinstance(error, errors.GatedRepoError):
            return f"{repo!r} is a gated model of {where}: accept its terms there; {token}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{where} has no revision {self._revision!r} of {repo!r}"
        if isinstance(error, errors.EntryNotFoundError):
            return f"{where} lists a file of {repo!r} that it does not have: {_short(error)}"
        if status in (401, 403):
            return f"{where} refuses access to {repo!r} ({status}): {token}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"there is no folder {repo!r}, and {where} has no such model (or it is private: "
                f"{token})"
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"the disk is full: {repo!r} could not be stored; see --download-dir"
        return (
            f"cannot download {repo!r} from {where}: {type(error).__name__}: {_short(error)}. Try "
            "again, or give the folder of a model"
        )


def endpoint() -> str:
    """Address of the hub: `HF_ENDPOINT`, else the public one."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
