"""A start that cannot work ends with one line that says why and what to do, and a code not 0."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from live_server import QUIRE
from patience import PATIENCE
from quire.config import ModelConfig


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path that looks like a name on the hub must not send anybody there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model to damage."""
    copy = tmp_path / "model"
    shutil.copytree(ModelConfig().folder, copy)
    return copy


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), ["config.json"]),
        (remove("tokenizer.json"), ["tokenizer.json"]),
        (remove("model.safetensors"), ["safetensors"]),
        (write("config.json", "{"), ["config.json"]),
        (write("tokenizer.json", "nonsense"), ["tokenizer.json"]),
        (truncate, ["model.safetensors"]),
        (lambda f: edit_config(f, hidden_size=128), ["128", "256"]),
        (lambda f: edit_config(f, num_hidden_layers=9), ["layers.5", "missing"]),
        (lambda f: edit_config(f, num_hidden_layers=2), ["layers.2"]),
        (lambda f: edit_config(f, architectures=["LlamaForCasualLM"]), ["LlamaForCausalLM"]),
        (lambda f: edit_config(f, vocab_size="many"), ["vocab_size", "many"]),
    ],
    ids=[
        "no config",
        "no tokenizer",
        "no weights",
        "config is no JSON",
        "tokenizer is no JSON",
        "truncated weights",
        "other hidden size",
        "missing layers",
        "unexpected layers",
        "unknown architecture",
        "senseless size",
    ],
)
def test_a_damaged_model_folder(
    folder: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(folder)
    command = [*QUIRE, "complete", "x", "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "nowhere/at-all"], ["nowhere/at-all"]),
        (["--max-model-len", "5000"], ["5000", "2048"]),
        (["--num-gpu-blocks-override", "4"], ["2048", "--max-model-len"]),
        (["--kv-cache-memory-bytes", "1000"], ["--kv-cache-memory-bytes", "--max-model-len"]),
        (["--block-size", "7"], ["--block-size", "7"]),
        (["--max-num-batched-tokens", "0"], ["--max-num-batched-tokens", "0"]),
        (["--device", "tpu"], ["tpu", "cuda"]),
        (["--gpu-memory-utilization", "1.5"], ["1.5"]),
        (["--max-num-seq", "5"], ["--max-num-seq", "--max-num-seqs"]),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "64"], ["64", "2048"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0][:2] == "--" else "",
)
def test_options_that_cannot_work(args: list[str], words: list[str]) -> None:
    command = [*QUIRE, "complete", "x", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_the_server_says_the_same(folder: Path) -> None:
    """The core finds the fault; the server's last word is the core's own reason."""
    truncate(folder)
    command = [*QUIRE, "serve", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "model.safetensors" in last
    assert "Traceback" not in done.stderr
