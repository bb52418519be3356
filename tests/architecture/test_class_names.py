"""A class has a name of its own: whoever searches for it finds one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "quire"

SHARED = {
    "AsyncLLM": "compat: vLLM's class of that name, over the engine's",
    "LLMEngine": "compat: vLLM's class of that name, over the engine's",
    "Counter": "compat: `vllm.utils.Counter`; metrics: vLLM's record of that name",
}
"""Names that two classes have, and why: scripts written for vLLM import both of them by it."""


def classes_by_name(source: Path) -> dict[str, list[str]]:
    """Files of the public classes at the top level of modules, by the name of the class."""
    found = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(source).as_posix())
    return found


def twice(source: Path) -> dict[str, list[str]]:
    return {name: files for name, files in classes_by_name(source).items() if len(files) > 1}


def test_no_two_public_classes_share_a_name():
    for name, files in twice(SOURCE).items():
        assert name in SHARED, f"class {name} is in {' and '.join(files)}"


def test_the_list_of_shared_names_is_current():
    for name in SHARED:
        assert name in twice(SOURCE), f"{name} occurs once: remove its row"


def test_a_second_class_of_a_name_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class One: ...\nclass _Private: ...")
    (tmp_path / "b.py").write_text("class One: ...\nclass _Private: ...\nclass Two: ...")
    assert twice(tmp_path) == {"One": ["a.py", "b.py"]}
