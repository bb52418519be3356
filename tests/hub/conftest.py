"""A hub with one tiny model, and an environment that knows no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import Hub, serving
from quire.checkpoint.manifest import model_files as model_files_of
from quire.config import ModelConfig


@pytest.fixture(scope="session")
def model_files() -> dict[str, bytes]:
    """The embedded model's draft as a repository, with the clutter that repositories have."""
    folder = ModelConfig(model="quire-demo-draft").folder
    files = {path.name: path.read_bytes() for path in model_files_of(folder)}
    clutter = ["pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "original/x.safetensors",
               "consolidated.safetensors", "training_args.bin", "logo.png"]  # fmt: skip
    return {**files, **dict.fromkeys(clutter, b"clutter" * 10)}


@pytest.fixture
def hub(
    model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A running hub; the cache is an empty folder."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serving(Hub(dict(model_files))) as running:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield running
