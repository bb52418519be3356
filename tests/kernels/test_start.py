"""Which kernels run where something is missing: one message with the remedy, and it works."""

import logging.handlers
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.kernels import compiled, dispatch

ROOT = Path(__file__).resolve().parents[2]
NOT_BUILT = "import sys; sys.modules['quire.kernels._native'] = None\n"
"""What an install without a compiler looks like to Python."""


@pytest.fixture
def said(monkeypatch):
    """Warnings of quire."""
    handler = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("quire"), "handlers", [handler])
    return handler.buffer


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", NOT_BUILT + code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={key: v for key, v in os.environ.items() if key != "QUIRE_KERNELS"} | env,
    )


GENERATE = """
from quire import LLM, SamplingParams
with LLM() as llm:
    for _ in range(2):
        (output,) = llm.generate(
            "The capital of France is", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False
        )
    print(output.outputs[0].text)
"""


def test_without_the_module_the_plain_operations_run_and_one_line_says_so():
    done = run(GENERATE)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr.count(compiled.REMEDY) == 1
    assert "native kernels not used" in done.stderr


def test_without_the_module_native_is_refused():
    done = run(GENERATE, QUIRE_KERNELS="native")
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert "no kernels can run here" in last and compiled.REMEDY in last


def test_what_the_install_says():
    code = "import runpy; runpy.run_module('quire.kernels.compiled', run_name='__main__')"
    assert run(code).stdout.strip() == compiled.REMEDY


CPUINFO = Path("/proc/cpuinfo")

needs_lib = pytest.mark.skipif(compiled.lib is None, reason="the native kernels are not built")


@needs_lib
@pytest.mark.parametrize(
    ("wanted", "here", "chosen"),
    [
        ("auto", ["avx2", "portable"], "avx2"),
        ("avx2", ["avx2", "portable"], "avx2"),
        ("avx512_bf16", ["avx2", "portable"], "avx2"),
        ("avx512_bf16", ["avx512_vnni", "avx512", "portable"], "avx512_vnni"),
        ("amx", ["avx512_vnni", "avx512_bf16", "avx512", "portable"], "avx512_vnni"),
        ("avx512_bf16", ["avx512_vnni", "avx512_bf16", "portable"], "avx512_bf16"),
        ("auto", ["avx512_vnni", "avx512_bf16", "portable"], "avx512_vnni"),
        ("avx512", ["avx512_vnni", "avx512_bf16", "portable"], "portable"),
        ("avx512", ["portable"], "portable"),
        ("avx512", ["avx_vnni", "avx2", "portable"], "avx_vnni"),
        ("avx_vnni", ["avx512", "avx2", "portable"], "avx2"),
        ("portable", ["avx512_bf16", "avx512", "avx2", "portable"], "portable"),
    ],
)
def test_a_processor_that_lacks_something(monkeypatch, said, wanted, here, chosen):
    """Only sets that this machine has are ever set, whatever the table says of it."""
    set_to = []
    monkeypatch.setattr(compiled, "available_isas", lambda: here)
    monkeypatch.setattr(compiled, "lib", type("Lib", (), {"set_isa": staticmethod(set_to.append)}))
    monkeypatch.setenv("QUIRE_CPU_ISA", wanted)
    assert compiled.choose_isa() == chosen
    assert set_to == [chosen]
    lines = [record.getMessage() for record in said]
    if chosen == wanted or wanted == "auto":
        assert lines == []
    else:
        assert lines == [f"this machine cannot run {wanted} kernels: using {chosen}"]


@needs_lib
@pytest.mark.skipif(not CPUINFO.exists(), reason="the system does not tell the processor's maker")
def test_the_best_comes_first():
    """Intel's processors multiply pairs of bf16 slower than float32, so those come after VNNI."""
    here = compiled.available_isas()
    rest = [isa for isa in compiled.ISAS if isa in here]
    slow_pairs = "GenuineIntel" in CPUINFO.read_text() and rest[0] == "avx512_bf16"
    best = "avx512_vnni" if slow_pairs else rest[0]
    assert here == [best, *(isa for isa in rest if isa != best)]


@needs_lib
def test_the_message_comes_once(monkeypatch, said):
    """However often operations are called."""
    before = dispatch.ops.name
    monkeypatch.setattr("quire.kernels.native.lib", None)
    try:
        assert dispatch.select("auto") == "reference"
        import torch

        dispatch.ops.silu(torch.ones(2))
        dispatch.ops.silu(torch.ones(2))
    finally:
        monkeypatch.undo()
        dispatch.select(before)
    assert [r.getMessage() for r in said] == [f"native kernels not used: {compiled.REMEDY}"]


def configure(folder, *flags, **env):
    """Exit code of CMake's first half, and what it says, in one line."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("no cmake here")
    command = [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), "-Wno-dev"]
    done = subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    return done.returncode, re.sub(r"\s+", " ", done.stderr)


def test_a_build_without_a_compiler_is_no_error(tmp_path):
    nowhere = {"CXX": "/nonexistent", "CC": "/nonexistent"}
    code, told = configure(tmp_path, **nowhere)
    assert code == 0, told
    assert told.count("quire: no native kernels, because there is no C++ compiler.") == 1
    assert "Remedy: install a C++17 compiler" in told
    code, told = configure(tmp_path, "-DQUIRE_REQUIRE_NATIVE=ON", **nowhere)
    assert code != 0, "where kernels are asked for, it is one"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86 flags")
def test_a_compiler_that_is_too_old_is_no_error(tmp_path):
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no g++ here")
    old = tmp_path / "old-g++"
    old.write_text(
        f'#!/bin/sh\ncase "$*" in *mavx512bf16*) exit 1;; esac\nexec {real} "$@"\n', "utf-8"
    )
    old.chmod(0o755)
    code, told = configure(tmp_path / "build", CXX=str(old))
    assert code == 0, told
    assert "quire: no native kernels, because this C++ compiler is too old" in told
    code, told = configure(tmp_path / "other", CXX=real)
    assert code == 0 and "no native kernels" not in told
