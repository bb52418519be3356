"""Environment variables: one table, two spellings, no bad value passes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from quire import envs
from quire.errors import ConfigError

SOURCE = Path(envs.__file__).parent


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in envs.table():
        for prefix in envs.PREFIXES:
            monkeypatch.delenv(prefix + name, raising=False)


def test_defaults_without_any_variable():
    assert envs.LOGGING_LEVEL == "INFO"
    assert envs.LOG_STATS_INTERVAL == 10.0
    assert envs.API_KEY is None
    envs.ensure_valid()


def test_quire_wins_over_vllm_and_reading_is_lazy(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert envs.LOGGING_LEVEL == "DEBUG"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "ERROR")
    assert envs.get("LOGGING_LEVEL") == "ERROR"
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "")  # empty is unset
    assert envs.LOGGING_LEVEL == "DEBUG"
    assert envs.source("LOGGING_LEVEL") == "VLLM_LOGGING_LEVEL"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LOG_STATS_INTERVAL", "0", 10.0),
        ("LOG_STATS_INTERVAL", "-3", 10.0),
        ("LOG_STATS_INTERVAL", "0.5", 0.5),
        ("CPU_KVCACHE_SPACE", "1.5", 1.5),
        ("CONFIGURE_LOGGING", "0", False),
        ("CONFIGURE_LOGGING", "True", True),
        ("LOGGING_STREAM", "ext://sys.stdout", "stdout"),
        ("KERNELS", "reference", "reference"),
        ("USE_V1", "1", True),
    ],
)
def test_values(monkeypatch, name, text, value):
    monkeypatch.setenv(f"VLLM_{name}", text)
    assert envs.get(name) == value


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("LOGGING_LEVEL", "LOUD", "one of DEBUG, INFO"),
        ("LOG_STATS_INTERVAL", "often", "a number"),
        ("LOG_STATS_INTERVAL", "nan", "a number"),
        ("CPU_KVCACHE_SPACE", "-1", "at least 0"),
        ("CPU_KVCACHE_SPACE", "inf", "a number"),
        ("CONFIGURE_LOGGING", "2", "one of 1"),
        ("KERNELS", "fast", "one of auto, native, reference"),
        ("USE_V1", "0", "one engine"),
    ],
)
@pytest.mark.parametrize("prefix", envs.PREFIXES)
def test_a_bad_value_names_variable_value_and_rule(monkeypatch, prefix, name, text, told):
    monkeypatch.setenv(prefix + name, text)
    with pytest.raises(ConfigError) as caught:
        envs.ensure_valid()
    assert str(caught.value).startswith(prefix + name)
    assert told in str(caught.value) and repr(text) in str(caught.value)


def test_every_row_has_help_and_a_default_of_its_type():
    hints = inspect.get_annotations(envs)
    for name, row in envs.table().items():
        assert row.help.endswith("."), name
        kind = hints[name].__origin__
        assert row.default is None or isinstance(row.default, kind), name


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError):
        _ = envs.NO_SUCH_VARIABLE
    with pytest.raises(KeyError):
        envs.get("NO_SUCH_VARIABLE")


def test_variables_without_effect_are_told(monkeypatch):
    monkeypatch.setenv("QUIRE_LOGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "3")
    monkeypatch.setenv("QUIRE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("QUIRE_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    told = envs.without_effect()
    assert any("QUIRE_LOGING_LEVEL" in t and "'QUIRE_LOGGING_LEVEL'" in t for t in told)
    assert any(t.startswith("VLLM_FLASH_ATTN_VERSION is set") for t in told)
    assert not any("SERVICE" in t or "8000" in t for t in told)


def test_no_module_reads_the_environment_around_the_table():
    """`os.environ[...]` of a QUIRE_ or VLLM_ name elsewhere would be a second table."""
    for path in SOURCE.rglob("*.py"):
        if path.name == "envs.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.getenv",
                "os.environ.get",
            ):
                assert not ast.unparse(node.args[0]).startswith(("'QUIRE_", "'VLLM_")), path
