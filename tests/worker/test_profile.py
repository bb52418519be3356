"""The profiler beside another one in its process: torch records one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from quire.errors import Conflict
from quire.worker.profile import make_profiler


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    assert not autograd_profiler._is_profiler_enabled


def another() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def test_it_does_not_take_the_recording_from_another(tmp_path: Path) -> None:
    """Both would be written at the end, and the second of them would end the process."""
    profiler = make_profiler({"torch_profiler_dir": str(tmp_path)}, with_cuda=False)
    with another(), pytest.raises(Conflict, match="another torch profiler"):
        profiler.start()
    profiler.step()
    with pytest.raises(Conflict, match="not running"):
        profiler.stop()
    profiler.start()
    profiler.stop()
    assert list(tmp_path.iterdir())


def test_a_recording_that_cannot_begin_late_costs_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.profile.logger.propagate", True)
    given = {"torch_profiler_dir": str(tmp_path), "delay_iterations": 1, "max_iterations": 1}
    profiler = make_profiler(given, with_cuda=False)
    profiler.start()
    with another():
        for _ in range(4):
            profiler.step()
    profiler.stop()
    (told,) = [r.message for r in caplog.records if r.name == "quire.worker.profile"]
    assert told.startswith("there will be no profile: another torch profiler")
    assert not list(tmp_path.iterdir())


def test_a_recording_that_another_has_ended_is_not_written(tmp_path: Path) -> None:
    profiler = make_profiler({"torch_profiler_dir": str(tmp_path)}, with_cuda=False)
    profiler.start()
    with another():
        pass
    with pytest.raises(Conflict, match="has ended the recording"):
        profiler.stop()
    assert not list(tmp_path.iterdir())
