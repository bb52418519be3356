"""A user's own policy: the documented example works, everything else is refused in one line."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from documented import modules
from quire.config.scheduler import SchedulerConfig
from quire.core.policy_loader import make_policy, policy_class
from quire.errors import ConfigError, InvalidRequest

Make = Callable[..., Any]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`module(source)` makes a module `own_policy` importable."""
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda source: (tmp_path / "own_policy.py").write_text(source, "utf-8") and None
    sys.modules.pop("own_policy", None)


def documented_example() -> str:
    return modules("A policy")["lifo_policy"]


def test_the_documented_example_works(make: Make, module: Callable[[str], None]) -> None:
    source = documented_example()
    module(source)
    bench = make(seqs=1, scheduler_cls="own_policy:LastComeFirstServed")
    for name in "abc":
        bench.add(name, [ord(name)] * 5, max_tokens=2)
    bench.scheduler.check_integrity()
    assert bench.drain() == ["c", "b", "a"]


def test_the_policy_cannot_be_changed_while_running_with_an_own_class(
    make: Make, module: Callable[[str], None]
) -> None:
    module(documented_example())
    bench = make(scheduler_cls="own_policy:LastComeFirstServed")
    with pytest.raises(InvalidRequest, match="own_policy:LastComeFirstServed decides"):
        bench.scheduler.set_limits(scheduling_policy="sjf")


HEAD = "from quire.core.policies import FCFS, Policy\n"
REFUSED = [
    ("raise RuntimeError('two\\nlines')", "Own", "cannot be imported: RuntimeError: two lines"),
    ("x = 1", "Own", "cannot be imported: ImportError: module 'own_policy' has no .*'Own'"),
    ("class Own: pass", "Own", "is not a subclass of quire.core.policies.Policy"),
    ("Own = 3", "Own", "is not a subclass of quire.core.policies.Policy"),
    (
        HEAD + "class Own(Policy):\n  def __len__(self): return 0\n  def __iter__(self): yield",
        "Own",
        "does not define add_request, peek_request, prepend_request, remove_request",
    ),
    (
        HEAD + "class Own(FCFS):\n  def __init__(self, config): pass",
        "Own",
        "__init__ fails: TypeError: .*",
    ),
    (
        HEAD + "class Own(FCFS):\n  def peek_request(self, now): return None",
        "Own",
        "peek_request breaks the contract of Policy.peek_request",
    ),
    (
        HEAD + "class Own(FCFS):\n  def peek_request(self, now): return [][0]",
        "Own",
        "peek_request fails: IndexError: list index out of range",
    ),
    (
        HEAD + "class Own(FCFS):\n  def remove_request(self, request): pass",
        "Own",
        "remove_request breaks the contract of Policy.remove_request",
    ),
    (
        HEAD + "class Own(FCFS):\n  def choose_victim(self, running): return 0",
        "Own",
        "choose_victim breaks the contract of Policy.choose_victim",
    ),
]


@pytest.mark.parametrize(("source", "name", "why"), REFUSED)
def test_what_is_no_working_policy_is_refused_in_one_line(
    module: Callable[[str], None], source: str, name: str, why: str
) -> None:
    module(source)
    with pytest.raises(ConfigError) as caught:
        policy_class(SchedulerConfig(scheduler_cls=f"own_policy:{name}"))
    assert re.fullmatch(f"--scheduler-cls own_policy:{name} {why}", caught.value.message)


def test_the_users_traceback_is_in_the_debug_log(
    module: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    module("def helper():\n    raise RuntimeError('deep inside')\nhelper()")
    with caplog.at_level(logging.DEBUG, logger="quire"), pytest.raises(ConfigError):
        make_policy(SchedulerConfig(scheduler_cls="own_policy:Own"))
    assert "in helper" in caplog.text
