"""Rows that installed distributions add: found on demand, by name, and never in silence."""

from __future__ import annotations

import ast
import itertools
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from distributions import Distributions, entry_points
from quire import LLM, envs, plugins
from quire.errors import ConfigError
from quire.registry import Registry, load

_names = (f"kind{i}" for i in itertools.count())


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    """A table of its own for each test: what it has loaded stays loaded."""
    name = next(_names)
    monkeypatch.setitem(plugins.TABLES, name, "nowhere:TABLE")
    return Registry("thing", {"own": "fractions:Fraction"}, plugins=name)


def offer(table: Registry[object], **rows: str) -> str:
    return entry_points(**{f"{table.plugins}__{name}": at for name, at in rows.items()})


def test_a_row_is_found_by_its_name_and_imported_when_it_is_used(
    table: Registry[object], distributions: Distributions
) -> None:
    rows = offer(table, good="good_plugin:VALUE", other="no_such_module:X")
    distributions.install("quire-good", {"good_plugin": "VALUE = 7"}, rows)
    assert table.names() == ["own", "good", "other"] and "good" in table
    assert "good_plugin" not in sys.modules
    assert table.get("good") == 7
    assert list(table) == ["own"], "a walk over the built-in rows looks for nothing"


def test_a_broken_one_is_told_with_its_origin_and_disturbs_nothing(
    table: Registry[object], distributions: Distributions, caplog: pytest.LogCaptureFixture
) -> None:
    rows = offer(
        table, broken="broken_plugin:X", absent="whole_plugin:Missing", whole="whole_plugin:X"
    )
    source = "def helper():\n    raise RuntimeError('two\\nlines')\nhelper()\n"
    distributions.install("quire-bad", {"broken_plugin": source, "whole_plugin": "X = 1"}, rows)
    where = f"(entry point {table.plugins}.broken of quire-bad 1.0)"
    with (
        caplog.at_level(logging.DEBUG, logger="quire"),
        pytest.raises(ConfigError) as caught,
    ):
        table.get("broken")
    told = f"thing 'broken' {where} cannot be imported: RuntimeError: two lines"
    assert caught.value.message == told
    with pytest.raises(ConfigError, match="'whole_plugin' has no attribute 'Missing'"):
        table.get("absent")
    assert table.get("whole") == 1 and table.get("own") is not None


def test_two_of_one_name_are_refused(table: Registry[object], distributions: Distributions) -> None:
    for name in ("quire-one", "quire-two"):
        rows = offer(table, same="same_plugin:X", **{name[6:]: "same_plugin:X"})
        distributions.install(name, {"same_plugin": "X = 1"}, rows)
    with pytest.raises(ConfigError) as caught:
        table.get("same")
    assert "quire-one 1.0" in caught.value.message and "quire-two 1.0" in caught.value.message
    assert "uninstall one" in caught.value.message
    assert table.get("one") == table.get("two") == 1


def test_a_built_in_row_is_not_replaced(
    table: Registry[object], distributions: Distributions, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    distributions.install("quire-rude", {"rude": "X = 1"}, offer(table, own="rude:X"))
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert table.names() == ["own"]
    assert table.get("own") is load("fractions:Fraction")
    told = f"entry point {table.plugins}.own of quire-rude 1.0 is ignored: that name is quire's own"
    assert told in caplog.messages


def test_a_name_of_no_table_is_told(
    table: Registry[object], distributions: Distributions, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    distributions.install("quire-lost", {}, entry_points(polcy__mine="a:b", lone="a:b"))
    with caplog.at_level(logging.WARNING, logger="quire"):
        table.names()
    text = "\n".join(caplog.messages)
    assert "polcy.mine of quire-lost 1.0 is ignored: its name must be TABLE.NAME" in text
    assert "did you mean 'policy'?" in text and "entry point lone of" in text


def test_the_variable_limits_what_counts(
    table: Registry[object], distributions: Distributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        rows = offer(table, **{name: "limited:X"})
        distributions.install(f"quire-{name}", {"limited": "X = 1"}, rows)

    def names(wanted: str) -> list[str]:
        monkeypatch.setenv("QUIRE_PLUGINS", wanted)
        plugins.forget()
        return table.names()[1:]

    assert names(f"{table.plugins}.first") == ["first"]
    assert names("quire-second") == ["second"]
    assert names(f"quire-second, {table.plugins}.first") == ["first", "second"]
    assert names("none") == []
    with pytest.raises(ConfigError, match="QUIRE_PLUGINS names quire-third, which no installed"):
        names("quire-first,quire-third")
    with pytest.raises(ConfigError, match="QUIRE_PLUGINS must be names separated by commas"):
        names("a,,b")
    monkeypatch.delenv("QUIRE_PLUGINS")
    monkeypatch.setenv("VLLM_PLUGINS", "quire-first")
    assert envs.PLUGINS == ("quire-first",), "vLLM's variable is read as well"


@pytest.mark.parametrize(("source", "error"), [
    ("X = 3", "is not a subclass of fractions.Fraction"),
    ("class X: pass", "is not a subclass of fractions.Fraction"),
])  # fmt: skip
def test_a_row_of_another_kind_is_refused(
    distributions: Distributions, monkeypatch: pytest.MonkeyPatch, source: str, error: str
) -> None:
    name = next(_names)
    monkeypatch.setitem(plugins.TABLES, name, "nowhere:TABLE")
    table: Registry[object] = Registry("number", plugins=name, subclass_of="fractions:Fraction")
    distributions.install("quire-odd", {"odd": source}, offer(table, odd="odd:X"))
    with pytest.raises(ConfigError, match=error):
        table.get("odd")


def test_an_engine_does_not_start_without_a_plugin_that_it_is_told_of(
    distributions: Distributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", "policy.nowhere")
    with pytest.raises(ConfigError, match="QUIRE_PLUGINS names policy.nowhere, which no installed"):
        LLM()


def test_the_list_of_tables_is_whole() -> None:
    for name, place in plugins.TABLES.items():
        table = load(place)
        assert isinstance(table, Registry) and table.plugins == name, place
    source = Path(quire.__file__).parent
    declared = {
        str(word.value.value)
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Registry"
        for word in node.keywords
        if word.arg == "plugins" and isinstance(word.value, ast.Constant)
    }
    assert declared == set(plugins.TABLES)


@pytest.mark.parametrize("code", [
    "from quire.cli.main import main; main(['serve', '--help'])",
    "from quire import LLM; LLM(max_num_seqs=2).generate('One', use_tqdm=False)",
    "from quire import LLM; LLM('quire-demo', runner='pooling').embed('One', use_tqdm=False)",
])  # fmt: skip
def test_a_plain_start_looks_for_none(code: str) -> None:
    guarded = f"try:\n    {code}\nexcept SystemExit: pass\n"
    guarded += "import sys\nmodule = sys.modules.get('quire.plugins')\n"
    guarded += "assert module is None or not module._all_plugins.cache_info().currsize\n"
    done = subprocess.run([sys.executable, "-c", guarded], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
