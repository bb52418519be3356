"""`quire keys`: what it writes is what a server accepts, and what it revokes is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.cli.main import main
from quire.config import ServerConfig
from quire.config.key_file import read_keys, read_time
from quire.config.key_limits import KeyLimits
from quire.errors import Unauthorized
from quire.serving.auth import KeyRing, Role


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints; it must succeed."""
    code = main(["keys", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out.strip()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["keys", *map(str, arguments)]) != 0
    return capsys.readouterr().err


def ring(path: Path) -> KeyRing:
    return KeyRing(ServerConfig(api_key_file=str(path)))


def sent(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_key_is_shown_once_and_opens(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, "add", "ann", "--file", path)
    second = run(capsys, "add", "ops", "--file", path, "--role", "admin")
    assert first != second and len(first) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["keys"]
    text = path.read_text()
    assert first not in text and second not in text
    assert ring(path).caller(sent(first)).roles == {Role.OPEN, Role.USER}
    assert ring(path).caller(sent(second)).roles == set(Role)
    assert first not in run(capsys, "list", "--file", path)


def test_a_revoked_key_is_refused_and_other_lines_stay(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = run(capsys, "add", "ann", "--file", path)
    other = run(capsys, "add", "ann.2", "--file", path)
    path.write_text("# ann: the first\n\n" + path.read_text())
    keys = ring(path)
    assert run(capsys, "revoke", "ann", "--file", path) == "revoked ann"
    keys.reload()
    with pytest.raises(Unauthorized):
        keys.caller(sent(key))
    assert keys.caller(sent(other)).roles == {Role.OPEN, Role.USER}
    assert path.read_text().startswith("# ann: the first\n\nann.2:")


def test_the_last_key_is_refused_too_when_it_is_revoked(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server keeps its keys when the file has none, so the file must go on having one."""
    key = run(capsys, "add", "ann", "--file", path)
    keys = ring(path)
    run(capsys, "revoke", "ann", "--file", path)
    keys.reload()
    with pytest.raises(Unauthorized, match="expired"):
        keys.caller(sent(key))
    assert "ann  user     expired" in run(capsys, "list", "--file", path)


def test_expiry(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "add", "a", "--file", path, "--expires", "2999-01-31")
    run(capsys, "add", "b", "--file", path, "--expires", "90d")
    run(capsys, "add", "c", "--file", path)
    a, b, c = read_keys(path)
    assert a.expires == read_time("2999-01-31T00:00:00Z") and c.expires is None
    assert b.expires is not None and abs(b.expires - path.stat().st_mtime - 90 * 86400) < PATIENCE
    told = json.loads(run(capsys, "list", "--file", path, "--json"))
    assert told[0] == {
        "name": "a", "role": "user", "expires": "2999-01-31T00:00:00Z", "expired": False,
        "limits": {},
    }  # fmt: skip


def test_limits_are_written_shown_and_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "requests_per_minute=60,tokens_per_minute=100000,concurrent=8,queue_share=0.5"
    run(capsys, "add", "a", "--file", path, "--limits", text, "--expires", "2999-01-31")
    run(capsys, "add", "b", "--file", path, "--limits", "concurrent=2", "--role", "admin")
    run(capsys, "add", "c", "--file", path)
    a, b, c = read_keys(path)
    assert a.limits == KeyLimits(60, 100000, 8, 0.5) and a.expires is not None
    assert b.limits == KeyLimits(concurrent=2) and c.limits == KeyLimits()
    listed = run(capsys, "list", "--file", path).splitlines()
    assert listed[0].endswith(text) and listed[1].endswith("concurrent=2")
    assert listed[2].endswith("no limits")
    told = json.loads(run(capsys, "list", "--file", path, "--json"))
    assert told[1]["limits"] == {"concurrent": 2}
    # Another command leaves them as they are.
    run(capsys, "revoke", "c", "--file", path)
    assert [key.limits for key in read_keys(path)] == [a.limits, b.limits]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "needs add, list or revoke; see"),
        (["ad", "x"], "did you mean 'add'?"),
        (["add", "x"], "which file"),
        (["add", "--file", "F"], "which key?"),
        (["list", "x", "--file", "F"], "takes no name"),
        (["list", "--file", "F.none"], "No such file"),
        (["revoke", "nobody", "--file", "F"], "has no key 'nobody'"),
        (["add", "old", "--file", "F"], "has a key 'old' already"),
        (["add", "a:b", "--file", "F"], "a key's name must be"),
        (["add", "x", "--file", "F", "--role", "root"], "--role must be one of user, admin"),
        (["add", "x", "--file", "F", "--expires", "2000-01-01"], "has passed"),
        (["add", "x", "--file", "F", "--expires", "soon"], "got 'soon'"),
        (["add", "x", "--file", "F/none/keys"], "cannot use the folder"),
        (["add", "x", "--file", "F", "--limits", "rpm=3"], "limits are requests_per_minute, "),
        (["add", "x", "--file", "F", "--limits", "concurrent=0"], "from 1 to"),
        (["add", "x", "--file", "F", "--limits", "concurrent=1,concurrent=2"], "at most once"),
        (
            ["add", "x", "--file", "F", "--role", "metrics", "--limits", "concurrent=1"],
            "--limits: a key of the role metrics sends no requests",
        ),
    ],
)
def test_refusals(
    arguments: list[str], told: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "add", "old", "--file", path)
    before = path.read_bytes()
    given = [word.replace("F", str(path)) if word.startswith("F") else word for word in arguments]
    assert told in refused(capsys, *given)
    assert path.read_bytes() == before


def test_commands_at_once_lose_no_key(path: Path) -> None:
    """Each reads the file, and replaces it by one with a line more."""
    code = "import sys; from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"
    started = [
        subprocess.Popen([sys.executable, "-c", code, "keys", "add", f"k{i}", "--file", str(path)])
        for i in range(4)
    ]
    assert [one.wait(PATIENCE) for one in started] == [0] * 4
    assert {key.name for key in read_keys(path)} == {f"k{i}" for i in range(4)}
