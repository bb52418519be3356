"""Traces come back as they were written, and bad ones are refused with the line's number."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.workload.trace import (
    Trace,
    TraceHeader,
    TraceRequest,
    TraceStep,
    encode_line,
    read_trace,
    write_trace,
)


def random_request(number: int, rng: random.Random) -> TraceRequest:
    prompt, output = rng.randint(1, 5000), rng.randint(0, 900)
    return TraceRequest(
        rng.expovariate(2.0),
        prompt,
        output,
        priority=rng.choice([0, 0, -3, 2**40]),
        key=rng.choice(["", "ab12"]),
        number=number,
        block_hashes=[f"{rng.getrandbits(64):016x}" for _ in range(rng.randint(0, 5))],
        shared_with=rng.randrange(number),
        shared_len=rng.randint(0, prompt + output),
        params=rng.choice([{}, {"temperature": 0.5, "top_p": 0.9}]),
        finish=rng.choice(["", "stop", "length", "abort"]),
        token_ids=[7] * (prompt + output) if rng.random() < 0.1 else None,
        text="é\n" if rng.random() < 0.1 else None,
    )


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rng = random.Random(3)
    requests = [random_request(n, rng) for n in range(1, 300)]
    steps = [TraceStep(n, n * 0.5, 0.25, rng.randbytes(64 * (n % 3))) for n in range(1, 50)]
    header = TraceHeader(source="test", synthetic=True, config={"cache": {"block_size": 16}})
    write_trace(tmp_path / "t.jsonl", requests, header, steps)
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace == Trace(header, requests, steps)
    arrivals = [request.arrival for request in trace.by_arrival()]
    assert arrivals == sorted(arrivals)


def test_a_line_holds_only_what_is_not_a_default(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", [TraceRequest(0.5, 10, 3)])
    line = (tmp_path / "t.jsonl").read_text().splitlines()[1]
    assert json.loads(line) == {"arrival": 0.5, "prompt_len": 10, "output_len": 3}


GOOD = '{"arrival": 0, "prompt_len": 3, "output_len": 2}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"arrival": -1, "prompt_len": 3, "output_len": 2}', "arrival must be 0 or more"),
        (
            '{"arrival": 0, "prompt_len": 0, "output_len": 2}',
            "prompt_len must be at least 1, got 0",
        ),
        ('{"arrival": 0, "prompt_len": 3, "output_len": -2}', "output_len must be at least 0"),
        (
            '{"arrival": 0, "prompt_len": 100000001, "output_len": 2}',
            "at most 100,000,000, got 100",
        ),
        ('{"step": 1, "start": 0.5, "seconds": 1e300}', "seconds"),
        ('{"arrival": 0, "prompt_len": 3}', "output_len"),
        ('{"arrival": 0, "prompt_len": "3", "output_len": 2}', "prompt_len"),
        ('{"arrival": 0, "prompt_len": 3, "output_len": 2, "shared_len": 6}', "at most 5"),
        ('{"arrival": 0, "prompt_len": 3, "output_len": 2, "prompt_length": 6}', "prompt_length"),
        ('{"arrival": 0, "prompt_len": 3, "output_len": 2, "token_ids": [1]}', "must be 5"),
        (f'{GOOD[:-1]}, "params": {{"prompt_logprobs": "x"}}}}', "params.prompt_logprobs must be"),
        (f'{GOOD[:-1]}, "params": {{"prompt_logprobs": -2}}}}', "params.prompt_logprobs must be"),
        (f'{GOOD[:-1]}, "params": {{"prompt_logprobs": true}}}}', "params.prompt_logprobs must be"),
        (f'{GOOD[:-1]}, "params": {{"skip_reading_prefix_cache": 1}}}}', "must be true or false"),
        ('{"step": "one"}', "step"),
        ("hello", "malformed"),
        ("\x00", "malformed"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"format": "quire-trace", "version": 1}\n\n' + GOOD + "\n" + line + "\n" + GOOD
    )
    with pytest.raises(ConfigError, match="line 4: ") as raised:
        read_trace(path)
    assert problem in str(raised.value)
    trace = read_trace(path, "skip")
    assert len(trace.requests) == 2 and trace.num_bad_lines == 1
    assert "line 4" in trace.bad_lines[0]


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (b"", "is empty"),
        (encode_line(TraceHeader(source="x"))[:45], "ends after 45 bytes: the file was cut off"),
    ],
)
def test_a_file_that_was_cut_before_its_first_request(
    tmp_path: Path, whole: bytes, problem: str
) -> None:
    (tmp_path / "t.jsonl").write_bytes(whole)
    with pytest.raises(ConfigError, match=problem):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("", "line 1"),
        ("[]", "line 1"),
        (GOOD, 'begins with {"format"'),
        ('{"format": "quire-trace", "version": 2}', "version 2"),
        ('{"format": "quire-trace"}', "version None"),
        (
            '{"format": "quire-trace", "version": 1, "block_size": 0}',
            "block_size must be at least 1",
        ),
        ('{"format": "quire-trace", "version": 1, "block_size": "a"}', "block_size"),
        ('{"format": "quire-trace", "version": 1}', "no request"),
    ],
)
def test_what_is_no_trace_of_this_version_is_refused(
    tmp_path: Path, first: str, problem: str
) -> None:
    (tmp_path / "t.jsonl").write_text(first + "\n")
    with pytest.raises(ConfigError) as raised:
        read_trace(tmp_path / "t.jsonl")
    assert problem in str(raised.value)


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace.*No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot write the trace"):
        write_trace(tmp_path / "absent" / "t.jsonl", [])
