"""No module needs itself, by whatever way it imports: the graph of imports has no circle.

An import that only a type checker reads, or that waits inside a function, counts like any other.
Such imports let a circle run, but whoever reads one of its modules still has to read them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src"


def modules_under(root: Path) -> dict[str, Path]:
    """Files by the name they are imported under."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules that a file names in import statements, at any depth of its code."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])])
            base = base if node.level else (node.module or "")
            for alias in node.names:
                member = f"{base}.{alias.name}"
                if member in modules:
                    yield member
                elif base in modules:
                    yield base


def circles(root: Path) -> list[set[str]]:
    """Groups of modules that reach one another, each as a set of names."""
    modules = modules_under(root)
    graph = {name: set(imports_of(name, path, modules)) for name, path in modules.items()}
    for name, needs in graph.items():
        needs.discard(name)
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            start = error.args[1][0]
            group = _reached(graph, start) & {n for n in graph if start in _reached(graph, n)}
            found.append(group)
            graph = {n: needs - group for n, needs in graph.items() if n not in group}
        else:
            return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for needed in graph.get(waiting.pop(), ()):
            if needed not in seen:
                seen.add(needed)
                waiting.append(needed)
    return seen


def test_no_module_needs_itself():
    found = [", ".join(sorted(circle)) for circle in circles(ROOT)]
    assert not found, f"these modules import one another: {'; '.join(found)}"


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p import a",
        "from p.a import thing",
        "from . import a",
        "from .a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import thing",
        "def f():\n    from p.a import thing",
        "from p.c import thing",
    ],
)
def test_a_circle_is_found(tmp_path, back):
    files = {"__init__": "", "a": "from p.b import x", "b": back, "c": "from p.a import thing"}
    (tmp_path / "p").mkdir()
    for name, text in files.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    [circle] = circles(tmp_path)
    assert {"p.a", "p.b"} <= circle


def test_a_stack_has_no_circle(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/__init__.py").write_text("from p.a import x")
    (tmp_path / "p/a.py").write_text("import p.b\nfrom p.b import x")
    (tmp_path / "p/b.py").write_text("import os\nfrom json import loads")
    assert circles(tmp_path) == []
