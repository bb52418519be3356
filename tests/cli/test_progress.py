"""Progress of commands: a line for every quarter, nothing of what is quick, a bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from quire.cli import progress as module
from quire.cli.progress import CommandProgress


class Clock:
    """A second for each look."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


def test_items_go_on_and_every_quarter_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with CommandProgress() as progress:
        assert list(progress.through("steps", range(5000), 5000)) == list(range(5000))
        assert list(progress.through("none", [], 0)) == []
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(",")[0] for line in told] == [
        "steps: 1,250 of 5,000", "steps: 2,500 of 5,000", "steps: 3,750 of 5,000",
        "steps: 5,000 of 5,000",
    ]  # fmt: skip


@pytest.mark.parametrize(("step", "lines"), [(0.001, 0), (1.0, 4)])
def test_what_is_quick_is_not_told(
    step: float, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "time", Clock(step))
    with CommandProgress(patience=2.0) as progress:
        list(progress.through("steps", range(100), 100))
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_work_of_the_same_name_may_begin_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(module, "time", clock)
    with CommandProgress() as progress:
        for seconds in (8.0, 3.0):
            progress.requests(0, 2)
            clock.now += seconds
            progress.requests(2, 2)
    told = capsys.readouterr().err.splitlines()
    assert told == ["requests: 2 of 2, 8.0 s", "requests: 2 of 2, 3.0 s"]


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal is sent from now on. No fixture: pytest takes stderr back after those."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def cursor_is_shown(screen: io.StringIO) -> bool:
    text = screen.getvalue()
    return text.count("\x1b[?25l") == text.count("\x1b[?25h")


def test_a_terminal_gets_a_bar_and_is_left_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), CommandProgress() as progress:
        for done in progress.through("steps", range(10), 10):
            if done == 5:
                assert not cursor_is_shown(screen)
                raise KeyboardInterrupt
    assert "steps" in screen.getvalue() and "/10" in screen.getvalue()
    assert cursor_is_shown(screen)


def test_a_bar_ends_with_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with CommandProgress() as progress:
        for _ in range(2):
            list(progress.through("steps", range(10), 10))
            assert cursor_is_shown(screen), "before the next thing is done"
    assert screen.getvalue().count("\x1b[?25l") == 2
