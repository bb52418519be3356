"""Models by hub name: what is fetched, what is kept, and one clear error for each fault."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hub_server import COMMIT, Hub
from patience import PATIENCE
from quire import LLM
from quire.checkpoint import hub as door
from quire.checkpoint import hub_cache, manifest
from quire.checkpoint.hub import RemoteFile, choose, fetch
from quire.config import EngineConfig, ModelConfig
from quire.config.locate import located
from quire.config.model import EMBEDDED_FOLDER
from quire.errors import ModelLoadError

WANTED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
          "tokenizer_config.json"}  # fmt: skip


def refused(**options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        located(EngineConfig.from_options(model="org/tiny", **options))
    assert len(caught.value.message.splitlines()) == 1
    return caught.value.message


def test_a_model_by_name_answers(hub: Hub, caplog: Any) -> None:
    with LLM("org/tiny", max_model_len=256) as llm:
        by_name = llm.generate("The capital of France is", use_tqdm=False)[0].outputs[0]
        assert llm.llm_engine.config.model.revision == COMMIT
        assert llm.llm_engine.config.model.names == ["org/tiny"]
    with LLM("quire-demo-draft", max_model_len=256) as llm:
        local = llm.generate("The capital of France is", use_tqdm=False)[0].outputs[0]
    assert by_name.token_ids == local.token_ids
    assert set(hub.downloads()) == WANTED, "no second copies, no pictures"
    seen = len(hub.log)
    with LLM("org/tiny", max_model_len=256):
        assert len(hub.log) == seen, "a cached model needs no network"


def test_only_what_is_missing_is_fetched(hub: Hub) -> None:
    fetch("org/tiny")
    folder = hub_cache.snapshot("org/tiny", None)
    assert folder is not None and folder.name == COMMIT
    (folder / "model.safetensors").resolve().unlink()
    (folder / "model.safetensors").unlink()
    assert not hub_cache.is_complete(folder)
    hub.log.clear()
    config = located(EngineConfig.from_options(model="org/tiny"))
    assert hub.downloads() == ["model.safetensors"] * len(hub.downloads()) != []
    assert config.model.folder == folder


def test_a_broken_connection_is_resumed(hub: Hub, monkeypatch: Any) -> None:
    size = len(hub.files["model.safetensors"])
    hub.break_after["model.safetensors"] = [size // 3, size // 3]
    # The library keeps whole pieces only, of 10 MiB; this file is smaller than one.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    fetch("org/tiny")
    folder = hub_cache.snapshot("org/tiny", None)
    assert folder is not None
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    ranges = [line.split()[2] for line in hub.log
              if line.startswith("GET") and "model.safetensors" in line]  # fmt: skip
    first = [int(r.removeprefix("bytes=").partition("-")[0]) for r in ranges if r != "-"]
    assert len(first) == 2 and 0 < first[0] < first[1] < size, ranges


def test_a_download_that_never_comes_through(hub: Hub, monkeypatch: Any) -> None:
    hub.break_after["model.safetensors"] = [0] * 50
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    message = refused()
    assert "cannot download 'org/tiny' from http://127.0.0.1" in message
    assert "Try again, or give the folder of a model" in message
    folder = hub_cache.snapshot("org/tiny", None)
    assert folder is None or not hub_cache.is_complete(folder)
    hub.break_after.clear()
    located(EngineConfig.from_options(model="org/tiny"))


def test_a_wrong_token(hub: Hub, monkeypatch: Any) -> None:
    hub.token = "right"
    monkeypatch.setenv("HF_TOKEN", "wrong")
    message = refused()
    assert (
        "refuses access to 'org/tiny' (401): the token in HF_TOKEN gives no access to it" in message
    )
    assert "wrong" not in message.replace("wrongly", "")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert located(EngineConfig.from_options(model="org/tiny")).model.revision == COMMIT


def test_no_token(hub: Hub) -> None:
    hub.token = "right"
    assert "HF_TOKEN is not set" in refused()


def test_a_gated_model(hub: Hub) -> None:
    hub.gated = True
    assert "'org/tiny' is a gated model of" in refused()


def test_no_such_repository(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="no folder 'org/other', and http.* has no such model"):
        located(EngineConfig.from_options(model="org/other"))


def test_no_such_revision(hub: Hub) -> None:
    assert "has no revision 'v9' of 'org/tiny'" in refused(revision="v9")
    for bad in ("../x", "-x", "a..b", ""):
        with pytest.raises(ModelLoadError, match="--revision must be") if bad else _nothing():
            hub_cache.snapshot("org/tiny", bad)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_revisions_are_pinned_to_their_commit(hub: Hub) -> None:
    hub.branches["v1"] = COMMIT
    config = located(EngineConfig.from_options(model="org/tiny", revision="v1"))
    assert config.model.revision == COMMIT
    assert hub_cache.snapshot("org/tiny", "v1") == config.model.folder
    assert hub_cache.snapshot("org/tiny", "main") is None
    seen = len(hub.log)
    assert located(config) == config
    assert located(EngineConfig.from_options(model="org/tiny", revision="v1")) == config
    assert len(hub.log) == seen


def test_a_lost_file(hub: Hub) -> None:
    hub.lost.add("tokenizer.json")
    assert "lists a file of 'org/tiny' that it does not have" in refused()


def test_a_full_disk_is_told_before_the_download(hub: Hub, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    message = refused()
    assert "which has 1.0 MiB free: make room, or give --download-dir" in message
    assert hub.downloads() == []


def test_a_disk_that_fills_up_meanwhile(hub: Hub, monkeypatch: Any) -> None:
    import huggingface_hub

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    assert refused() == "the disk is full: 'org/tiny' could not be stored; see --download-dir"


def test_offline(hub: Hub, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids downloading it" in refused()
    assert hub.log == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch("org/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert located(EngineConfig.from_options(model="org/tiny")).model.revision == COMMIT


def test_nobody_listens(hub: Hub, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot download 'org/tiny' from http://127.0.0.1:9: " in refused()


def test_a_folder_wins_over_the_hub(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert located(EngineConfig.from_options(model="org/tiny")).model.folder == Path("org/tiny")
    assert hub.log == []


def test_download_dir_and_a_tokenizer_of_its_own(hub: Hub, tmp_path: Path) -> None:
    config = located(EngineConfig.from_options(
        model="quire-demo", tokenizer="org/tiny", download_dir=str(tmp_path / "here"),
    ))  # fmt: skip
    assert config.model.tokenizer_folder.is_relative_to(tmp_path / "here")
    assert set(hub.downloads()) == WANTED - {"model.safetensors"}


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1) for name in names]


def chosen(*names: str, load_format: str = "auto") -> set[str]:
    return {file.name for file in choose(files(*names), load_format, "o/m")}


def test_which_files_are_chosen() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    every = ["config.json", index, *shards, "pytorch_model.bin", "pytorch_model.bin.index.json",
             "consolidated.safetensors", "original/model.safetensors", "x.gguf"]  # fmt: skip
    assert chosen(*every) == {"config.json", index, *shards}
    assert chosen(*every, load_format="pt") == {
        "config.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    }  # fmt: skip
    assert chosen(*every, load_format="gguf") == {"config.json", "x.gguf"}
    assert chosen(*every, load_format="dummy") == {"config.json"}
    assert chosen("consolidated.safetensors", "config.json") == {
        "consolidated.safetensors", "config.json",
    }  # fmt: skip
    assert chosen("m.gguf") == {"m.gguf"}
    with pytest.raises(ModelLoadError, match="has 2 GGUF files"):
        chosen("a.gguf", "b.gguf")
    assert len(chosen("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")) == 2
    with pytest.raises(ModelLoadError, match="see --load-format pt"):
        chosen("config.json", "pytorch_model.bin")
    pooling = "1_Pooling/config.json"
    assert pooling in chosen("model.safetensors", pooling, "x/y/1_Pooling/config.json")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True), ("Qwen/Qwen2.5-0.5B-Instruct", True), ("a/b", True),
        ("name", False), ("./x/y", False), ("/x/y", False), ("a/b/c", False), ("../b", False),
        ("a/..", False), ("a/b--c", False), ("a/", False), ("a b/c", False), ("a/b.", False),
        ("~/x", False), ("a/b.gguf", True),
    ],
)  # fmt: skip
def test_what_is_a_repository_name(name: str, is_one: bool) -> None:
    assert hub_cache.is_repo_id(name) is is_one


def quire(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ)


def test_pull_ls_verify_rm(hub: Hub) -> None:
    pulled = quire("pull", "org/tiny")
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert folder.name == COMMIT and "downloading org/tiny: 5 files" in pulled.stderr
    listed = quire("ls").stdout
    assert "org/tiny" in listed and f"main@{COMMIT[:8]}" in listed and "quire-demo " in listed
    assert quire("verify", "org/tiny").stdout == "5 files match their checksums\n"
    shown = quire("rm", "org/tiny")
    assert shown.returncode == 0 and "deleted org/tiny" in shown.stdout
    assert not folder.exists() and "org/tiny" not in quire("ls").stdout
    again = quire("rm", "org/tiny")
    assert again.returncode == 1 and "there is no model 'org/tiny'" in again.stderr
    assert "like org/name" in quire("pull", "tiny").stderr
    kept = quire("rm", "quire-demo")
    assert kept.returncode == 2 and "quire-demo ships with quire" in kept.stderr
    absent = quire("verify", "/none/model")
    assert "there is no model folder '/none/model'" in absent.stderr
    assert quire("rm").stderr == "quire: which model? See quire rm --help\n"


def test_the_library_is_not_loaded_for_a_cached_model(hub: Hub) -> None:
    fetch("org/tiny")
    code = (
        "import sys; from quire.config import EngineConfig; from quire.config.locate import located"
        "; located(EngineConfig.from_options(model='org/tiny'));"
        "print([m for m in ('huggingface_hub', 'torch', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "[]\n", done.stderr


# -------------------------------------------------------------------------------------- digests


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    embedded = ModelConfig(model="quire-demo-draft").folder
    shutil.copytree(embedded, copy, ignore=shutil.ignore_patterns(manifest.MANIFEST))
    return copy


def test_a_flipped_bit_is_caught(folder: Path) -> None:
    manifest.write_manifest(folder)
    seen: list[tuple[int, int]] = []
    assert manifest.verify(folder, lambda *now: seen.append(now)) >= 5
    assert seen[-1][0] == seen[-1][1] > 0
    flip(folder / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"\(changed: model.safetensors\): download them again"
    ):
        manifest.verify(folder)
    with LLM(str(folder), max_model_len=64):
        pass  # one bit of one weight: nothing else can notice
    with pytest.raises(ModelLoadError, match="changed: model.safetensors"):
        LLM(str(folder), max_model_len=64, verify=True)


def test_missing_and_foreign_files_are_named(folder: Path) -> None:
    manifest.write_manifest(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "extra.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError) as caught:
        manifest.verify(folder)
    assert "missing: tokenizer.json" in caught.value.message
    assert "without a checksum: extra.safetensors" in caught.value.message


def test_the_manifest_is_sha256sums_format(folder: Path) -> None:
    manifest.write_manifest(folder)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True)
    assert done.returncode == 0
    (folder / "SHA256SUMS").write_text("0" * 64 + "  ../x\n")
    with pytest.raises(ModelLoadError, match="line 1: expected a checksum"):
        manifest.verify(folder)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ModelLoadError, match="there are no checksums"):
        manifest.verify(folder)
    with pytest.raises(ModelLoadError, match="there is no model in"):
        manifest.write_manifest(folder / "nothing")


def test_cached_models_are_checked_by_the_names_of_their_blobs(hub: Hub) -> None:
    fetch("org/tiny")
    folder = hub_cache.snapshot("org/tiny", None)
    assert folder is not None and manifest.verify(folder) == len(WANTED)
    blob = (folder / "model.safetensors").resolve()
    flip(blob)
    with pytest.raises(ModelLoadError, match="changed: model.safetensors"):
        manifest.verify(folder)


def test_git_ids_are_checked_too(tmp_path: Path) -> None:
    content = b"hello\n"
    blob = tmp_path / "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    blob.write_bytes(content)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").symlink_to(blob)
    assert manifest.verify(tmp_path / "m") == 1
    flip(blob)
    with pytest.raises(ModelLoadError, match="changed: config.json"):
        manifest.verify(tmp_path / "m")


def test_the_disk_is_the_one_of_the_nearest_existing_folder(tmp_path: Path) -> None:
    door.check_space(tmp_path / "not" / "yet", 1, "o/m")
    with pytest.raises(ModelLoadError, match="make room"):
        door.check_space(tmp_path / "not" / "yet", 2**60, "o/m")


@pytest.mark.parametrize("name", [path.name for path in EMBEDDED_FOLDER.glob("quire-*")])
def test_what_ships_with_quire_has_digests(name: str) -> None:
    """Whoever changes a file of theirs writes new ones: `quire verify --write NAME`."""
    folder = EMBEDDED_FOLDER / name
    assert manifest.verify(folder) == len(manifest.model_files(folder)) >= 2
