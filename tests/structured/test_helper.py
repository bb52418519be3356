"""Grammars of clients are compiled where they can be killed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from patience import wait_for
from quire.errors import InvalidRequest, RequestError, TooManyRequests
from quire.params import StructuredOutputsParams
from quire.structured.gate import verdict_key
from quire.structured.helper import HelperGate
from quire.utils.helpers import pool
from quire.utils.helpers.words import HelperLimits
from vocabularies import DEMO, END, demo


def make(limits: HelperLimits | None = None, max_wait: float = math.inf) -> HelperGate:
    """A gate at which nobody waits too long, however busy the machine is."""
    return HelperGate(lambda: DEMO.read_text("utf-8"), 2048, [END], limits, max_wait)


@pytest.fixture
def gate() -> Iterator[HelperGate]:
    made = make()
    yield made
    made.close()


def helpers() -> list[psutil.Process]:
    """Those of this process and what they forked; a server of another test has its own."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "Gramm" in child.name():
                found += [child, *child.children(recursive=True)]
    return found


async def verdict(gate: HelperGate, params: StructuredOutputsParams) -> str:
    try:
        await gate.prepare(params)
        gate.settle(params)
    except RequestError as error:
        return error.message
    return "served"


async def test_verdicts_are_those_of_this_process(gate: HelperGate) -> None:
    good = StructuredOutputsParams(json={"type": "object"})
    await gate.prepare(good)
    assert gate.settle(good) == demo().settle(good)
    for bad in ({"regex": "("}, {"json": {"not": {}}}, {"grammar": "root ::= a"}):
        params = StructuredOutputsParams(**bad)
        said = await verdict(gate, params)
        with pytest.raises(InvalidRequest) as found:
            demo().check(demo().settle(params))
        assert said == found.value.message


def test_settle_alone_waits(gate: HelperGate) -> None:
    assert gate.settle(StructuredOutputsParams(choice=["a"])).kind == "choice"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (HelperLimits(cpu_seconds=0.001), "more than 0.001 seconds"),
        (HelperLimits(wall_seconds=0.001), "more than 0.001 seconds"),
        (HelperLimits(memory=2**16), "more memory"),
    ],
)
async def test_what_exceeds_a_limit_is_killed_and_the_helper_stays(
    limits: HelperLimits, said: str
) -> None:
    gate = make(limits)
    try:
        big = StructuredOutputsParams(choice=[f"choice {i}" for i in range(9000)])
        assert said in await verdict(gate, big)
        [process] = helpers()
        again = StructuredOutputsParams(choice=[f"choice {i}" for i in range(9001)])
        assert said in await verdict(gate, again)
        assert helpers() == [process]
    finally:
        gate.close()


@pytest.mark.parametrize(("limits", "passes"), [
    (HelperLimits(cpu_seconds=0.001), False),
    (HelperLimits(wall_seconds=0.001), True),
])  # fmt: skip
async def test_only_what_the_grammar_is_at_fault_for_is_remembered(
    limits: HelperLimits, passes: bool
) -> None:
    """A machine that was busy for a while must not refuse a good grammar ever after."""
    gate = make(limits)
    big = StructuredOutputsParams(choice=[f"choice {i}" for i in range(9000)])
    try:
        for ask in (gate.prepare(big), asyncio.to_thread(gate.settle, big)):
            with pytest.raises(TooManyRequests if passes else InvalidRequest, match="more than"):
                await ask
                gate.settle(big)
        assert (gate._verdicts.find(verdict_key(big)) is None) == passes
    finally:
        gate.close()


async def test_whose_helpers_die_may_come_again(
    gate: HelperGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = StructuredOutputsParams(regex="a+")
    with monkeypatch.context() as patched:
        patched.setattr(pool, "receive", lambda sock: None)
        for _ in range(2):
            with pytest.raises(TooManyRequests, match="could not be compiled.*Send it again later"):
                await gate.prepare(good)
    assert await verdict(gate, good) == "served"


async def test_a_killed_helper_does_not_stay_a_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REAP_SECONDS", 0.01)
    gate = make()
    await gate.prepare(StructuredOutputsParams(regex="a+"))
    killed = helpers()
    assert killed
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.to_thread(wait_for, lambda: not any(p.is_running() for p in killed))
    gate.close()


async def test_a_killed_helper_is_replaced(gate: HelperGate) -> None:
    assert await verdict(gate, StructuredOutputsParams(regex="a")) == "served"
    for process in helpers():
        with suppress(psutil.NoSuchProcess):  # the child of one that was killed
            process.kill()
    assert await verdict(gate, StructuredOutputsParams(regex="b")) == "served"


async def test_who_waits_too_long_is_refused() -> None:
    gate = make(max_wait=0.0)
    try:
        with pytest.raises(TooManyRequests, match="within 0 seconds"):
            await gate.prepare(StructuredOutputsParams(regex="a"))
    finally:
        gate.close()


async def test_equal_grammars_are_compiled_once_and_waiting_can_be_left(gate: HelperGate) -> None:
    params = StructuredOutputsParams(regex="[a-z]{1,90}")
    left, stayed = (asyncio.create_task(verdict(gate, params)) for _ in range(2))
    await asyncio.sleep(0)
    assert len(gate._jobs) == 1
    left.cancel()
    assert await stayed == "served"
    assert not gate._jobs


def bombs(count: int) -> list[StructuredOutputsParams]:
    """Grammars that make naive engines run for ever, all different."""
    rows = [
        lambda i: {"regex": f"(x+x+)+y{i}"},
        lambda i: {"regex": "(" * 5000 + f"a{i}" + ")" * 5000},
        lambda i: {"regex": f"(?:a?){{5000}}a{{5000}}{i}"},
        lambda i: {"regex": f"(([a-z]{{1,100}}){{1,100}}){{1,100}}{i}"},
        lambda i: {"regex": rf"(\w{{1,500}}\s){{1,500}}{i}"},
        lambda i: {"regex": f".*a.{{200}}b.{{2{i % 100}}}"},
        lambda i: {"grammar": "start: " + "(" * 30_000 + f'"{i}"' + ")" * 30_000},
        lambda i: {"grammar": f'start: a\na: a a a a | b\nb: "{i}" | ""'},
        lambda i: {"grammar": "root ::= " + "(" * 90 + f'"{i}"' + "){1,9999}" * 90},
        lambda i: {"grammar": f'root ::= r0\nr60 ::= "{i}"\n'
                   + "\n".join(f"r{k} ::= r{k + 1} r{k + 1}" for k in range(60))},
        lambda i: {"choice": [f"choice {i} {k}" for k in range(9000)]},
        lambda i: {"json": {"type": "array", "minItems": 100_000 + i, "items": {
            "type": "array", "minItems": 100_000}}},
        lambda i: {"json": {"type": "integer", "multipleOf": 10**9 + 7 + i, "minimum": 0}},
        lambda i: {"json": {"$ref": "#/$defs/a0", "title": str(i), "$defs": {"a30": {}} | {
            f"a{k}": {"anyOf": [{"$ref": f"#/$defs/a{k + 1}"}] * 10} for k in range(30)}}},
        lambda i: {"json": {"allOf": [{"properties": {f"p{k}": {"anyOf": [
            {"type": "string"}, {"const": i}]}}} for k in range(200)]}},
    ]  # fmt: skip
    return [StructuredOutputsParams(**rows[i % len(rows)](i)) for i in range(count)]


async def test_200_bombs_are_served_or_refused_and_leave_nothing() -> None:
    gate = make()
    try:
        said = await asyncio.gather(*(verdict(gate, bomb) for bomb in bombs(200)))
        assert all(text == "served" or "structured_outputs" in text for text in said)
        assert 0 < said.count("served") < 200
        wait_for(at_rest, "helpers at rest")
    finally:
        gate.close()
    wait_for(lambda: not helpers(), "helpers to end")


def at_rest() -> bool:
    """Whether the helpers have no children, which compile, and wait."""
    with suppress(psutil.NoSuchProcess):
        known = helpers()
        return len(known) <= 2 and all(p.status() == psutil.STATUS_SLEEPING for p in known)
    return False
