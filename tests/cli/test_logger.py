"""Logging: one handler, one format, no harm to programs that configure their own."""

from __future__ import annotations

import io
import json
import logging
import os
import re

import pytest

from quire import envs
from quire import logger as quire_logger
from quire.errors import ConfigError
from quire.logger import get_logger, setup_logging

LINE = re.compile(r"^\(Test pid=\d+\) [A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[test_logger\.py:\d+\] .*$")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in envs.table():
        for prefix in envs.PREFIXES:
            monkeypatch.delenv(prefix + name, raising=False)
    root = logging.getLogger("quire")
    before = (root.handlers[:], root.level, root.propagate)
    name, said = quire_logger._process_name, set(quire_logger._said)
    root.handlers[:] = []
    yield
    root.handlers[:], root.level, root.propagate = before
    root.manager._clear_cache()
    quire_logger._process_name = name
    quire_logger._said.clear()
    quire_logger._said.update(said)


@pytest.fixture
def err(capsys):
    class Err:
        text = ""

        def getvalue(self) -> str:
            """Everything written to stderr so far."""
            self.text += capsys.readouterr().err
            return self.text

    return Err()


def test_format(err):
    setup_logging("Test")
    get_logger("quire.some.module").info("loaded %d blocks", 7)
    line = err.getvalue().removesuffix("\n")
    assert LINE.match(line), line
    assert f"pid={os.getpid()}) INFO " in line and line.endswith("] loaded 7 blocks")


def test_no_text_can_pass_for_a_record(err):
    setup_logging("Test")
    get_logger("quire.x").warning("one\n(APIServer pid=1) ERROR fake\r\nthree")
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("quire.x").exception("failed")
    lines = err.getvalue().splitlines()
    assert len(lines) > 5 and all(LINE.match(line) for line in lines)
    assert lines[-1].endswith("ValueError: boom")


def test_level_comes_from_the_variable(err, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    setup_logging("Test")
    get_logger("quire.x").warning("no")
    get_logger("quire.x").error("yes")
    assert "yes" in err.getvalue() and "no" not in err.getvalue()


def test_setting_up_twice_does_not_print_twice(err):
    setup_logging("Test")
    setup_logging("Test")
    get_logger("quire.x").info("once")
    assert err.getvalue().count("once") == 1


def test_once_helpers(err):
    setup_logging("Test")
    log = get_logger("quire.x")
    for number in (1, 1, 2):
        log.warning_once("value %d", number)
        log.info_once("value %d", number)
    lines = err.getvalue().splitlines()
    assert len(lines) == 4 and all(LINE.match(line) for line in lines)  # the caller's own file


def test_once_memory_is_bounded(err):
    setup_logging("Test")
    log = get_logger("quire.x")
    for number in range(3000):
        log.info_once("value %d", number)
    assert len(quire_logger._said) <= 1024


def test_programs_that_configure_the_root_see_nothing_twice_and_get_debug(err, monkeypatch):
    root = logging.getLogger()
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.DEBUG)
    setup_logging("Test")
    get_logger("quire.x").debug("detail")
    assert err.getvalue().count("detail") == 1 and handler.stream.getvalue() == ""
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "INFO")  # said explicitly: stronger
    setup_logging("Test")
    get_logger("quire.x").debug("more")
    assert "more" not in err.getvalue()


def test_logging_can_be_left_alone(err, monkeypatch):
    monkeypatch.setenv("QUIRE_CONFIGURE_LOGGING", "0")
    setup_logging("Test")
    get_logger("quire.x").error("whose?")
    assert "whose?" not in err.getvalue()


def test_configuration_file(err, monkeypatch, tmp_path):
    path = tmp_path / "logging.json"
    monkeypatch.setenv("QUIRE_LOGGING_CONFIG_PATH", str(path))
    out = tmp_path / "out.log"
    handler = {"class": "logging.FileHandler", "filename": str(out)}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"file": handler},
        "loggers": {"quire": {"handlers": ["file"], "level": "DEBUG", "propagate": False}},
    }
    path.write_text(json.dumps(config))
    setup_logging("Test")
    get_logger("quire.x").debug("to the file")
    for opened in logging.getLogger("quire").handlers:
        opened.close()
    assert out.read_text() == "to the file\n" and err.getvalue() == ""


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 1, "handlers": {"a": {"class": "no.X"}}}']
)
def test_bad_configuration_files(monkeypatch, tmp_path, text):
    path = tmp_path / "logging.json"
    path.write_text(text)
    monkeypatch.setenv("QUIRE_LOGGING_CONFIG_PATH", str(path))
    with pytest.raises(ConfigError, match="QUIRE_LOGGING_CONFIG_PATH"):
        setup_logging("Test")
    monkeypatch.setenv("QUIRE_CONFIGURE_LOGGING", "0")
    with pytest.raises(ConfigError, match="unset one of them"):
        setup_logging("Test")


def test_color(monkeypatch, err):
    monkeypatch.setenv("QUIRE_LOGGING_COLOR", "1")
    setup_logging("Test")
    get_logger("quire.x").error("red")
    assert "\x1b[31mERROR\x1b[0m" in err.getvalue()


def test_json_lines(err, monkeypatch):
    monkeypatch.setenv("QUIRE_LOGGING_FORMAT", "json")
    monkeypatch.setenv("QUIRE_LOGGING_PREFIX", "replica-3")
    setup_logging("Test")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        get_logger("quire.some.module").exception("loaded %d\nblocks", 7)
    (line,) = err.getvalue().splitlines()
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry.pop("time"))
    assert isinstance(entry.pop("line"), int)
    assert entry.pop("exception").startswith("Traceback")
    assert entry == {
        "level": "ERROR",
        "logger": "quire.some.module",
        "file": "test_logger.py",
        "process": "Test",
        "pid": os.getpid(),
        "message": "loaded 7\nblocks",
        "prefix": "replica-3",
    }


def test_prefix(err, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "[replica 3]")
    setup_logging("Test")
    get_logger("quire.some.module").info("a\nb")
    for line in err.getvalue().splitlines():
        assert line.startswith("[replica 3] (Test pid=") and LINE.match(line[len("[replica 3] ") :])
