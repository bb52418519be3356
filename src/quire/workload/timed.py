"""`timed_trace`: requests with their arrivals, lengths and shared beginnings, from a file.

Reads traces of quire (`trace.py`) and the JSONL of the Mooncake traces, whose lines have
`timestamp`, `input_length`, `output_length` and `hash_ids`: each id stands for some tokens of the
prompt, and equal ids for equal tokens. The text itself is in neither, so it is made up: what is
shared in the trace is shared in the prompts.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from quire.errors import ConfigError
from quire.workload.files import read_lines
from quire.workload.options import DatasetOptions
from quire.workload.prompts import PromptMaker
from quire.workload.request import WorkloadRequest
from quire.workload.trace import FORMAT, Trace, TraceRequest, read_trace

MOST_TOKENS: Final = 10_000_000
"""Of a prompt that text is made up for; no model takes more, and it is all in memory."""
_HEAD_BYTES: Final = 4096


def timed_trace(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """The first `--num-prompts` requests of a trace, by arrival."""
    assert options.dataset_path is not None  # make_requests has seen to it
    path = Path(options.dataset_path)
    if _is_ours(path):
        trace = read_trace(path, "skip" if options.bad_lines == "skip" else "refuse")
        requests = _of_trace(trace, options, maker)
    else:
        requests = _of_mooncake(path, options, maker)
    if not requests:
        raise ConfigError(f"{path}: the trace has no request")
    requests.sort(key=lambda request: request.arrival or 0.0)
    kept = requests[: options.num_prompts]
    start = kept[0].arrival or 0.0
    for request in kept:
        request.arrival = (request.arrival or 0.0) - start
    return kept


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(_HEAD_BYTES).partition(b"\n")[0]
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"--dataset-path: cannot read {str(path)!r}: {reason}") from None


# ---- Mooncake ------------------------------------------------------------------------------------


def _of_mooncake(path: Path, options: DatasetOptions, maker: PromptMaker) -> list[WorkloadRequest]:
    size = options.timed_trace_chunk_hash_size
    chunks = _Chunks(maker, size)

    def read(line: dict[str, Any]) -> tuple[float, int, int, list[Any]]:
        try:
            at = float(line[options.timed_trace_label_timestamp])
            length = int(line[options.timed_trace_label_input_length])
            output = int(line[options.timed_trace_label_output_length])
        except OverflowError as error:
            raise ValueError(str(error)) from None
        at *= options.timed_trace_sec_multiplier
        hashes = line.get(options.timed_trace_label_hash_ids) or []
        if not math.isfinite(at) or length < 1 or output < 0:
            raise ValueError(f"timestamp {at:g}, input_length {length}, output_length {output}")
        if length > MOST_TOKENS:
            raise ValueError(f"input_length must be at most {MOST_TOKENS:,}, got {length:,}")
        if not isinstance(hashes, list) or not all(isinstance(h, (int, str)) for h in hashes):
            raise ValueError(f"hash_ids must be a list of numbers or texts, got {hashes!r:.40}")
        if hashes and len(hashes) != -(-length // size):
            right = -(-length // len(hashes))
            raise ValueError(
                f"{len(hashes)} hash_ids of {size} tokens do not make {length} tokens: set "
                f"--timed-trace-chunk-hash-size, here at least {right}"
            )
        return at, length, output, hashes

    requests = []
    for at, length, output, hashes in read_lines(path, read, options.bad_lines == "skip"):
        ids = [token for one in hashes for token in chunks.of(one)][:length]
        text, tokens = maker.text(ids, length)
        wanted = options.output_len or max(1, output)
        requests.append(WorkloadRequest(text, tokens, wanted, arrival=at))
    return requests


class _Chunks:
    """The made-up tokens behind each hash."""

    def __init__(self, maker: PromptMaker, size: int) -> None:
        self._maker, self._size = maker, size
        self._known: dict[Any, list[int]] = {}

    def of(self, name: Any) -> list[int]:
        """Always the same ones for the same hash, and independent of the order of lines."""
        if name not in self._known:
            seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "little")
            self._known[name] = self._maker.ids_from(np.random.default_rng(seed), self._size)
        return self._known[name]


# ---- quire's own ---------------------------------------------------------------------------------


def _of_trace(trace: Trace, options: DatasetOptions, maker: PromptMaker) -> list[WorkloadRequest]:
    chunks = _Chunks(maker, trace.header.block_size)
    sequences: dict[int, list[int]] = {}
    requests = []
    for line in trace.requests:
        if line.prompt_len + line.output_len > MOST_TOKENS:
            raise ConfigError(
                f"the trace has a request of {line.prompt_len + line.output_len:,} tokens, prompt "
                f"and output; text can be made up for at most {MOST_TOKENS:,}"
            )
        ids = _sequence(line, chunks, sequences, maker)
        if line.number:
            sequences[line.number] = ids
        if line.text is not None:
            prompt, tokens = line.text, line.prompt_len
        else:
            prompt, tokens = maker.text(ids[: line.prompt_len])
        output = options.output_len or max(1, line.output_len)
        at = line.arrival * options.timed_trace_sec_multiplier
        made = WorkloadRequest(prompt, tokens, output, arrival=at, priority=line.priority)
        made.extra = _fields_of(line.params)
        requests.append(made)
    return requests


def _sequence(
    line: TraceRequest, chunks: _Chunks, earlier: dict[int, list[int]], maker: PromptMaker
) -> list[int]:
    """The tokens of prompt and output: those that are told, else those shared, else random ones."""
    length = line.prompt_len + line.output_len
    if line.token_ids is not None:
        return line.token_ids
    if line.block_hashes:
        shared = [token for one in line.block_hashes for token in chunks.of(one)]
    else:
        shared = earlier.get(line.shared_with, [])[: line.shared_len]
    shared = shared[:length]
    return [*shared, *maker.ids(length - len(shared))]


_SENT: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _fields_of(params: dict[str, Any]) -> dict[str, Any]:
    """The recorded parameters that a request's body may have; lengths come from the trace."""
    return {name: params[name] for name in _SENT if name in params} | {"ignore_eos": True}
