"""Datasets that are read from files: JSONL with prompts, ShareGPT, BurstGPT, Spec-Bench.

Lines that cannot be read are refused with their numbers, or skipped with one warning, as asked.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from quire.errors import ConfigError
from quire.logger import get_logger
from quire.workload.options import DatasetOptions
from quire.workload.prompts import PromptMaker
from quire.workload.request import WorkloadRequest

logger = get_logger(__name__)
T = TypeVar("T")
TOLD: Final = 5
"""Bad lines that a message lists."""
SHORTEST, LONGEST_PROMPT, LONGEST_SUM = 4, 1024, 2048
"""What of ShareGPT is used, in tokens: the rules of vLLM's benchmarks."""


def custom(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """JSONL with `prompt`; also `output_tokens` (with --custom-output-len -1), `priority`, and
    `messages` instead of a prompt."""

    def read(line: dict[str, Any]) -> WorkloadRequest:
        messages = line.get("messages")
        prompt = _text(line, "prompt") if messages is None else _said(messages)
        output = options.output_len or options.custom_output_len
        if output == -1:
            output = _whole(line, "output_tokens", 1)
        priority = _whole(line, "priority", None) if "priority" in line else 0
        tokens = len(maker.codec.encode(prompt))
        return WorkloadRequest(prompt, tokens, output, priority=priority, messages=messages)

    return _chosen(options, rng, read_lines(_path(options), read, options.bad_lines == "skip"))


def sharegpt(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """A ShareGPT file, a JSON array of conversations: the first turn is the prompt, and the second
    tells the output's length. Very short and very long ones are left out."""
    path = _path(options)
    text = _whole_text(path)
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"{path}: expected a JSON array of conversations")
    fixed = options.output_len or options.sharegpt_output_len

    def read(entry: Any) -> WorkloadRequest | None:
        turns = entry["conversations"]
        if len(turns) < 2:
            return None
        prompt, answer = turns[0]["value"], turns[1]["value"]
        num_prompt = len(maker.codec.encode(prompt))
        num_output = fixed or len(maker.codec.encode(answer))
        too_short = num_prompt < SHORTEST or (not fixed and num_output < SHORTEST)
        too_long = num_prompt > LONGEST_PROMPT or num_prompt + num_output > LONGEST_SUM
        return None if too_short or too_long else WorkloadRequest(prompt, num_prompt, num_output)

    skip = options.bad_lines == "skip"
    # Reading stops when there are enough: the file has 90,000 conversations.
    order = list(range(len(conversations)))
    if not options.disable_shuffle:
        rng.shuffle(order)
    entries = ((i + 1, conversations[i]) for i in order)
    kept = _read_each(entries, read, path, skip, "conversation")
    found = list(itertools.islice((r for r in kept if r is not None), options.num_prompts))
    return _chosen(options, rng, found, shuffled=True)


def burstgpt(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """A BurstGPT file, CSV: lengths and times of GPT-4's requests that were answered."""

    def read(row: dict[str, Any]) -> tuple[float, int, int] | None:
        output = int(row["Response tokens"])
        if row["Model"] != "GPT-4" or output < 1:
            return None
        at = float(row["Timestamp"])
        if not math.isfinite(at):
            raise ValueError(f"Timestamp must be a finite number, got {at}")
        return at, max(1, int(row["Request tokens"])), output

    path, skip = _path(options), options.bad_lines == "skip"
    # Not str.splitlines(): it cuts within fields as well, at U+2028 for one.
    lines = enumerate(csv.DictReader(io.StringIO(_whole_text(path), newline="")), 2)
    rows = [row for row in _read_each(lines, read, path, skip, "line") if row is not None]
    start = rows[0][0] if rows else 0.0
    chosen = rows[: options.num_prompts]
    if not options.disable_shuffle and len(rows) > options.num_prompts:
        picked = sorted(rng.choice(len(rows), options.num_prompts, replace=False))
        chosen = [rows[i] for i in picked]
    requests = []
    for at, length, output in chosen:
        text, tokens = maker.text(maker.ids(length))
        made = WorkloadRequest(text, tokens, options.output_len or output, arrival=at - start)
        requests.append(made)
    return _chosen(options, rng, requests, shuffled=True)


def spec_bench(
    options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """A Spec-Bench file, JSONL: the first of `turns`, of one `category` if asked for."""

    def read(line: dict[str, Any]) -> WorkloadRequest | None:
        if options.spec_bench_category not in (None, line.get("category")):
            return None
        prompt = line["turns"][0]
        if not isinstance(prompt, str):
            raise TypeError(f"turns must be texts, got {prompt!r:.40}")
        tokens = len(maker.codec.encode(prompt))
        output = options.output_len or options.spec_bench_output_len
        return WorkloadRequest(prompt, tokens, output)

    lines = read_lines(_path(options), read, options.bad_lines == "skip")
    return _chosen(options, rng, [line for line in lines if line is not None])


def read_lines(path: Path, read: Callable[[dict[str, Any]], T], skip: bool) -> list[T]:
    """What `read` makes of each line of a JSONL file; empty lines do not count.

    Args:
        path: The file.
        read: Gets the object of a line; raises KeyError, TypeError or ValueError if it is none.
        skip: Leave bad lines out and warn, instead of refusing the file.

    Raises:
        ConfigError: the file cannot be read, or has bad lines; the message tells their numbers.
    """

    def parsed(line: str) -> T:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return read(value)

    # Not str.splitlines(): it cuts at U+2028 too, which JSON allows within texts. A "\r" before
    # the "\n" is white space to JSON.
    lines = enumerate(_whole_text(path).split("\n"), 1)
    full = ((number, line) for number, line in lines if line.strip())
    return list(_read_each(full, parsed, path, skip, "line"))


def _read_each(
    entries: Iterable[tuple[int, Any]], read: Callable[[Any], T], path: Path, skip: bool, unit: str
) -> Iterator[T]:
    bad: list[str] = []
    for number, entry in entries:
        try:
            yield read(entry)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            bad.append(f"{unit} {number}: {reason}")
            if not skip and len(bad) >= TOLD:
                break
    if bad:
        more = f" and {len(bad) - TOLD} more" if len(bad) > TOLD else ""
        told = f"{path}: {'; '.join(bad[:TOLD])}{more}"
        if not skip:
            raise ConfigError(f"{told}. --bad-lines skip leaves such lines out")
        logger.warning("%s: skipped", told)


def _chosen(
    options: DatasetOptions,
    rng: np.random.Generator,
    requests: list[WorkloadRequest],
    *,
    shuffled: bool = False,
) -> list[WorkloadRequest]:
    """As many as asked for: some of them, or some again."""
    if not requests:
        raise ConfigError(f"{options.dataset_path}: there is no request in it that can be used")
    if not shuffled and not options.disable_shuffle:
        rng.shuffle(requests)
    if len(requests) < options.num_prompts and not options.no_oversample:
        again = itertools.islice(itertools.cycle(requests), options.num_prompts)
        return list(again)
    return requests[: options.num_prompts]


def _path(options: DatasetOptions) -> Path:
    assert options.dataset_path is not None  # make_requests has seen to it
    return Path(options.dataset_path)


def _whole_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--dataset-path: cannot read {str(path)!r}: {reason}") from None


def _text(line: dict[str, Any], name: str) -> str:
    value = line[name]
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name} must be a text that is not empty, got {value!r:.40}")
    return value


def _whole(line: dict[str, Any], name: str, least: int | None) -> int:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r:.40}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _said(messages: Any) -> str:
    """The texts of a conversation, to count them."""
    if not isinstance(messages, list) or not messages:
        raise TypeError("messages must be a list that is not empty")
    return "\n".join(_text(message, "content") for message in messages)
