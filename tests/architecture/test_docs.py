"""Documentation that is generated is what would be generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire import envs
from quire.cli.main import COMMANDS
from quire.config import EngineConfig, ServerConfig
from quire.config.cli import flags

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_current():
    command = [sys.executable, str(ROOT / "tools" / "gen_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_pages_name_every_flag_variable_and_command():
    config = (ROOT / "docs" / "config.md").read_text("utf-8")
    for flag in (*flags(EngineConfig), *flags(ServerConfig)):
        assert f"`--{flag.field.replace('_', '-')}`" in config
    for name in envs.table():
        assert f"`QUIRE_{name}`" in config
    cli = (ROOT / "docs" / "cli.md").read_text("utf-8")
    for name in COMMANDS:
        assert f"## quire {name}\n" in cli


def test_the_map_in_the_readme_names_every_package():
    text = (ROOT / "README.md").read_text("utf-8")
    tree = text[text.index("src/quire/\n") :]
    listed = [line.split()[0] for line in tree[: tree.index("```")].splitlines() if line.strip()]
    source = ROOT / "src" / "quire"
    for path in sorted(source.rglob("__init__.py")):
        if path.parent != source:
            assert f"{path.parent.name}/" in listed, path.parent
    for path in sorted(source.glob("[!_]*.py")):
        assert path.name in listed, path


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_examples_are_short_and_begin_with_how_to_run_them(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 40
    assert path.name in text.splitlines()[0]
