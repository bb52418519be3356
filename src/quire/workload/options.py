"""What one may ask of a dataset: the options of every command that makes a workload.

Names, defaults and meaning are those of `vllm bench serve` where it has the option. Commands make
their flags from these fields; checks that need only the numbers are here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which requests to make.

    Raises:
        ConfigError: a number is out of range; the message names the flag.
    """

    dataset_name: str = _option("random", "Where requests come from; `list` tells the names.")
    dataset_path: str | None = _option(None, "File of a dataset that is read.")
    num_prompts: int = _option(1000, "How many requests.")
    seed: int = _option(0, "Of everything random.")
    disable_shuffle: bool = _option(False, "Take the lines of a file in their order.")
    no_oversample: bool = _option(False, "Ask each request of a file once, even if that is fewer.")
    bad_lines: str = _option("refuse", "Lines that cannot be read: refuse the file, or skip them.")
    input_len: int | None = _option(None, "Prompt tokens, for every dataset that is made up.")
    output_len: int | None = _option(None, "Output tokens, for every dataset.")
    random_input_len: int = _option(1024, "Prompt tokens after the prefix.")
    random_output_len: int = _option(128, "Output tokens.")
    random_range_ratio: float = _option(0.0, "Lengths vary by this share up and down, in [0, 1).")
    random_prefix_len: int = _option(0, "Tokens that all prompts begin with.")
    random_batch_size: int = _option(1, "Texts per request, for pooling backends.")
    prefix_repetition_prefix_len: int = _option(256, "Tokens of each prefix.")
    prefix_repetition_suffix_len: int = _option(256, "Tokens after it, different each time.")
    prefix_repetition_num_prefixes: int = _option(10, "How many prefixes.")
    prefix_repetition_output_len: int = _option(128, "Output tokens.")
    custom_output_len: int = _option(256, "Output tokens; -1: `output_tokens` of each line.")
    skip_chat_template: bool = _option(False, "Send prompts of a file without the chat template.")
    sharegpt_output_len: int | None = _option(None, "Output tokens; default: as in the file.")
    spec_bench_output_len: int = _option(256, "Output tokens.")
    spec_bench_category: str | None = _option(None, "Only questions of this category.")
    timed_trace_sec_multiplier: float = _option(1.0, "Seconds per unit of `timestamp`.")
    timed_trace_chunk_hash_size: int = _option(
        16, "Prompt tokens that one of `hash_ids` stands for."
    )
    timed_trace_label_timestamp: str = _option("timestamp", "Name of that field.")
    timed_trace_label_input_length: str = _option("input_length", "Name of that field.")
    timed_trace_label_output_length: str = _option("output_length", "Name of that field.")
    timed_trace_label_hash_ids: str = _option("hash_ids", "Name of that field.")
    synthetic_scale: float = _option(1.0, "Lengths of synthetic datasets times this.")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{flag_of(name)} must be at least {least}, got {value}")
        for name in ("timed_trace_sec_multiplier", "synthetic_scale"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"{flag_of(name)} must be above 0 and finite, got {value:g}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio:g}"
            )
        if self.bad_lines not in ("refuse", "skip"):
            raise ConfigError(f"--bad-lines must be refuse or skip, got {self.bad_lines!r}")


_LEAST = {
    "num_prompts": 1,
    "seed": 0,
    "input_len": 1,
    "output_len": 1,
    "random_input_len": 0,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "random_batch_size": 1,
    "prefix_repetition_prefix_len": 0,
    "prefix_repetition_suffix_len": 0,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "custom_output_len": -1,
    "sharegpt_output_len": 1,
    "spec_bench_output_len": 1,
    "timed_trace_chunk_hash_size": 1,
}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")
