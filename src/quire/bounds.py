"""The allowed values of every number from outside: one table for options, one for request fields.

Flags, `--config` files, `LLM(...)`, `POST /limits`, HTTP bodies and `SamplingParams` all read a
number with the same row. So a value is accepted or refused the same way everywhere, and no inner
code meets a number that an array, a record or a tensor cannot hold. Rules between fields, and rules
that depend on a model or on memory, are checked where those are known.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import ConfigError, InvalidRequest
from quire.utils.math import parse_size

INT32: Final = 2**31 - 1
"""Largest value in the arrays of a step: positions, lengths, block ids."""
INT64: Final = 2**63 - 1
EXACT: Final = 2**53
"""Integers up to this stay exact in JSON and floating point."""
TOLD_WHOLE: Final = 10**6
"""Up to this limit, a message names both ends of a range; beyond it, only the end that was
exceeded."""
SECONDS: Final = 1e9
"""30 years: longer waits overflow timers."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The allowed values of one number."""

    kind: type[int] | type[float]
    low: float
    high: float
    above: bool = False
    """`low` itself is not allowed."""
    below: bool = False
    """`high` itself is not allowed."""
    also: tuple[int, ...] = ()
    """Further allowed values, which have a meaning of their own."""
    unset: tuple[object, ...] = ()
    """Spellings of `None`."""
    note: str = ""
    """What to tell the reader about special values."""

    def holds(self, value: float) -> bool:
        """Whether a number of the right kind is allowed."""
        left = self.low < value if self.above else self.low <= value
        right = value < self.high if self.below else value <= self.high
        return (left and right) or value in self.also

    def rule(self, value: float | None) -> str:
        """The text after "must be" in a message that refuses a value."""
        noun = "an integer" if self.kind is int else "a number"
        if self.high <= TOLD_WHOLE:
            text = noun + self._range()
        elif value is None:
            text = noun
        elif value > self.low:
            text = f"at most {_plain(self.high)}"
        else:
            text = f"{'above' if self.above else 'at least'} {_plain(self.low)}"
        return f"{text} ({self.note})" if self.note else text

    def _range(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        if self.kind is int:
            return f" from {low} to {high}"
        return f" in {'(' if self.above else '['}{low}, {high}{')' if self.below else ']'}"

    def read(self, value: object) -> Any:
        """The value as a plain `int` or `float`. Numbers of numpy and other libraries count as
        numbers, truth values do not.

        Raises:
            ValueError: the value is not allowed; the message continues after "must be".
        """
        found = _number(self.kind, value)
        if found is None or not self.holds(found):
            raise ValueError(self.rule(found))
        return found


def _plain(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _number(kind: type[int] | type[float], value: object) -> float | None:
    """A plain number of that kind; `None` if it is not a number, NaN, or too large for floating
    point."""
    if isinstance(value, bool):
        return None
    if kind is int:
        return int(value) if isinstance(value, numbers.Integral) else None
    if not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return None if math.isnan(found) else found


def _integer(low: int, high: int, note: str = "", **more: Any) -> Bound:
    return Bound(int, low, high, note=note, **more)


def _real(low: float, high: float, note: str = "", **more: Any) -> Bound:
    return Bound(float, low, high, note=note, **more)


OPTIONS: Final[dict[str, Bound]] = {
    # model
    "max_model_len": _integer(1, INT32, unset=(-1, "auto")),
    "seed": _integer(-INT64 - 1, INT64),
    "max_logprobs": _integer(0, INT32, "-1: no limit", also=(-1,)),
    # cache
    "block_size": _integer(8, 128),
    "gpu_memory_utilization": _real(0, 1, above=True),
    "kv_cache_memory_bytes": _integer(1, EXACT),
    "num_gpu_blocks_override": _integer(1, INT32),
    "swap_space": _real(0, 2.0**20, "GiB"),
    # scheduler
    "max_num_batched_tokens": _integer(1, INT32),
    "max_num_seqs": _integer(1, 2**20),
    "scheduler_aging_seconds": _real(0, SECONDS),
    "long_prefill_token_threshold": _integer(0, INT32),
    "scheduler_delay_factor": _real(0, SECONDS),
    "stream_interval": _integer(1, INT32),
    "max_num_queued_reqs": _integer(1, INT32, "-1: no limit", also=(-1,)),
    "max_num_queued_tokens": _integer(1, EXACT, "-1: no limit", also=(-1,)),
    "max_queued_bytes": _integer(1, EXACT, "-1: no limit", also=(-1,)),
    "max_buffered_bytes": _integer(1, EXACT, "-1: no limit", also=(-1,)),
    "watermark": _real(0, 1, below=True),
    # observability
    "max_log_len": _integer(0, INT32),
    "record_steps": _integer(0, 10**6),
    "trace_sampling_rate": _real(0, 1),
    "kv_cache_metrics_sample": _real(0, 1, above=True),
    # recovery
    "core_restart_limit": _integer(0, 10**6),
    "core_restart_window": _real(0, SECONDS),
    "core_stall_timeout": _real(0, SECONDS),
    # server
    "port": _integer(0, 65535),
    "max_body_bytes": _integer(1024, 2**30),
    "max_n_sequences": _integer(1, INT32),
    "max_stored_responses": _integer(0, INT32),
    "max_stored_response_bytes": _integer(1, EXACT),
    "stored_response_seconds": _real(0, SECONDS),
    "shutdown_timeout": _real(0, SECONDS),
    "stream_keep_alive": _real(0, SECONDS),
    "handover_timeout": _real(0, SECONDS),
    "ssl_cert_reqs": _integer(0, 2),
    "write_timeout": _real(0, SECONDS),
    "journal_max_bytes": _integer(2**16, EXACT),
    "journal_claim_timeout": _real(0, SECONDS),
    "stream_retention": _real(0, SECONDS),
    "max_kept_streams": _integer(1, 10**6),
    "max_kept_bytes": _integer(1, EXACT),
}
"""Bounds of each option that is a number. A body may be of any size, because frames between the
processes may."""

FIELDS: Final[dict[str, Bound]] = {
    "n": _integer(1, INT32),
    "beam_width": _integer(1, 128),
    # A context of 2**31 tokens to the power of this is far from what floating point can hold.
    "length_penalty": _real(-10, 10),
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    # A logit divided by less than this may be infinite in float32, and so would all that follow.
    "repetition_penalty": _real(1e-30, 100),
    "temperature": _real(0, 2),
    "top_p": _real(0, 1, above=True),
    "top_k": _integer(0, INT32, "-1, 0: off", also=(-1,)),
    "min_p": _real(0, 1),
    "seed": _integer(-INT64 - 1, INT64, "-1: none"),
    "max_tokens": _integer(1, INT32),
    "max_completion_tokens": _integer(1, INT32),
    "min_tokens": _integer(0, INT32),
    "thinking_token_budget": _integer(0, INT32, "-1: no limit", also=(-1,)),
    "logprobs": _integer(0, INT32, "-1: whole vocabulary", also=(-1,)),
    "prompt_logprobs": _integer(0, INT32, "-1: whole vocabulary", also=(-1,)),
    "prompt_logprob_start": _integer(0, INT32),
    "top_logprobs": _integer(0, INT32, "-1: whole vocabulary", also=(-1,)),
    "stream_interval": _integer(1, INT32),
    "logit_bias": _real(-100, 100),
    "priority": _integer(-INT64 - 1, INT64, "64-bit"),
    "truncate_prompt_tokens": _integer(1, INT32, "-1: what fits", also=(-1,)),
    "dimensions": _integer(1, INT32),
    "max_tokens_per_query": _integer(1, INT32),
    "max_tokens_per_doc": _integer(1, INT32),
    "top_n": _integer(0, INT32),
    "steps": _integer(1, INT32),
    "max_pattern_size": _integer(0, 2048),
    "min_pattern_size": _integer(0, 2048),
    "min_count": _integer(0, INT32),
}
"""Bounds of each request field that is a number; for `logit_bias`, of its values."""


TYPE_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
"""Words for JSON types in error messages, by msgspec's names."""


def show(value: object) -> str:
    """A value as text for an error message: shortened, and safe for any object."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def flag(name: str) -> str:
    """An option as written on the command line."""
    return "--" + name.replace("_", "-")


def read_option(name: str, value: object) -> Any:
    """The number given for an option; a text is read as on the command line (`8k`, `0.5`, `auto`).

    Raises:
        ConfigError: it is no number, or out of range.
    """
    bound = OPTIONS[name]
    try:
        found = _from_text(bound, value) if isinstance(value, str) else value
        if type(found) in (int, str) and found in bound.unset:
            return None
        return bound.read(found)
    except ValueError as error:
        # What text stands for counts, and the text is told.
        raise ConfigError(f"{flag(name)} must be {error}, got {show(value)}", param=name) from None


def read_field(name: str, value: object) -> Any:
    """The number given for a field of a request.

    Raises:
        InvalidRequest: it is no number, or out of range.
    """
    try:
        return FIELDS[name].read(value)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be {error}, got {show(value)}.", param=name) from None


def _from_text(bound: Bound, text: str) -> object:
    """The number that a text stands for, or the text if it is none."""
    try:
        return read_integer(text) if bound.kind is int else float(text)
    except ValueError:
        return text


def read_integer(text: str) -> int:
    """A whole number as people write it: of any size, exactly, or with a suffix.

    Raises:
        ConfigError: the text is not such a number.
    """
    digits = text.strip().removeprefix("-").replace("_", "")
    # Python refuses to read thousands of digits, with an error of its own.
    return int(text) if digits.isdecimal() and len(digits) < 1000 else parse_size(text)


def check_section(section: Any) -> None:
    """Check the fields of a configuration section by their annotations, and normalise their values:
    numbers to plain `int` or `float`, a single text to a list.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        optional = str(field.type).endswith(" | None")
        if value is None and optional:
            continue
        found = _READERS[str(field.type).removesuffix(" | None")](field.name, value)
        if found is not value:
            object.__setattr__(section, field.name, found)


def _of_type(kind: type, what: str) -> Callable[[str, object], object]:
    def read(name: str, value: object) -> object:
        if not isinstance(value, kind):
            raise ConfigError(f"{flag(name)} must be {what}, got {show(value)}", param=name)
        return value

    return read


def _read_text(name: str, value: object) -> object:
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _of_type(str, "text")(name, found)


def _read_texts(name: str, value: object) -> object:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"{flag(name)} must be a list of texts, got {show(value)}", param=name)
    return value if isinstance(value, list) else list(found)


_READERS: Final[dict[str, Callable[[str, Any], object]]] = {
    "int": read_option,
    "float": read_option,
    "bool": _of_type(bool, "true or false"),
    "str": _read_text,
    "list[str]": _read_texts,
    "dict[str, Any]": _of_type(dict, "an object"),
}
"""Readers by annotation. A new annotation of a section's field needs a row here."""
