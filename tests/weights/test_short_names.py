"""A name that is no folder is answered with a full name to copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.checkpoint.config_files import read_config
from quire.checkpoint.hub_cache import is_repo_id
from quire.checkpoint.short_names import EXAMPLES
from quire.errors import ModelLoadError


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama3.2", "org/name, here perhaps meta-llama/Llama-3.2-1B-Instruct"),
        ("Qwen2.5:0.5b", "org/name, here perhaps Qwen/Qwen2.5-0.5B-Instruct"),
        ("gpt-oss", "openai/gpt-oss-20b"),
        ("quire-dmo", "did you mean quire-demo?"),
        ("mine", "did you mean team/mine?"),
        ("mne", "did you mean team/mine?"),
        ("frobnicator", "a name on the hub (org/name), or quire-demo"),
        ("models/llama3.2", "give a folder with config.json"),
        ("", "give a folder with config.json"),
    ],
)
def test_advice(name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--team--mine" / "refs").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "models--team--mine" / "refs")
    with pytest.raises(ModelLoadError, match="^(there is no model folder|the model folder)") as no:
        read_config(Path(name or "no/thing"))
    assert told in no.value.message


def test_examples_are_names_on_the_hub() -> None:
    assert all(is_repo_id(name) for name in EXAMPLES.values())
