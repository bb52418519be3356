"""Keys of a file: what a line may say, when they hold, and how a changed file is taken up."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import pytest

from quire.config import ServerConfig
from quire.config.key_file import KeyLine, digest_of, parse, read_keys, read_time
from quire.errors import ConfigError, Unauthorized
from quire.serving import auth
from quire.serving.auth import KeyRing, Role

NOON = read_time("2030-01-01T12:00:00Z")
ANN, BOB = digest_of(b"ann-key"), digest_of(b"bob-key")


def line(name: str, digest: bytes, *rest: str) -> str:
    return ":".join((name, digest.hex(), *rest))


def sent(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-api-key", key.encode())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    made.write_text(line("ann", ANN) + "\n")
    made.chmod(0o600)
    return made


def ring(path: Path, now: float = NOON, **options: object) -> KeyRing:
    config = ServerConfig(api_key_file=str(path), **options)  # type: ignore[arg-type]
    return KeyRing(config, lambda: now)


def test_lines() -> None:
    text = f"# ours\n\n{line('ann', ANN)}\n  {line('b.2', BOB, 'admin', 'expires=2030-01-01')}  \n"
    first, second = parse(text)
    assert first == KeyLine("ann", ANN)
    assert second == KeyLine("b.2", BOB, "admin", read_time("2030-01-01T00:00:00Z"))
    assert parse("\n".join(map(str, (first, second)))) == [first, second]
    assert parse(line("x", ANN, "user", "expires=2030-01-01T13:00:00+01:00"))[0].expires == NOON


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no key"),
        ("# nothing", "holds no key"),
        ("sk-a-secret", "line 1: it must be name:sha256"),
        (f"sk secret:{ANN.hex()}", "line 1: the name must be"),
        (line("ann", ANN) + "\nbob:a-secret-key", "line 2: the second field must be"),
        (line("ann", ANN)[:-1], "64 hexadecimal digits"),
        (line("ann", ANN, "root"), "the role must be one of user, admin, metrics"),
        (line("ann", ANN, ""), "the role must be one of"),
        (line("ann", ANN, "user", "speed=3"), "options are expires"),
        (line("ann", ANN, "user", "expires"), "options are expires"),
        (line("ann", ANN, "user", "expires=soon"), "the value of expires is not valid: 'soon'"),
        (line("ann", ANN, "user", "expires=2030-01-01,expires=2031-01-01"), "at most once"),
        (line("ann", ANN) + "\n" + line("ann", BOB), "line 2: the name or the digest"),
        (line("ann", ANN) + "\n" + line("bob", ANN), "line 2: the name or the digest"),
    ],
)
def test_wrong_lines(text: str, told: str, path: Path) -> None:
    """The error names the line, and shows nothing that could be a key."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ring(path)
    assert told in caught.value.message and "secret" not in caught.value.message.split("keys'")[1]


def test_files_that_cannot_be_used(path: Path) -> None:
    path.chmod(0o602)
    with pytest.raises(ConfigError, match="everybody may write"):
        read_keys(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(path)
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than 1048576"):
        read_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(path.with_name("none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_keys(path.parent)


def test_a_key_holds_until_it_expires(path: Path) -> None:
    path.write_text(line("ann", ANN, "user", "expires=2030-01-01T12:00:00Z"))
    assert ring(path, NOON - 1).caller(sent("ann-key")).roles == {Role.OPEN, Role.USER}
    with pytest.raises(Unauthorized, match="expired at 2030-01-01T12:00:00Z"):
        ring(path, NOON).caller(sent("ann-key"))
    with pytest.raises(Unauthorized, match="is wrong"):
        ring(path, NOON).caller(sent("bob-key"))


def test_a_changed_file_is_taken_up(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ring(path, api_key=["plain"])
    new = path.with_name("new")
    new.write_text(line("bob", BOB, "admin"))
    new.chmod(0o600)
    os.replace(new, path)
    keys.reload()
    assert keys.caller(sent("bob-key")).roles == set(Role)
    assert keys.caller(sent("plain")).roles == {Role.OPEN, Role.USER}
    with pytest.raises(Unauthorized):
        keys.caller(sent("ann-key"))
    path.write_text(line("bob", BOB, "user") + "\n" + line("ann", ANN, "metrics"))
    keys.reload()
    assert keys.caller(sent("ann-key")).roles == {Role.OPEN, Role.METRICS}
    assert keys.caller(sent("bob-key")).roles == {Role.OPEN, Role.USER}


@pytest.mark.parametrize("bad", ["", "nonsense", None])
def test_a_bad_file_changes_nothing_and_the_log_says_why(
    path: Path,
    bad: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    keys = ring(path)
    path.unlink() if bad is None else path.write_text(bad)
    keys.reload()
    told = [text for text in caplog.messages if "the keys stay as they were" in text]
    assert told and str(path) in told[0]
    keys.reload()
    assert len([text for text in caplog.messages if "stay as they were" in text]) == len(told)
    assert keys.caller(sent("ann-key")).owner == ANN
    with pytest.raises(Unauthorized):
        keys.caller([])
    path.write_text(line("bob", BOB))
    keys.reload()
    assert keys.caller(sent("bob-key")).owner == BOB
    path.write_text("nonsense again")
    keys.reload()
    assert keys.caller(sent("bob-key")).owner == BOB


async def test_the_file_is_watched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.0)
    keys = ring(path)
    used = keys._use

    class Enough(Exception):
        pass

    def use(lines: list[KeyLine]) -> None:
        used(lines)
        raise Enough

    monkeypatch.setattr(keys, "_use", use)
    path.write_text(line("bob", BOB))
    with pytest.raises(Enough):
        await keys.watch()
    assert keys.caller(sent("bob-key")).owner == BOB


def test_every_key_is_compared_whichever_fits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ring(path, api_key=["one", "two"], admin_api_key=["three"])
    compared = []
    compare = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for key in ("three", "two", "ann-key", "none of them"):
        compared.clear()
        try:
            keys.caller(sent(key))
        except Unauthorized:
            assert key == "none of them"
        assert len(compared) == 4, key


def test_names_are_told_only_if_there_are_several_keys(path: Path) -> None:
    assert ring(path).caller(sent("ann-key")).name == ""
    several = ring(path, api_key=["one"], admin_api_key=["two"])
    assert several.caller(sent("ann-key")).name == "ann"
    assert several.caller(sent("one")).name == "key 0"
    assert several.caller(sent("two")).name == "admin key 0"


def test_who_a_request_of_another_process_was_from(path: Path) -> None:
    keys = ring(path, api_key=["one"])
    assert keys.owner(ANN).name == "ann"
    gone = keys.owner(BOB)
    assert (gone.name, gone.owner, gone.roles) == ("", BOB, {Role.OPEN, Role.USER})
