"""The examples of `docs/plugins.md`, as written."""

from __future__ import annotations

import re
from pathlib import Path

from distributions import Distributions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"


def section(title: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None, title
    return found.group(1)


def modules(title: str) -> dict[str, str]:
    """The modules of a section: blocks whose first line is their file's name."""
    blocks = re.findall(r"```python\n(# (\w+)\.py\n.*?)```", section(title), re.S)
    return {name: source for source, name in blocks}


def install(title: str, distributions: Distributions) -> None:
    """Install what a section shows."""
    (project,) = re.findall(r"```toml\n(.*?)```", section(title), re.S)
    name = "quire-" + title.split()[-1]
    distributions.install(name, modules(title), project)
