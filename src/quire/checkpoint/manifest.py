"""Checksums of a model's files: from `SHA256SUMS`, or from the names of the blobs in the hub's
cache.

The manifest has the format of `sha256sum`: a digest, two spaces, and a name relative to the folder.
In the hub's cache, a file is a link to a blob, and the name of the blob is its SHA-256 (large
files) or its git blob id (small ones). So files there can be checked without a manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.errors import ModelLoadError

MANIFEST: Final = "SHA256SUMS"
CHUNK: Final = 2**20
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
_SHOWN: Final = 5

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A file and the digest it must have."""

    path: Path
    digest: str
    git: bool = False
    """Whether the digest is git's blob id and not a SHA-256."""


def model_files(model: Path) -> list[Path]:
    """The files of a model folder, or the only file of a model that is one file."""
    if model.is_file():
        return [model]
    return sorted(
        path
        for path in model.rglob("*")
        if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
    )


def write_manifest(model: Path, progress: Progress | None = None) -> Path:
    """Write the digests of a model's files to a manifest beside them.

    Raises:
        ModelLoadError: there is no such model, or a file cannot be read or written.
    """
    folder = model.parent if model.is_file() else model
    files = model_files(model)
    if not files:
        raise ModelLoadError(f"there is no model in {str(model)!r}")
    told = _Told(progress, files)
    lines = [f"{told.digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    try:
        (folder / MANIFEST).write_text("".join(lines), "utf-8")
    except OSError as error:
        raise ModelLoadError(f"cannot write {str(folder / MANIFEST)!r}: {error.strerror}") from None
    return folder / MANIFEST


def verify(model: Path, progress: Progress | None = None) -> int:
    """Check a model's files against their digests; returns how many were checked.

    Raises:
        ModelLoadError: files are missing or changed (all are named), weights have no digest, or
            there are no digests at all.
    """
    expected = list(_expected(model))
    if not expected:
        raise ModelLoadError(
            f"there are no checksums to verify {str(model)!r} with: write {MANIFEST} beside a good "
            "copy with `quire verify --write`"
        )
    missing = [e.path.name for e in expected if not e.path.is_file()]
    present = [e for e in expected if e.path.is_file()]
    told = _Told(progress, [e.path for e in present])
    changed = [e.path.name for e in present if told.digest(e.path, git=e.git) != e.digest]
    known = {e.path for e in expected}
    unknown = [path.name for path in model_files(model) if _is_weight(path) and path not in known]
    faults = (("changed", changed), ("missing", missing), ("without a checksum", unknown))
    said = "; ".join(f"{kind}: {_some(names)}" for kind, names in faults if names)
    if said:
        raise ModelLoadError(
            f"files of {str(model)!r} do not match their checksums ({said}): download them again"
        )
    return len(expected)


def _expected(model: Path) -> Iterator[Expected]:
    folder = model.parent if model.is_file() else model
    path = folder / MANIFEST
    if not path.is_file():
        yield from (e for file in model_files(model) if (e := _of_blob(file)) is not None)
        return
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        # The manifest comes with the download, so it must not make us read files elsewhere.
        if match is None or ".." in Path(match[2]).parts or Path(match[2]).is_absolute():
            raise ModelLoadError(
                f"{str(path)!r}, line {number}: expected a checksum and a file name"
            )
        if model.is_dir() or folder / match[2] == model:
            yield Expected(folder / match[2], match[1])


def _of_blob(path: Path) -> Expected | None:
    """The digest that the name of the blob behind a link states."""
    if not path.is_symlink():
        return None
    name = path.resolve().name
    if _SHA256.fullmatch(name):
        return Expected(path, name)
    return Expected(path, name, git=True) if _GIT.fullmatch(name) else None


def _is_weight(path: Path) -> bool:
    return path.suffix in (".safetensors", ".gguf", ".bin")


class _Told:
    """Computes digests and reports its progress."""

    def __init__(self, progress: Progress | None, files: list[Path]) -> None:
        self._progress = progress
        self._done = 0
        self._total = sum(path.stat().st_size for path in files)

    def digest(self, path: Path, *, git: bool = False) -> str:
        """SHA-256 of a file, or the git blob id of its content."""
        state = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
        if git:
            state.update(f"blob {path.stat().st_size}\0".encode())
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    state.update(chunk)
                    self._done += len(chunk)
                    if self._progress is not None:
                        self._progress(self._done, self._total)
        except OSError as error:
            raise ModelLoadError(f"cannot read {str(path)!r}: {error.strerror}") from None
        return state.hexdigest()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
