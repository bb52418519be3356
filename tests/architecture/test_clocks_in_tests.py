"""No test asserts how long something took: a busy machine would break it, or it would pass by
chance. Checked on the syntax trees of all tests.

A number that comes from a clock of the system or of a processor may not be compared with `<` and
its like, nor be asked for within a limit that is not for patience; sleeping is waiting by chance.
What is allowed nevertheless stands here with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path != Path(__file__))
CLOCKS = {
    "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time",
    "time", "time_ns", "cpu_times", "getrusage",
}  # fmt: skip
HELP = "count work or wait for what happens (see tests/support), or say in ALLOWED why not"
LEAST_PATIENCE = 60
"""Seconds that a limit against hanging must give."""
ALLOWED = {
    # where a clock is compared
    "support/patience.py": "the one loop that waits, with its patience",
    "fuzz/fuzz_kit.py": "until when a run of hours begins new cases",
    "fuzz/rounds.py": "until when a run of hours begins new rounds",
    "required/watched.py": "the load goes on until everything has shown, or patience ends",
    "core/test_policies.py": "the least processor time of this thread in 60 goes, a factor of five",
    "required/test_behaviour.py": "the least processor time in three goes; it is a tenth",
    "e2e/test_processes.py": "processor time, which neighbours cannot raise threefold; idle "
    "processes per second of the clock, which is more if they delay us",
    "observability/test_tracing.py": "before and after: order alone, on one clock",
    "engine/test_starvation.py": "works for a while by its own processor time, compares nothing",
    "chaos/bombs.py": "how long helpers are looked for, limits against hanging",
    "chaos/chaos_server.py": "it measures recovery, with limits against hanging",
    "chaos/conditions.py": "what is bounded in time is one of the conditions; processor time at "
    "idle",
    "chaos/faults.py": "how long a fault lasts, and limits against hanging",
    "chaos/mixed_load.py": "pauses between requests that only make load",
    "chaos/soaks.py": "how long a soak lasts, and the latencies that it is about",
    "chaos/soak.py": "how long a soak lasts",
    "chaos/surroundings.py": "how long a fault lasts, and processor time that is spent in vain",
    "worker/test_pages_ahead.py": "pages that this thread had to wait for, counted: no time",
    "serving/test_loop_costs.py": "processor time of this process, the least of five goes, with a "
    "factor of three",
    # where time is slept away
    "serving/loop_clock.py": "the steps of a clock that looks at processor time",
    "engine/test_step_undone.py": "a turn for another thread, in a loop that waits for it",
    "serving/test_unread.py": "clients that read slowly, which a busy machine makes slower still, "
    "and a while in which nothing may happen",
    "serving/serve_fake.py": "what never ends by itself",
    "chaos/core_hook.py": "a core that is to be slow until a file is gone",
    "e2e/test_drill.py": "arrivals are spread; nothing depends on how far",
    "deploy/test_live.py": "a pause between requests that only make load",
    "e2e/witness.py": "a pause between questions",
}
"""Files that may, and why."""


def findings(tree: ast.Module) -> Iterator[str]:
    """What depends on a quiet machine, as `line: what`."""
    times = _names_of_times(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _orders(node) and _tells_time(node, times):
            yield f"{node.lineno}: compares a time"
        elif isinstance(node, ast.Call):
            yield from _waits(node)


def _names_of_times(tree: ast.Module) -> set[str]:
    """Names that are given a time, or something computed from one."""
    times: set[str] = set()
    given = [
        (target, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if node.value is not None
    ]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            name = ast.Name(function.name)
            given += [
                (name, node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None
            ]
    given += [
        (node.func.value, node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "append" and node.args
    ]
    while True:
        found = {
            name.id
            for target, value in given
            if _tells_time(value, times)
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        if found <= times:
            return times
        times |= found


def _tells_time(node: ast.AST, times: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in times:
            return True
        if isinstance(part, ast.Call) and _called(part) in CLOCKS:
            return True
    return False


def _called(call: ast.Call) -> str:
    """Last part of the name; `time()` alone is no clock, but `time.time()` is."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) and function.id != "time" else ""


def _orders(node: ast.Compare) -> bool:
    return any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)


def _waits(call: ast.Call) -> Iterator[str]:
    name = _called(call)
    words = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else None
    sleeps = ast.unparse(call.func) in ("time.sleep", "asyncio.sleep", "sleep")
    if sleeps and not _is_short_turn(call):
        yield f"{call.lineno}: sleeps"
    limit = words.get("timeout")
    if limit is None and name in ("wait", "join", "timeout", "communicate", "wait_for"):
        limit = first
    if ast.unparse(call.func).startswith("bench."):
        return  # moves a clock of the test's own
    if _number(limit) is not None and _number(limit) < LEAST_PATIENCE:
        yield f"{call.lineno}: waits at most {ast.unparse(limit)} s"


def _is_short_turn(call: ast.Call) -> bool:
    """An `asyncio.sleep` in a loop that waits for something: the loop ends by what it waits for."""
    return ast.unparse(call.func) == "asyncio.sleep" and (_number(call.args[0]) or 0) <= 0.02


def _number(node: ast.expr | None) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_depends_on_a_quiet_machine(path: Path) -> None:
    found = list(findings(ast.parse(path.read_text("utf-8"))))
    name = path.relative_to(TESTS).as_posix()
    if name in ALLOWED:
        assert found, "needs no exception any more"
    else:
        assert not found, HELP


@pytest.mark.parametrize(
    "code",
    [
        "assert time.monotonic() - start < 3",
        "start = time.monotonic()\nf()\nassert time.monotonic() - start < 3",
        "took = time.perf_counter() - start\nassert took <= limit",
        "took = time.perf_counter() - start\nrate = n / took\nassert rate > 100",
        "def clocked():\n    return time.process_time()\nassert clocked() < 1",
        "while time.time() < end: pass",
        "a = sum(p.cpu_times()[:2])\nassert a < 0.02",
        "time.sleep(0.5)",
        "await asyncio.sleep(0.05)",
        "process.wait(3)",
        "process.wait(timeout=20)",
        "thread.join(5)",
        "async with asyncio.timeout(5): pass",
        "httpx.get(url, timeout=10)",
        "subprocess.run(command, timeout=20)",
    ],
)
def test_what_is_refused(code: str) -> None:
    wrapped = "async def test():\n" + "".join(f"    {line}\n" for line in code.splitlines())
    assert len(list(findings(ast.parse(wrapped)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "assert count < 3",
        "life.answered([time.monotonic()])",
        "await asyncio.sleep(0)",
        "process.wait(PATIENCE)",
        "subprocess.run(command, timeout=120)",
        "thread.join()",
        "', '.join(names)",
        "assert clock.now() < 3",
    ],
)
def test_what_is_harmless(code: str) -> None:
    wrapped = "async def test():\n" + "".join(f"    {line}\n" for line in code.splitlines())
    assert not list(findings(ast.parse(wrapped)))
