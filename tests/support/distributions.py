"""Distributions for tests of plugins: modules and metadata in a folder, as `pip` leaves them."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from pathlib import Path

import pytest

from quire import plugins


class Distributions:
    """A folder on `sys.path`, here and in processes that this one starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._modules: list[str] = []
        monkeypatch.syspath_prepend(folder)
        inherited = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), inherited])))
        plugins.forget()

    def install(self, name: str, modules: dict[str, str], project: str) -> None:
        """A distribution of version 1.0.

        Args:
            name: Of the distribution.
            modules: Source by name.
            project: What it has in `pyproject.toml`, entry points among it.
        """
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(source, "utf-8")
            self._modules.append(module)
        info = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, "utf-8")
        groups = tomllib.loads(project)["project"]["entry-points"]
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines), "utf-8")
        importlib.invalidate_caches()
        plugins.forget()

    def remove(self) -> None:
        """Nothing of them stays in this process."""
        for module in self._modules:
            sys.modules.pop(module, None)
        plugins.forget()


def entry_points(**points: str) -> str:
    """The part of a `pyproject.toml` that offers rows; `__` stands for the dot."""
    rows = "".join(f'"{name.replace("__", ".", 1)}" = "{at}"\n' for name, at in points.items())
    return f'[project.entry-points."quire.plugins"]\n{rows}'
