"""The rows about profilers: D10, D11, E2, H11, H13, J1 to J7."""

from __future__ import annotations

import csv
import gzip
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from live_server import serving
from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.errors import ConfigError, Conflict, InvalidRequest
from quire.kernels import scopes
from quire.kernels.dispatch import ops
from quire.observability.metrics.tensorboard import crc32c
from quire.profiler import LayerwiseProfiler
from quire.worker.profile import make_profiler

PARAMS = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


def test_d10_e2_start_and_stop_profile_over_http(tmp_path: Path) -> None:
    """`VLLM_TORCH_PROFILER_DIR` and the two routes write a trace; a second start, or a stop without
    one, is a 409."""
    with serving(env={"VLLM_TORCH_PROFILER_DIR": str(tmp_path)}) as server:
        assert httpx.post(f"{server.url}/stop_profile", timeout=PATIENCE).status_code == 409
        assert httpx.post(f"{server.url}/start_profile", timeout=PATIENCE).status_code == 200
        assert httpx.post(f"{server.url}/start_profile", timeout=PATIENCE).status_code == 409
        body = {"prompt": "Hello", "max_tokens": 3}
        assert (
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code
            == 200
        )
        assert httpx.post(f"{server.url}/stop_profile", timeout=PATIENCE).status_code == 200
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"quire: forward", "quire: sample", "quire::linear"} <= names


def test_e2_without_a_profiler_it_says_what_to_set() -> None:
    """Without a folder, the routes answer with what to set."""
    with serving() as server:
        reply = httpx.post(f"{server.url}/start_profile", timeout=PATIENCE)
        assert reply.status_code == 400
        assert "QUIRE_TORCH_PROFILER_DIR" in reply.json()["error"]["message"]


def test_j3_profiler_config(tmp_path: Path) -> None:
    """`--profiler-config` delays the recording and ends it on its own; bad keys are refused."""
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "use_gzip": False}
    with LLM(profiler_config={**config, "delay_iterations": 1, "max_iterations": 2}) as llm:
        llm.start_profile()
        llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        assert list(tmp_path.glob("*.json")), "max_iterations ends it"
        llm.stop_profile()
    (trace,) = tmp_path.glob("*.pt.trace.json")
    names = [e.get("name") for e in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("quire: forward") == 2
    for bad, words in (
        ({"profilr": "torch"}, "did you mean 'profiler'"),
        ({"profiler": "proton"}, "torch or cuda, got 'proton'"),
        ({"with_stack": 1}, "with_stack must be of type bool"),
        ({"profiler": "cuda"}, "needs a CUDA device"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(profiler_config=bad, device="cpu")


def test_j4_ranges_for_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    """`"profiler": "cuda"` marks the range that `nsys --capture-range=cudaProfilerApi` records."""
    called: list[str] = []

    class Cudart:
        @staticmethod
        def cudaProfilerStart() -> None:
            called.append("start")

        @staticmethod
        def cudaProfilerStop() -> None:
            called.append("stop")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    profiler = make_profiler({"profiler": "cuda", "max_iterations": 2}, with_cuda=True)
    profiler.start()
    with pytest.raises(Conflict, match="already running"):
        profiler.start()
    for _ in range(5):
        profiler.step()
    assert called == ["start", "stop"], "max_iterations ends it"
    profiler.stop()


def test_j1_j6_j7_a_profiler_around_generate_names_the_kernels(llm: LLM, tmp_path: Path) -> None:
    """`torch.profiler` around `llm.generate` sees our kernels by name and writes a trace for Chrome
    and Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    bare = ops.linear
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        llm.generate("Hello", PARAMS, use_tqdm=False)
    keys = {event.key for event in seen.key_averages()}
    expected = {"quire::linear", "quire::rms_norm", "quire::paged_attention", "quire::gated_linear"}
    assert expected <= keys
    assert "quire::linear" in seen.key_averages().table(sort_by="cpu_time_total", row_limit=50)
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ours = [e for e in events if e.get("name") == "quire::linear"]
    assert ours and all(e["ph"] == "X" and {"ts", "dur", "pid", "tid"} <= set(e) for e in ours)
    llm.generate("Hello", PARAMS, use_tqdm=False)
    assert ops.linear is bare, "without a profiler nothing is wrapped"


def test_d11_nvtx_ranges(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_NVTX_LOGGING=1` names phases and operations as NVTX ranges."""
    ranges: list[str] = []
    depth = [0]

    class Nvtx:
        @staticmethod
        def range_push(name: str) -> None:
            ranges.append(name)
            depth[0] += 1

        @staticmethod
        def range_pop() -> None:
            depth[0] -= 1

    monkeypatch.setenv("VLLM_NVTX_LOGGING", "1")
    try:
        scopes.enable_nvtx(Nvtx)
        llm.generate("Hello", PARAMS, use_tqdm=False)
    finally:
        monkeypatch.delenv("VLLM_NVTX_LOGGING")
        scopes.enable_nvtx()
    assert {"quire: forward", "quire::linear"} <= set(ranges) and depth == [0]
    count = len(ranges)
    llm.generate("Hello", PARAMS, use_tqdm=False)
    assert len(ranges) == count, "off means off"


def test_j2_h11_layerwise_profiler(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`LayerwiseProfiler` prints attention and MLP of each layer, and writes CSV; the tokens stay
    the same."""
    before = llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    profiler = LayerwiseProfiler(llm)
    with pytest.raises(InvalidRequest, match="start it first"):
        profiler.stop()
    profiler.start()
    with pytest.raises(InvalidRequest, match="already running"):
        profiler.start()
    measured = llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    profiler.stop()
    calls = [t.calls for t in profiler.times]
    after = llm.generate("Hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert before == measured == after
    assert [t.calls for t in profiler.times] == calls == [3] * len(calls) and calls
    for t in profiler.times:
        assert t.attention > 0 and t.mlp > 0 and t.attention + t.mlp <= t.total
    capsys.readouterr()
    text = profiler.report()
    assert capsys.readouterr().out == text + "\n"
    first, *_, last = text.splitlines()
    line = r"Layer 0 \| attention \d+\.\d\dms \| mlp \d+\.\d\dms \| total \d+\.\d\dms"
    assert re.fullmatch(line, first)
    assert re.fullmatch(r"Total: \d+\.\d\dms", last)
    profiler.export_csv(tmp_path / "layers.csv")
    with open(tmp_path / "layers.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(calls)
    assert list(rows[0]) == ["layer", "calls", "attention_ms", "mlp_ms", "total_ms"]


def test_j2_under_the_name_in_vllm(tmp_path: Path) -> None:
    """The import that vLLM guides show works in a script."""
    script = tmp_path / "script.py"
    script.write_text("from vllm.profiler import LayerwiseProfiler\nprint(LayerwiseProfiler)\n")
    done = subprocess.run(
        [sys.executable, "-m", "quire", "run", str(script)], capture_output=True, text=True
    )
    assert "LayerwiseProfiler" in done.stdout, done.stderr


def test_quire_profile_shows_both_phases(capsys: pytest.CaptureFixture[str]) -> None:
    from quire.cli.profile import main

    assert main(["--num-prompts", "2", "--input-len", "16", "--output-len", "4"]) == 0
    out = capsys.readouterr().out
    head = out.splitlines()[0].strip()
    assert re.search(r"prefill: 1 steps; decode: 3 steps", head), out
    # Each side is ordered by its own times, so an operation need not stand twice in one line.
    calls = re.findall(r"quire::linear +\d+\.\d\d +\d+\.\d %  +(\d+)", out)
    assert len(calls) == 2 and len(set(calls)) == 2, out
    with pytest.raises(ConfigError, match="--top must be at least 1, got 0"):
        main(["--top", "0"])


def read_events(path: Path) -> list[dict[str, float]]:
    """The scalars of an event file, checking lengths and checksums."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        for part, mark in ((data[at : at + 8], at + 8), (data[at + 12 : at + 12 + length], None)):
            crc = crc32c(part)
            masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            where = mark if mark is not None else at + 12 + length
            assert struct.unpack_from("<I", data, where) == (masked,)
        body = data[at + 12 : at + 12 + length]
        found.append(
            {
                tag.decode(): struct.unpack("<f", value)[0]
                for tag, value in re.findall(rb"([a-z_]+/[a-z0-9_]+)\x15(.{4})", body, re.S)
            }
        )
        at += 16 + length
    return found


def test_h13_tensorboard(tmp_path: Path) -> None:
    """`--tensorboard-dir` writes throughput and latency as TensorBoard reads them."""
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43  # RFC 3720, B.4
    with LLM(tensorboard_dir=str(tmp_path)) as llm:
        llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    version, *points = read_events(path)
    assert version == {} and b"brain.Event:2" in path.read_bytes()
    assert points[-1]["throughput/generation_tokens_per_second"] > 0 or len(points) > 1
    assert any(p.get("latency/time_to_first_token_seconds", 0) > 0 for p in points)
    with pytest.raises(ConfigError, match="--tensorboard-dir"):
        LLM(tensorboard_dir=str(path))
