"""The unit file for systemd fits the server: what it starts parses, and nothing ends a drain."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.cli.serve import build_parser

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "quire.service"


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text("utf-8"))
    return parser


def test_systemd_hears_the_server_and_believes_its_exit_code(
    unit: configparser.ConfigParser,
) -> None:
    service = unit["Service"]
    wanted = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "OOMPolicy": "continue",
        "NoNewPrivileges": "yes",
    }
    assert {name: service.get(name) for name in wanted} == wanted
    assert "TimeoutStopSec" not in service, "90 s by default, and a drain extends it"
    assert int(service["WatchdogSec"]) >= 10


def test_what_it_starts_is_a_command(unit: configparser.ConfigParser, tmp_path: Path) -> None:
    program, command, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("quire", "serve")
    config = tmp_path / "serve.yaml"
    config.write_text("port: 9000\n")
    flags = [str(config) if flag.endswith(".yaml") else flag for flag in flags]
    assert build_parser().parse(flags).port == 9000


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_takes_it(tmp_path: Path) -> None:
    text = UNIT.read_text("utf-8").replace("/opt/quire/bin/quire", "/bin/true")
    path = tmp_path / "quire.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if str(path) in line]
    assert complaints == []
