"""The registry: lazy rows, and errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.cli.serve import build_parser
from quire.errors import ConfigError, ModelLoadError
from quire.registry import Registry, load
from quire.spelling import did_you_mean, nearest


def test_rows_are_imported_on_first_use_only():
    registry: Registry[object] = Registry(
        "thing", {"good": "fractions:Fraction", "bad": "no.such.module:X"}
    )
    assert "bad" in registry and list(registry) == ["good", "bad"] and len(registry) == 2
    from fractions import Fraction

    assert registry.get("good") is Fraction
    assert registry.target("bad") == "no.such.module:X"
    with pytest.raises(ModuleNotFoundError):
        registry.get("bad")


def test_unknown_names():
    registry: Registry[int] = Registry("policy", {"fcfs": 1, "priority": 2}, error=ModelLoadError)
    with pytest.raises(ModelLoadError) as caught:
        registry.get("fifs")
    assert str(caught.value) == (
        "unknown policy 'fifs'; did you mean 'fcfs'? Known: fcfs, priority"
    )
    with pytest.raises(ConfigError, match="Known: none"):
        Registry[int]("x").get("y")


def test_rows_are_not_replaced():
    registry: Registry[int] = Registry("number", {"one": 1})
    registry.register("two", 2)
    assert registry.get("two") == 2
    with pytest.raises(ValueError, match="'one' is registered already"):
        registry.register("one", 3)


def test_targets():
    assert load("os.path:join") is __import__("os").path.join
    for bad in ("os.path", ":join", "os.path:"):
        with pytest.raises(ValueError, match=r"package\.module:attribute"):
            load(bad)
    with pytest.raises(ImportError, match="has no attribute 'nothing'"):
        load("os.path:nothing")


def test_near_names():
    assert nearest("LlamaForCasualLM", ["LlamaForCausalLM", "Qwen2ForCausalLM"]) == (
        "LlamaForCausalLM"
    )
    assert nearest("zzz", ["abc"]) is None
    assert did_you_mean("abd", ["abc"]) == "; did you mean 'abc'?" and did_you_mean("z", []) == ""


FLAGS = build_parser().suggested


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--prot", "--port"),
        ("--dtpye", "--dtype"),
        ("--max-seqs", "--max-num-seqs"),
        ("--max_num_batch_token", "--max-num-batched-tokens"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--Model", "--model"),
        # Far-fetched: a whole word is another, or there are more words than in ours.
        ("--headless", None),
        ("--kernel-config", None),
        ("--lora-dtype", None),
        ("--dbo-prefill-token-threshold", None),
        ("--x", None),
        ("--", None),
        ("--" + 100_000 * "max-num-seqs-", None),
    ],
)
def test_a_suggestion_is_near_or_not_made(given: str, meant: str | None) -> None:
    assert nearest(given, FLAGS) == meant


@pytest.mark.parametrize(
    "given",
    ["--allow-credentials", "--allow-unauthenticate", "--alow-unauthenticated", "allow"],
)
def test_no_suggestion_opens_a_door(given: str) -> None:
    assert nearest(given, FLAGS) is None
    assert nearest("trust-remote-cod", ["trust_remote_code"]) is None


def test_suggestions_come_from_one_function() -> None:
    source = Path(quire.__file__).parent
    users = [path for path in source.rglob("*.py") if "difflib" in path.read_text("utf-8")]
    assert users == [source / "spelling.py"]
