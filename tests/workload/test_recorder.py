"""A recording has what was asked for, and nobody waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.workload import recorder
from quire.workload.recorder import OpenRequest, TraceRecorder
from quire.workload.trace import TraceHeader, TraceStep, read_trace

PROMPT = [7001, 7002, 7003, 7004, 7005]


def ended_in(records: bytes) -> list[int]:
    """The tests' own form of records: the numbers of requests that ended."""
    return list(records)


def record(path: Path, **options: bool) -> TraceRecorder:
    kept = TraceRecorder(path, TraceHeader(), 100.0, ended_in, **options)
    kept.begin_core()
    kept.accept("a", OpenRequest(100.5, PROMPT, 2, "alice", {"top_p": 0.5}, text="secret words"))
    kept.accept("b", OpenRequest(101.0, [*PROMPT, 9], text="secret"))
    kept.step([("a", [8001])], [], TraceStep(1, 100.6, 0.1, b"x" * 64), [(1, "a"), (2, "b")])
    kept.step([("a", [8002, 8003])], [("a", "length")], TraceStep(2, 100.7, 0.1), [])
    kept.accept("c", OpenRequest(102.0, [1, 2], text="secret"))
    kept.step([("b", [8004])], [], TraceStep(3, 102.7, 0.1), [(3, "c")])
    kept.close_requests(["b", "unknown"])
    kept.close()
    kept.close()
    return kept


def test_requests_and_steps_are_written(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    trace = read_trace(tmp_path / "t.jsonl")
    a, b, c = trace.requests
    assert (a.arrival, a.prompt_len, a.output_len, a.priority) == (0.5, 5, 3, 2)
    assert (a.number, a.finish, a.params) == (1, "length", {"top_p": 0.5})
    assert (b.number, b.output_len, b.finish, b.shared_with, b.shared_len) == (2, 1, "abort", 1, 5)
    assert (c.number, c.output_len, c.finish) == (3, 0, "unfinished")
    assert [(s.step, round(s.start, 3)) for s in trace.steps] == [(1, 0.6), (2, 0.7), (3, 2.7)]
    assert trace.steps[0].facts == b"x" * 64


def test_what_was_said_is_written_only_if_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    written = (tmp_path / "t.jsonl").read_text()
    for hidden in ("7001", "8003", "secret", "alice"):
        assert hidden not in written
    record(tmp_path / "u.jsonl", with_text=True)
    request = read_trace(tmp_path / "u.jsonl").requests[0]
    assert request.token_ids == [*PROMPT, 8001, 8002, 8003] and request.text == "secret words"
    assert "alice" not in (tmp_path / "u.jsonl").read_text()
    salted = TraceRecorder(tmp_path / "v.jsonl", TraceHeader(), 0.0, ended_in)
    for name, salt in [("a", "one\ud800"), ("b", "other"), ("c", "other"), ("d", "")]:
        salted.accept(name, OpenRequest(0.0, [1], sharing_key=salt))
    salted.close()
    one, other, again, none = (r.cache_salt for r in read_trace(tmp_path / "v.jsonl").requests)
    assert one and other == again != one and none == "" and other not in ("one", "other")


def test_who_records_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_PENDING", 10)
    kept = TraceRecorder(tmp_path / "t.jsonl", TraceHeader(), 0.0, ended_in)
    held, entered = threading.Event(), threading.Event()
    kept._put(lambda: (entered.set(), held.wait(60))[0])
    assert entered.wait(60)
    for number in range(25):
        kept.accept(f"r{number}", OpenRequest(0.0, [1]))
    assert kept.num_lost == 15
    held.set()
    kept.close()
    assert len(read_trace(tmp_path / "t.jsonl").requests) == 10


def test_a_second_core_numbers_its_requests_apart(tmp_path: Path) -> None:
    kept = TraceRecorder(tmp_path / "t.jsonl", TraceHeader(), 0.0, ended_in)
    for names in ([(1, "a")], [(1, "b")]):
        kept.begin_core()
        kept.accept(names[0][1], OpenRequest(0.0, [1]))
        kept.step([(names[0][1], [5])], [], TraceStep(1, 0.0, 1.0), names)
    kept.close()
    trace = read_trace(tmp_path / "t.jsonl")
    assert [r.number for r in trace.requests] == [2**40 + 1, 2**32 + 1]
    assert len(trace.steps) == 1, "nobody could run the second core's decisions again"


def test_a_request_that_is_given_up_waits_for_the_cores_word(tmp_path: Path) -> None:
    kept = TraceRecorder(tmp_path / "t.jsonl", TraceHeader(), 0.0, ended_in)
    kept.begin_core()
    for name in "abc":
        kept.accept(name, OpenRequest(0.0, [1]))
        kept.close_requests([name])
    kept.step(
        [("a", [5]), ("b", [6, 7])],
        [("a", "length")],
        TraceStep(1, 0.0, 1.0, bytes([1])),
        [(1, "a"), (2, "b")],
    )
    kept.step([("b", [8])], [], TraceStep(2, 1.0, 1.0), [(3, "c")])
    kept.step([], [], TraceStep(3, 2.0, 1.0, bytes([2, 9])), [])
    kept.begin_core()
    kept.accept("d", OpenRequest(0.0, [1]))
    kept.close_requests(["d", "d"])
    kept.step([("d", [5])], [], TraceStep(1, 0.0, 1.0), [(1, "d")])
    kept.close_requests(["d"])
    kept.step([], [], TraceStep(2, 0.0, 1.0, bytes([1])), [])
    kept.accept("e", OpenRequest(0.0, [1]))
    kept.close_requests(["e"])
    kept.close()
    trace = read_trace(tmp_path / "t.jsonl")
    assert [(r.number, r.output_len, r.finish) for r in trace.requests] == [
        (1, 1, "length"),
        (2, 3, "abort"),
        (3, 0, "abort"),  # of a core that is gone
        (2**32 + 1, 1, "abort"),
        (2**40 + 1, 0, "abort"),  # that no step named
    ]
    assert trace.steps[0].several == [(2, 2)]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record: cannot write.*No such file"):
        TraceRecorder(tmp_path / "absent" / "t.jsonl", TraceHeader(), 0.0, ended_in)
