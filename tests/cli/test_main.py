"""The command itself: dispatch, one line per error, exit codes, and a fast `--help`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

import quire
from quire import errors
from quire.cli import main as cli
from quire.cli.bench import ABOUT, BENCHMARKS
from quire.cli.collect_env import cgroup_bytes, cgroup_cores
from work import work_of


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def command(monkeypatch):
    """Make `quire fake` call a function."""

    def install(function):
        monkeypatch.setitem(cli.COMMANDS._rows, "fake", function)
        monkeypatch.delitem(cli.COMMANDS._loaded, "fake", raising=False)

    yield install
    cli.COMMANDS._loaded.pop("fake", None)


def test_overview_and_version(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {name}" in out for name in cli.COMMANDS)
    assert run(capsys) == (0, out, "")
    for flag in ("-v", "--version"):
        assert run(capsys, flag) == (0, f"quire {quire.__version__}\n", "")
    assert set(cli.ABOUT) == set(cli.COMMANDS)


def test_unknown_command(capsys):
    code, out, err = run(capsys, "sevre")
    assert (code, out) == (2, "") and err.startswith("quire: unknown command 'sevre'")
    assert "did you mean 'serve'?" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help_and_refuses_unknown_flags(capsys, name):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: quire {name}")
    code, _, err = run(capsys, name, "--frobnicate")
    assert code == 2 and "--frobnicate" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("bad.\nTry good"), 2),
        (errors.ModelLoadError("no file"), 1),
        (errors.EngineDead("it died"), 1),
    ],
)
def test_expected_errors_are_one_line(capsys, command, monkeypatch, error, code):
    def fail(_):
        raise error

    command(fail)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "INFO")
    got, out, err = run(capsys, "fake")
    assert (got, out) == (code, "")
    assert err == f"quire: {' '.join(error.message.split())}\n"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "DEBUG")
    with pytest.raises(type(error)):  # with its traceback
        cli.main(["fake"])
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "nonsense")
    assert run(capsys, "fake")[0] == code


def test_interrupt_is_quiet(capsys, command):
    def interrupted(_):
        raise KeyboardInterrupt

    command(interrupted)
    assert run(capsys, "fake") == (130, "", "")


def test_serve_hands_its_configuration_to_the_server(capsys, monkeypatch):
    seen = []
    fake = types.ModuleType("quire.serving.server")
    fake.run_server = lambda engine, server: seen.append((engine, server)) or 7
    monkeypatch.setitem(sys.modules, "quire.serving.server", fake)
    code, _, _ = run(capsys, "serve", "--port", "9", "--max-num-seqs", "3")
    assert code == 7
    engine, server = seen[0]
    assert engine.scheduler.max_num_seqs == 3 and server.port == 9
    code, _, err = run(capsys, "serve", "/no/such/folder")
    assert code == 1 and "there is no model folder '/no/such/folder'" in err and len(seen) == 1
    monkeypatch.setenv("VLLM_USE_V1", "0")
    code, _, err = run(capsys, "serve")
    assert code == 2 and err.startswith("quire: VLLM_USE_V1 must be 1") and len(seen) == 1


def test_bench_lists_its_benchmarks(capsys):
    code, out, _ = run(capsys, "bench")
    assert code == 0 and set(BENCHMARKS) == set(ABOUT)
    assert [line.split()[0] for line in out.splitlines()[:-1]] == list(BENCHMARKS)
    code, _, err = run(capsys, "bench", "latnecy")
    assert code == 2 and "did you mean 'latency'?" in err


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_has_help_and_refuses_unknown_flags(capsys, name):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: quire bench {name}")
    code, _, err = run(capsys, "bench", name, "--frobnicate")
    assert code == 2 and "--frobnicate" in err and err.count("\n") == 1


def test_collect_env(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "very-secret")
    code, out, _ = run(capsys, "collect-env", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["quire"] == quire.__version__
    assert facts["packages"]["torch"].startswith("2.") and facts["cpu"]["logical_cores"] >= 1
    assert facts["environment"]["QUIRE_API_KEY"] == "(set)" and "very-secret" not in out
    code, out, _ = run(capsys, "collect-env")
    assert code == 0 and f"quire  {'':<0}" in out.replace("   ", " ") and "very-secret" not in out


def test_control_groups(tmp_path):
    assert cgroup_cores(tmp_path) is None and cgroup_bytes(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert cgroup_cores(tmp_path) == 1.5 and cgroup_bytes(tmp_path) == 2**30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_cores(tmp_path) is None and cgroup_bytes(tmp_path) is None
    v1 = tmp_path / "v1"
    (v1 / "cpu").mkdir(parents=True)
    (v1 / "memory").mkdir()
    (v1 / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (v1 / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (v1 / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_cores(v1) == 0.5 and cgroup_bytes(v1) is None


# -------------------------------------------------------------------------------- whole processes


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (("--help",), 15_000),
        (("--version",), 15_000),
        (("serve", "--help"), 250_000),
        (("chat", "--help"), 250_000),
    ],
    ids=str,
)
def test_help_is_little_work(arguments, calls):
    """Function calls, imports included: a third of this is what they take, and importing torch
    alone would be a million. `benchmarks/startup.py` says how long that is."""
    code = "import sys; from quire.cli.main import main; main(sys.argv[1:])"
    assert work_of(code, *arguments).calls < calls


@pytest.mark.parametrize("name", ["serve", "chat", "complete", "run", "collect-env"])
def test_commands_import_nothing_heavy(name):
    code = (
        "import sys, contextlib\n"
        "from quire.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'tokenizers', 'rich', 'yaml'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, name, "--help"], stdout=subprocess.DEVNULL, check=False
    )
    assert result.returncode == 0


def test_a_process_reports_errors_with_its_exit_code():
    command = [sys.executable, "-m", "quire", "serve", "--prot", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "quire: unknown flag --prot; did you mean --port?\n"


def test_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "quire", "--help"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert result.stderr == b"" and result.returncode == 1


def test_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "quire", "--help"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 1
    assert result.stderr == b"quire: cannot write: No space left on device\n"
