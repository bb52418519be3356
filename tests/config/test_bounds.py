"""Every number from outside has one row, and every door reads it with that row."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest

from quire import LLM
from quire.bounds import FIELDS, INT32, INT64, OPTIONS, Bound, read_field, read_option
from quire.config import EngineConfig
from quire.config.cli import sections
from quire.config.server import ServerConfig
from quire.errors import ConfigError, EngineDead, InvalidRequest
from quire.params import PoolingParams, RequestOutputKind, SamplingParams
from quire.utils.math import parse_size

SECTIONS = {**sections(EngineConfig), **sections(ServerConfig)}
NUMBERS = [
    field.name
    for section in SECTIONS.values()
    for field in dataclasses.fields(section)
    if str(field.type).removesuffix(" | None") in ("int", "float")
]
NO_NUMBERS = (True, "many", "nan", "1e999", math.nan, [1], {}, b"1", "9" * 5000)
PARAMS = {f.name: f for f in msgspec.structs.fields(SamplingParams)}


def outside(bound: Bound) -> list[float]:
    """Numbers just beyond the limits, and far beyond."""
    low, high = bound.low, bound.high
    if bound.kind is int:
        return [low - 3, high + 1, 2**63, 2**64, 10**400, -(10**400)]
    near = [low if bound.above else math.nextafter(low, -math.inf)]
    near.append(high if bound.below else math.nextafter(high, math.inf))
    return [*near, 1e308, math.inf, -math.inf, 10**400]


def test_every_number_has_a_row_and_every_row_a_number() -> None:
    assert sorted(NUMBERS) == sorted(OPTIONS)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_option_is_a_number_within_its_limits(name: str) -> None:
    bound = OPTIONS[name]
    for value in (*outside(bound), *NO_NUMBERS):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be ") as caught:
            read_option(name, value)
        assert len(str(caught.value)) < 250
    inside = bound.high if not bound.below else math.nextafter(bound.high, 0)
    assert read_option(name, inside) == inside == read_option(name, str(inside))
    assert type(read_option(name, inside)) is bound.kind
    kind: Any = np.int64 if bound.kind is int else np.float64
    assert type(read_option(name, kind(inside))) is bound.kind


def test_text_is_read_as_on_the_command_line() -> None:
    assert read_option("max_model_len", "8k") == 8000
    assert read_option("max_model_len", " 8K") == 8192
    assert read_option("kv_cache_memory_bytes", "1.5G") == 3 * 2**29
    assert read_option("gpu_memory_utilization", "0.5") == 0.5
    assert [read_option("max_model_len", v) for v in ("auto", "-1", -1)] == [None] * 3
    assert parse_size("9007199254740993k") == 9007199254740993000, "through floating point"
    assert read_option("kv_cache_memory_bytes", "7.3GiB") == 7838315315, "of 7838315315.2"
    assert parse_size("1.0000000000000000000001T") == 2**40
    for text in ("64.0", "9" * 400 + "k", "8q", "1.k", ".5G", "1..5G", "-1.5G"):
        with pytest.raises(ConfigError):
            parse_size(text)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("enforce_eager", 1, "--enforce-eager must be true or false, got 1"),
        ("enable_prefix_caching", "yes", "must be true or false, got 'yes'"),
        ("tokenizer", 5, "--tokenizer must be text, got 5"),
        ("served_model_name", [5], r"must be a list of texts, got \[5\]"),
        ("hf_overrides", "{}", "--hf-overrides must be an object, got '{}'"),
        ("scheduling_policy", ["fcfs"], "--scheduling-policy must be text"),
        ("max_num_seqs", True, "--max-num-seqs must be an integer, got True"),
        ("swap_space", math.nan, r"--swap-space must be a number \(GiB\), got nan"),
        ("num_gpu_blocks_override", 2**31, "must be at most 2147483647, got 2147483648"),
        ("kv_cache_memory_bytes", 2**60, "at most 9007199254740992, got 115292150460684697"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_told_with_its_option(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_options(**{option: value})


def test_options_are_brought_to_one_spelling() -> None:
    config = EngineConfig.from_options(
        model=pathlib.Path("some/model"), served_model_name="x", max_num_seqs=np.int32(7),
        swap_space=2, max_num_batched_tokens=None, hf_overrides=None,
    )  # fmt: skip
    assert config.model.model == "some/model" and config.model.served_model_name == ["x"]
    assert type(config.scheduler.max_num_seqs) is int and config.scheduler.max_num_seqs == 7
    assert config.scheduler.max_num_batched_tokens == 2048 and config.model.hf_overrides == {}
    again = EngineConfig.from_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(config.to_dict())))
    assert again == config


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("cache", None, "no settings 'cache': another version"),
        ("cache", [1], "no settings 'cache': another version"),
        ("scheduler", {"max_num_sequences": 3}, "unknown setting scheduler.max_num_sequences"),
        ("recovery", {}, None),
    ],
)
def test_a_recorded_configuration_of_another_version(
    section: str, change: Any, words: str | None
) -> None:
    data = EngineConfig().to_dict() | {section: change}
    if words is None:
        assert EngineConfig.from_dict(data) == EngineConfig(), "what is missing is the default"
    else:
        with pytest.raises(ConfigError, match=words):
            EngineConfig.from_dict(data)


# ---- sampling parameters -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FIELDS if n in PARAMS and n != "logit_bias"])
def test_a_parameter_is_a_number_within_its_limits(name: str) -> None:
    bound = FIELDS[name]
    for value in (*outside(bound), *NO_NUMBERS, "1"):
        with pytest.raises(InvalidRequest, match=f"^{name} must be ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name and len(str(caught.value)) < 250
    kind: Any = np.int64 if bound.kind is int else np.float32
    more: dict[str, Any] = {"max_tokens": None} if name == "min_tokens" else {}
    given = SamplingParams(**{name: kind(1), **more})
    assert type(getattr(given, name)) is bound.kind
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == given


@pytest.mark.parametrize("name", list(PARAMS))
def test_none_is_the_default_of_every_parameter(name: str) -> None:
    plain = SamplingParams()
    expected = None if name == "max_tokens" else getattr(plain, name)
    assert getattr(SamplingParams(**{name: None}), name) == expected


def test_collections_may_be_lists_tuples_or_sets() -> None:
    for kind in (list, tuple, set, frozenset):
        given = SamplingParams(
            stop_token_ids=kind([np.int64(7), 3]), allowed_token_ids=kind([9, 8]),
            bad_words=kind(["b", "a"]), stop=kind(["y", "x"]),
        )  # fmt: skip
        assert sorted(given.stop_token_ids) == [3, 7]
        assert {type(i) for i in given.stop_token_ids} == {int}
        assert isinstance(given.stop, list) and isinstance(given.bad_words, list)
        if kind in (set, frozenset):  # whose order differs from process to process
            assert given.bad_words == ["a", "b"] and given.allowed_token_ids == [8, 9]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", "abc"), ("bad_words", 5), ("bad_words", [""]), ("bad_words", [5]),
        ("stop", 5), ("stop", [b"x"]), ("stop", {"a": 1}),
        ("stop_token_ids", 5), ("stop_token_ids", "12"), ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]), ("stop_token_ids", [-1]), ("stop_token_ids", [None]),
        ("allowed_token_ids", ()), ("allowed_token_ids", {1: 2}),
        ("logit_bias", [(1, 2)]), ("logit_bias", {True: 1.0}), ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: 10**400}), ("logit_bias", {-1: 0}),
        ("ignore_eos", 1), ("detokenize", "no"), ("skip_reading_prefix_cache", 0),
        ("output_kind", 2), ("include_stop_str_in_output", np.True_),
    ],
)  # fmt: skip
def test_wrong_types_of_other_parameters(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must be .*, got ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_pooling_parameters() -> None:
    assert PoolingParams(truncation_side=None).truncation_side == "right"  # type: ignore[arg-type]
    assert PoolingParams(truncate_prompt_tokens=-1, dimensions=8).dimensions == 8
    for name, value in (
        ("dimensions", 2**31),
        ("truncate_prompt_tokens", 0),
        ("use_activation", 1),
    ):
        with pytest.raises(InvalidRequest, match=f"^{name} must be "):
            PoolingParams(**{name: value})  # type: ignore[arg-type]
    assert read_field("priority", -INT64 - 1) < 0 and FIELDS["top_k"].high == INT32


# ---- the engine ----------------------------------------------------------------------------------


def test_the_ends_of_the_ranges_generate() -> None:
    """What is allowed must not end a step, nor make a logit that is no number."""
    prompt = "The capital of France is"
    with LLM(
        scheduling_policy="priority", max_num_batched_tokens=INT32, max_num_seqs=2**20, seed=INT64
    ) as llm:
        tiny = 5e-324
        rows: tuple[dict[str, Any], ...] = (
            {"repetition_penalty": 1e-30, "temperature": 0.01, "presence_penalty": -2},
            {"repetition_penalty": 100, "temperature": 2, "frequency_penalty": 2},
            {"top_p": tiny, "min_p": tiny, "top_k": INT32}, {"min_p": 1.0, "top_p": tiny},
            {"temperature": -0.0, "repetition_penalty": 1e-30}, {"stop_token_ids": None},
            {"repetition_penalty": 1e-30, "logit_bias": {5: -100}, "logprobs": 2},
        )  # fmt: skip
        params = [
            SamplingParams(**row, max_tokens=80, seed=1, ignore_eos=True, output_kind=kind)
            for row, kind in zip(rows, [RequestOutputKind.FINAL_ONLY] * len(rows), strict=True)
        ]
        priorities = [INT64, -INT64 - 1, 0, 1, 2, 3, 4]
        outputs = llm.generate([prompt] * len(rows), params, priority=priorities, use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [80] * len(rows)
        with pytest.raises(
            InvalidRequest, match="^priority must be at most .* got 9223372036854775808"
        ):
            llm.generate(prompt, priority=[2**63])
    llm.shutdown()  # a second time
    for verb in (
        lambda: llm.generate(prompt),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(EngineDead, match="shut down"):
            verb()


def test_bad_defaults_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"generation_config: temperature .* got 7"):
        LLM(override_generation_config={"temperature": 7})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_memory_bytes": "900T"}, "a KV cache of 900.0 TiB, but only .* is left"),
        ({"num_gpu_blocks_override": INT32}, "--num-gpu-blocks-override 2147483647 is a KV cache"),
        ({"swap_space": 2.0**20}, "--swap-space 1.04858e.06 GiB does not fit beside weights"),
        ({"swap_space": 2.0**20, "swap_dir": "."}, "does not fit on the disk of --swap-dir"),
    ],
)
def test_more_memory_than_there_is(options: dict[str, Any], told: str) -> None:
    with pytest.raises(MemoryError, match=told):
        LLM(**options)
