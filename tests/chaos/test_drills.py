"""Faults that the server survives, each small; and conditions that notice when they are broken.

`make chaos` runs all faults with more of everything.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conditions import (
    bystanders_untouched,
    no_content_in_logs,
    nothing_lost,
    same_bytes,
)
from drill import Result, table, try_fault
from faults import SIZES, faults
from mixed_load import CANARY, SECRET, Load, Outcome, mixed_asks

SMALL = ("F1", "F3", "F7", "F10", "F11", "F12", "F13", "F14", "F24", "F21")
"""The most telling of those that hold and take seconds."""


@pytest.mark.parametrize("name", SMALL)
def test_a_fault_that_is_survived(name: str) -> None:
    """The conditions that have no clock: a busy machine must not fail them."""
    fault = faults()[name]
    if not fault.promised:
        pytest.skip(f"there is no {fault.mechanism} yet")
    result = asyncio.run(try_fault(name, fault, SIZES["short"]))
    told = {k: v for k, v in result.complaints.items() if k not in ("bounded", "signals")}
    assert not told, table([result])
    assert result.requests, "nobody asked anything"


def test_every_row_tells_its_state() -> None:
    """What is not built is in the report, and is never promised."""
    rows = faults()
    assert list(rows) == [f"F{number}" for number in range(25)]
    lines = table([Result(n, f.injected, f.mechanism, False, "not built") for n, f in rows.items()])
    assert all(f"| {name} " in lines for name in rows)
    assert all(fault.driver for fault in rows.values() if fault.promised)


def answer(text: str = "yes") -> Outcome:
    return Outcome(200, {0: [text, "length", None, {}]}, {"total_tokens": 3})


def trial(got: Outcome, canary: Outcome, log: str = "") -> Any:
    """A trial of one greedy request, whose answer should be "yes"."""
    load = Load("", mixed_asks(1), [answer()], [(0, got)], canaries=[canary])
    server = SimpleNamespace(log=log)
    return SimpleNamespace(
        load=load, server=server, canary=answer(), allowed=lambda out: False, retold={}
    )


BROKEN = {
    "an error": (nothing_lost, Outcome(200, {0: ["ye", None, None, {}]}, None, None, {"code": 1})),
    "no end": (nothing_lost, Outcome(200, {0: ["yes", None, None, {}]})),
    "a broken connection": (nothing_lost, Outcome(0, error="ReadError")),
    "another text": (same_bytes, answer("no")),
    "a repeated token": (same_bytes, answer("yeses")),
    "another beginning": (same_bytes, Outcome(200, {0: ["yo", None, None, {}]}, error="x")),
    "another usage": (same_bytes, Outcome(200, answer().choices, {"total_tokens": 4})),
    "a canary's": (bystanders_untouched, answer("no")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_condition_notices(what: str) -> None:
    check, got = BROKEN[what]
    broken = trial(got, got) if check is bystanders_untouched else trial(got, answer())
    assert list(check(broken))
    assert not list(check(trial(answer(), answer())))


def test_a_prompt_in_the_log_is_noticed() -> None:
    assert SECRET in str(CANARY.body) and all(SECRET in str(a.body) for a in mixed_asks(18))
    assert list(no_content_in_logs(trial(answer(), answer(), f"prompt: {SECRET}")))
    assert not list(no_content_in_logs(cast(Any, trial(answer(), answer(), "prompt: 7 tokens"))))
