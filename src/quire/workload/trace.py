"""Traces of requests: one JSONL format for benchmarks, simulator, recordings and replay.

The first line is the header, `{"format": "quire-trace", "version": 1, ...}`. Every other line is a
request, or a step of the engine that was recorded. A trace tells when requests came, how long their
prompts and outputs are and what they share; text and token ids stand in it only if somebody
asked for that. Knows no engine, no tokenizer and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from quire.errors import ConfigError

FORMAT: Final = "quire-trace"
VERSION: Final = 1
BLOCK_SIZE: Final = 16
"""Tokens that one hash of `TraceRequest.block_hashes` covers, unless the header says otherwise."""
LONGEST: Final = 1e7
"""Seconds that no recording lasts, four months: what goes by seconds has room for so many."""
MOST_TOKENS: Final = 100_000_000
"""Of a prompt, or of an output."""
MOST_BAD_LINES: Final = 10
"""Bad lines that are kept with their numbers when they are skipped."""


class TraceHeader(msgspec.Struct, kw_only=True):
    """The first line."""

    format: str = FORMAT
    version: int = VERSION
    block_size: int = BLOCK_SIZE
    """Tokens per hash in `block_hashes`."""
    source: str = ""
    """What made the trace: a recording, a generator and its settings, an import."""
    synthetic: bool = False
    """Whether arrivals, lengths or sharing were made up, not observed."""
    model: str = ""
    config: dict[str, Any] = {}
    """Of a recording: the engine's configuration, as `EngineConfig.to_dict` gives it."""
    origin: float = 0.0
    """Of a recording: time 0 on the engine's clock, which the records of steps go by."""
    info: dict[str, Any] = {}
    """Of a recording: how it was resolved, as `ExecutorInfo.to_dict` gives it."""


class TraceRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One completion. Its sequence is the prompt and the output after it."""

    arrival: float
    """Seconds since the trace began."""
    prompt_len: int
    """Tokens, at least 1."""
    output_len: int
    """Tokens that were, or are to be, generated; 0 if the request was ended before the first."""
    priority: int = 0
    key: str = ""
    """Who asked, for the `fair` policy; in recordings a salted hash."""
    cache_salt: str = ""
    """Requests with different ones find nothing of each other in the prefix cache; in recordings a
    salted hash."""
    number: int = 0
    """What `shared_with` and recorded steps call it; 0: nothing refers to it."""
    block_hashes: list[str] = []
    """For each full block of the sequence, a salted hash of everything up to its end: equal hashes,
    equal beginnings. There may be fewer than blocks: what follows is shared with nobody."""
    shared_with: int = 0
    """Number of the request whose sequence begins like this one for most tokens; 0: none, or
    `block_hashes` tell. It stands on an earlier line."""
    shared_len: int = 0
    """For how many tokens."""
    params: dict[str, Any] = {}
    """Sampling parameters that are not at their defaults. Lengths stand in `output_len`."""
    finish: str = ""
    """Why it ended, if that is known; `abort`: whoever asked ended it."""
    token_ids: list[int] | None = None
    """The whole sequence; only if asked for."""
    text: str | None = None
    """The prompt; only if asked for."""


class TraceStep(msgspec.Struct, omit_defaults=True, gc=False):
    """One step that an engine took, with its decisions."""

    step: int
    start: Annotated[float, msgspec.Meta(ge=-LONGEST, le=LONGEST)]
    """Seconds since the trace began."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
    """How long it took."""
    facts: bytes = b""
    """Its records (`quire.core.facts`), which name requests by their `number`; in the file as
    base64."""
    forward: float = 0.0
    """The model's part of `seconds`."""
    swap: float = 0.0
    """The part in which KV blocks were copied to or from the second tier."""
    several: list[tuple[int, int]] = []
    """(number, tokens) of requests that got more than one token, because a grammar forced them."""


@dataclass(slots=True)
class Trace:
    """A trace that was read."""

    header: TraceHeader
    requests: list[TraceRequest] = field(default_factory=list)
    """In the order of the lines."""
    steps: list[TraceStep] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)
    """What was wrong with the first lines that were skipped, with their numbers."""
    num_bad_lines: int = 0

    def by_arrival(self) -> list[TraceRequest]:
        """The requests as they came; those of one moment in the order of their lines."""
        return sorted(self.requests, key=lambda request: request.arrival)


_encode: Final = msgspec.json.Encoder().encode
_read_header: Final = msgspec.json.Decoder(TraceHeader).decode
_read_request: Final = msgspec.json.Decoder(TraceRequest).decode
_read_step: Final = msgspec.json.Decoder(TraceStep).decode
_read_any: Final = msgspec.json.Decoder().decode
_STEP_BEGINS: Final = b'{"step":'
_HEADER_BEGINS: Final = b'{"format":"quire-trace"'


def encode_line(record: TraceHeader | TraceRequest | TraceStep) -> bytes:
    """One line of a trace, with its end."""
    return _encode(record) + b"\n"


def write_trace(
    path: str | Path,
    requests: Iterable[TraceRequest],
    header: TraceHeader | None = None,
    steps: Iterable[TraceStep] = (),
) -> None:
    """Write a trace; an old file of that name is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with open(path, "wb") as file:
            file.write(encode_line(header or TraceHeader()))
            file.writelines(map(encode_line, requests))
            file.writelines(map(encode_line, steps))
    except OSError as error:
        raise ConfigError(f"cannot write the trace {str(path)!r}: {error.strerror}") from None


def read_trace(path: str | Path, bad_lines: Literal["refuse", "skip"] = "refuse") -> Trace:
    """Read a trace.

    Args:
        path: A file, as `write_trace` and `--record` make it.
        bad_lines: Whether the first line that cannot be read is an error, or all are left out and
            counted.

    Raises:
        ConfigError: the file cannot be read, is no trace or one of another version, or has a line
            that cannot be read (the message tells its number), or no request at all.
    """
    try:
        with open(path, "rb") as file:
            trace = _read(file, str(path), bad_lines == "skip")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    if not trace.requests:
        raise ConfigError(f"{path}: the trace has no request")
    return trace


def _read(lines: Iterator[bytes], path: str, skip: bool) -> Trace:
    trace = Trace(_header(next(lines, b""), path))
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            _add(trace, line)
        except (msgspec.MsgspecError, ValueError) as error:
            problem = f"{path}, line {number}: {error}"
            if not skip:
                raise ConfigError(problem) from None
            trace.num_bad_lines += 1
            if len(trace.bad_lines) < MOST_BAD_LINES:
                trace.bad_lines.append(problem)
    return trace


def _header(line: bytes, path: str) -> TraceHeader:
    try:
        said = _read_any(line)
    except (msgspec.MsgspecError, ValueError):
        said = None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ConfigError(_no_header(line, path))
    if said.get("version") != VERSION:
        raise ConfigError(
            f"{path}: the trace is of version {said.get('version')!r:.20}, and this quire reads "
            f"version {VERSION}: record it again, or use the quire that wrote it"
        )
    try:
        header = _read_header(line)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line 1: {error}") from None
    if header.block_size < 1:
        raise ConfigError(f"{path}, line 1: block_size must be at least 1, got {header.block_size}")
    return header


def _no_header(line: bytes, path: str) -> str:
    """What is wrong with a first line that is no header."""
    if not line:
        return f"{path} is empty: a trace has a header and a line for each request"
    if line.startswith(_HEADER_BEGINS) and not line.endswith(b"\n"):
        return f"{path}, line 1: the header ends after {len(line)} bytes: the file was cut off"
    got = line[:60].decode("utf-8", "replace").rstrip()
    return (
        f'{path}, line 1: a trace begins with {{"format": "{FORMAT}", "version": {VERSION}}}, '
        f"got {got!r}"
    )


def _add(trace: Trace, line: bytes) -> None:
    if line.startswith(_STEP_BEGINS):
        trace.steps.append(_read_step(line))
    else:
        request = _read_request(line)
        check_request(request)
        trace.requests.append(request)


def check_request(request: TraceRequest) -> None:
    """Check the numbers of a request.

    Raises:
        ValueError: naming the field, its limit and the value.
    """
    if not math.isfinite(request.arrival) or request.arrival < 0:
        raise ValueError(f"arrival must be 0 or more seconds, got {request.arrival:g}")
    for name, least in (("prompt_len", 1), ("output_len", 0), ("shared_len", 0), ("number", 0)):
        value = getattr(request, name)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if value > MOST_TOKENS and name != "number":
            raise ValueError(f"{name} must be at most {MOST_TOKENS:,}, got {value:,}")
    most = request.prompt_len + request.output_len
    if request.shared_len > most:
        raise ValueError(
            f"shared_len must be at most {most} (the sequence), got {request.shared_len}"
        )
    if request.token_ids is not None and len(request.token_ids) != most:
        raise ValueError(f"token_ids must be {most} (the sequence), got {len(request.token_ids)}")
    _check_params(request.params)


def _check_params(params: dict[str, Any]) -> None:
    """Check the parameters that the scheduler goes by."""
    number = params.get("prompt_logprobs")
    if number is not None and (type(number) is not int or not -1 <= number < 2**31):
        raise ValueError(f"params.prompt_logprobs must be -1 to {2**31 - 1:,}, got {number!r:.40}")
    switch = params.get("skip_reading_prefix_cache")
    if switch is not None and type(switch) is not bool:
        raise ValueError(
            f"params.skip_reading_prefix_cache must be true or false, got {switch!r:.40}"
        )
