"""What the kernel tells of waiting for a core, read from files of our own and from its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from quire import LLM, SamplingParams
from quire.core.stats import StepStats
from quire.engine.starvation import (
    KERNEL_THREADS,
    LONGEST_PAUSE,
    TASKS,
    Machine,
    StarvationWatch,
    ThreadWaits,
    computing_threads,
    late,
)
from quire.utils.host import ControlGroups

linux = pytest.mark.skipif(not (TASKS / "1").parent.exists(), reason="the figures are Linux's")


def thread(tasks: Path, number: int, waited: int, name: str = "python", ran: int = 9) -> None:
    (tasks / str(number)).mkdir(exist_ok=True)
    (tasks / str(number) / "schedstat").write_text(f"{ran} {waited} 7\n", "utf-8")
    (tasks / str(number) / "comm").write_text(f"{name}\n", "utf-8")


def test_how_late_the_work_is_since_the_last_time(tmp_path: Path) -> None:
    waits = ThreadWaits(tmp_path)
    assert waits.take() is None, "nobody is followed"
    thread(tmp_path, 1, 5_000_000_000)
    thread(tmp_path, 2, 0)
    waits.follow([1, 2, 3])
    assert waits.take() == 0, "what was before does not count"
    thread(tmp_path, 1, 5_000_000_000, ran=900_000_009)
    thread(tmp_path, 2, 900_000_000)
    assert waits.take() == 0.45, "the first did the work of the second"
    assert waits.take() == 0
    thread(tmp_path, 4, 7_000_000_000)
    thread(tmp_path, 2, 1_000_000_000)
    waits.follow([2, 4])
    assert waits.take() == pytest.approx(0.1), "a new one begins at what it has"


@pytest.mark.parametrize(
    "threads, expected",
    [
        ([(0, 0)], 0),
        ([(70, 30)], 30),  # nobody does it in its place
        ([(70, 30), (0, 0)], 30),
        ([(50, 50), (50, 50)], 50),  # each had half of a core
        ([(100, 0), (0, 100)], 50),  # two cores would have taken half the time
        ([(0, 100), (100, 0)], 50),
        ([(100, 0), (0, 100), (100, 0)], 100 / 3),
        ([(100, 0), (0, 20)], 10),  # only a fifth of it was for both
        ([(60, 40), (50, 0)], 20 + 50 * 20 / 100),  # half of it for both
    ],
)
def test_threads_that_share_their_work(threads: list[tuple[int, int]], expected: float) -> None:
    assert late(threads) == pytest.approx(expected)


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    waits = ThreadWaits(tmp_path)
    waits.follow([1])
    assert waits.take() is None
    thread(tmp_path, 1, 0)
    waits.follow([1])
    (tmp_path / "1" / "schedstat").write_text("", "utf-8")
    assert waits.take() is None
    assert computing_threads(7, tmp_path / "none") == []


def test_threads_that_a_step_waits_for(tmp_path: Path) -> None:
    for number, name in ((5, "python"), (6, "core-reader"), (7, "python")):
        thread(tmp_path, number, 0, name)
    first, *others = computing_threads(5, tmp_path)
    assert (first, sorted(others)) == (5, [6, 7]), "torch's have no name"
    thread(tmp_path, 8, 0, KERNEL_THREADS)
    assert computing_threads(5, tmp_path) == [5, 8]


def test_the_machine(tmp_path: Path) -> None:
    stat, cpu = tmp_path / "stat", tmp_path / "cgroup" / "mine"
    cpu.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/mine\n", "utf-8")
    ticks = os.sysconf("SC_CLK_TCK")

    def write(stolen: int, throttled: int) -> None:
        stat.write_text(f"cpu  1 2 3 4 5 6 7 {stolen} 0 0\ncpu0 1\n", "utf-8")
        (cpu / "cpu.stat").write_text(f"nr_throttled 3\nthrottled_usec {throttled}\n", "utf-8")

    machine = Machine(stat, ControlGroups(tmp_path / "cgroup", tmp_path / "self"))
    write(stolen=50 * ticks, throttled=10_000_000)
    assert machine.read(100.0) is None
    write(stolen=53 * ticks, throttled=10_400_000)
    told = machine.read(102.0)
    assert told is not None and (told.time, told.seconds) == (102.0, 2.0)
    assert told.stolen_seconds == 3 and told.throttled_seconds == pytest.approx(0.4)
    stat.unlink()
    (cpu / "cpu.stat").unlink()
    told = machine.read(103.0)
    assert told is not None and (told.stolen_seconds, told.throttled_seconds) == (None, None)


class Fake(ThreadWaits):
    """Waits as told; reading them may cost CPU time."""

    def __init__(self, cost: float = 0.0) -> None:
        super().__init__()
        self.waited = 0.0
        self.cost, self.reads = cost, 0

    def take(self) -> float:
        self.reads += 1
        end = time.thread_time() + self.cost
        while time.thread_time() < end:
            pass
        waited, self.waited = self.waited, 0.0
        return waited


def step(watch: StarvationWatch, fake: Fake, start: float, end: float, waited: float) -> StepStats:
    stats = StepStats(step_seconds=end - start)
    watch.begin(start)
    fake.waited += waited
    watch.end(stats, end)
    return stats


def test_a_step_waits_for_no_longer_than_it_takes() -> None:
    fake = Fake()
    watch = StarvationWatch(fake)
    fake.waited = 9.0  # before the first step
    assert step(watch, fake, 10.0, 11.1, 0.9).cpu_wait_seconds == 0.9
    assert step(watch, fake, 11.1, 12.1, 3.0).cpu_wait_seconds == 1.0
    fake.waited = 5.0  # between the steps
    after = step(watch, fake, 20.0, 20.5, 0.1)
    assert (after.cpu_wait_seconds, after.gap_wait_seconds) == (0.1, 5.0)
    assert step(watch, fake, 20.5, 21.0, 0.1).gap_wait_seconds is None, "there was no pause"


def test_a_long_step_is_read_in_any_case() -> None:
    """Where reading is dear, too: it is the long ones that want an explanation."""
    fake = Fake(cost=0.004)
    watch = StarvationWatch(fake)
    for i in range(50):
        step(watch, fake, i / 100, (i + 1) / 100, 0.0)
    assert step(watch, fake, 0.5, 0.515, 0.01).cpu_wait_seconds is None
    late = step(watch, fake, 0.515, 0.6, 0.05)
    assert late.cpu_wait_seconds == pytest.approx(0.06 * 0.085 / 0.59), "its part of the time"
    assert late.unread_wait_seconds == pytest.approx(0.06 * 0.505 / 0.59)


def test_reading_is_rare_where_it_is_dear() -> None:
    fake = Fake(cost=0.004)
    watch = StarvationWatch(fake)
    told = [step(watch, fake, i / 100, (i + 1) / 100, 0.001).cpu_wait_seconds for i in range(90)]
    assert fake.reads == 2 and told[1:] == [None] * 89
    late = step(watch, fake, 0.9, 1.1 + LONGEST_PAUSE, 0.5)
    waited = 0.5 + 89 * 0.001
    assert late.cpu_wait_seconds == pytest.approx(waited * 1.2 / 2.09)
    assert late.unread_wait_seconds == pytest.approx(waited * 0.89 / 2.09)
    # Too early to read at its beginning, after a pause; it may have been waited in that.
    late = step(watch, fake, 2.9, 9.9, 0.1)
    assert late.cpu_wait_seconds == pytest.approx(0.1 * 7 / 7.8)
    assert step(watch, fake, 10.4, 19.9, 2.0).cpu_wait_seconds == pytest.approx(1.9)
    assert step(watch, fake, 19.9, 29.9, 0.1).cpu_wait_seconds == 0.1


PINNED: Final = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
OTHER: Final = f"{PINNED}; print(flush=True)\nwhile True: pass"
STEP: Final = f"""
{PINNED}
import threading, time
from quire.core.stats import StepStats
from quire.engine.starvation import TASKS, StarvationWatch

def counted():
    return int((TASKS / str(threading.get_native_id()) / "schedstat").read_text().split()[1])

watch, stats = StarvationWatch(), StepStats(step_seconds=1e9)
watch.begin(0.0)
before = counted()
end = time.thread_time() + 0.1
while time.thread_time() < end:
    pass
inside = counted() - before
watch.end(stats, 1.0)
print(len(os.listdir(TASKS)), inside, round(stats.cpu_wait_seconds * 1e9))
"""


@linux
def test_the_kernel_s_own_figure() -> None:
    """Another process on the same core: what is told is what the kernel counted meanwhile.

    In a process of one thread: where there are others, some of the work counts as theirs.
    """
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            step = subprocess.run([sys.executable, "-c", STEP], stdout=subprocess.PIPE, check=True)
        finally:
            other.kill()
    threads, inside, told = map(int, step.stdout.split())
    assert threads == 1
    assert inside > 0, "two threads of one core take turns"
    assert told >= inside


@linux
def test_steps_of_an_engine_tell_it() -> None:
    with LLM(disable_log_stats=False) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        llm.generate(["One"], params, use_tqdm=False)
        recording = llm.llm_engine.frontend.records.snapshot()
        rows = [recording.row(i) for i in range(len(recording))]
        known = [row for row in rows if row.cpu_wait_seconds >= 0]
        assert known and all(row.cpu_wait_seconds <= row.step_seconds for row in known)
        assert all(row.api_wait_seconds != row.api_wait_seconds for row in rows), "no API process"
        names = {metric.name for metric in llm.get_metrics()}
        assert "quire:cpu_wait_seconds" in names
