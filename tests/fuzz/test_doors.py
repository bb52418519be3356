"""Every parameter at every front door: typical, extreme, just illegal, of a wrong type, absent.

Rows hold every pair of legal values, or one illegal value among legal ones. Either it works, with
the same tokens at every door, or there is one sentence that names the parameter and the value; and
a request before and after has the same bytes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from fuzz_kit import cases
from pairwise import covering_rows, mixed_rows, pairs_of
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.bounds import EXACT, FIELDS, INT32, INT64, OPTIONS
from quire.cli.parser import Parser
from quire.cli.serve import build_parser
from quire.config import ServerConfig
from quire.config.cli import engine_config, flags, server_config
from quire.errors import QuireError
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

NAN, INF, HUGE = math.nan, math.inf, 10**30
TINY = 5e-324
"""The smallest float there is; 0 in float32."""
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "What is 23 + 45?"}]
VOCAB = 2048
SWITCH = ([True, False, None], [1, 0, "yes", [True]])

PARAMS: dict[str, tuple[list[Any], list[Any]]] = {
    # name: (legal values, illegal ones)
    "n": ([1, 2, 3, None], [0, -1, 16385, 2.0, "1", True, HUGE, NAN]),
    "temperature": ([0.7, 0, 1, 2, -0.0, 1e-46, 0.005], [-0.1, 2.1, NAN, INF, "0.5", True, HUGE]),
    "top_p": ([1, 0.5, TINY, None], [0, -1, 1.0000001, NAN, "1", True, 1e308]),
    "top_k": ([0, -1, 1, 40, INT32, None], [-2, INT32 + 1, 1.5, "5", True, HUGE]),
    "min_p": ([0, 1, 0.05, TINY], [-0.1, 1.1, NAN, -INF, True]),
    "seed": (
        [0, 7, -2, EXACT + 1, INT64, -INT64 - 1],
        [INT64 + 1, -INT64 - 2, 1.5, "7", True, HUGE],
    ),
    "presence_penalty": ([0, -2, 2, 1e-46, None], [2.1, -2.1, NAN, "1", True]),
    "frequency_penalty": ([0, -2, 2, TINY], [2.1, -2.1, INF, "1", HUGE]),
    "repetition_penalty": ([1, 1.3, 100, 1e-30, None], [0, 1e-46, -1, 101, NAN, INF, True]),
    "max_tokens": ([5, 1, 12, 70], [-1, INT32 + 1, 1.5, "5", True, HUGE]),
    "min_tokens": ([0, 3, None], [-1, INT32 + 1, 1.5, True, HUGE]),
    "logprobs": ([None, 0, 1, 20], [-2, 21, -1, INT32 + 1, 1.5, "1", True]),
    "prompt_logprobs": ([None, 0, 3], [-2, 21, -1, HUGE, 1.5, True]),
    "logprob_token_ids": (
        [None, [], [7, 5, 7], list(range(128))],
        [list(range(129)), [-1], [VOCAB], [HUGE], [True], [1.5], ["1"], 5, "12", {"a": 1}],
    ),
    "stream_interval": ([None, 1, 4, INT32], [0, -1, INT32 + 1, 1.5, "1", True, HUGE]),
    "stop": (
        [None, "x", [" a", "zz"], []],
        ["", [""], 5, [5], [None], ["a"] * 65, "x" * 1025, {"a": 1}, True],
    ),
    "stop_token_ids": (
        [None, [], [5, 9], list(range(300))],
        [[-1], [VOCAB], [2**32], [HUGE], [True], [1.5], ["1"], 5, "12", {"a": 1}],
    ),
    "logit_bias": (
        [None, {}, {5: 100}, {5: -100.0, 2047: TINY}],
        [{5: 101}, {5: NAN}, {-1: 1}, {VOCAB: 1}, {HUGE: 1}, {5: "1"}, {5: True}, [[5, 1]], 5],
    ),
    "allowed_token_ids": (
        [None, list(range(40, 90)), [60, 61, 60]],
        [[], [-1], [VOCAB], [HUGE], [True], [1.5], "ab", 5],
    ),
    "bad_words": ([None, [], ["the", " a"]], ["the", [5], [""], 5, ["x"] * 1025, {"a": 1}]),
    "thinking_token_budget": (
        [None, -1],
        [5, 0, -2, INT32 + 1, 1.5, "5", True, HUGE],  # the model does not reason
    ),
    "repetition_detection": (
        [
            None,
            {},
            {"max_pattern_size": 4, "min_count": 2},
            {"max_pattern_size": 2048, "min_pattern_size": 2, "min_count": 9},
        ],
        [
            {"max_pattern_size": 2049, "min_count": 2},
            {"x": 1},
            5,
            [1],
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            {"min_count": HUGE},
            {"max_pattern_size": 2, "min_count": 1},
            {"max_pattern_size": True},
            "4",
            NAN,
        ],
    ),
    "ignore_eos": SWITCH,
    "include_stop_str_in_output": SWITCH,
    "skip_special_tokens": SWITCH,
    "spaces_between_special_tokens": SWITCH,
    "priority": ([0, -5, INT64, -INT64 - 1], [INT64 + 1, -INT64 - 2, HUGE, 1.5, "1", True]),
}
LEGAL = {name: legal for name, (legal, _) in PARAMS.items()}


def settled(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what contradicts itself by a rule between two parameters."""
    if row["temperature"] < 1e-5:
        row = {**row, "n": 1}
    if (row["min_tokens"] or 0) > row["max_tokens"]:
        row = {**row, "min_tokens": 0}
    return row


# ---- what a door says ----------------------------------------------------------------------------


def shown(value: object) -> set[str]:
    """Spellings of a value in a sentence; empty: it would be too long, or is not one."""
    if isinstance(value, dict):
        return set().union(*(shown(inner) for pair in value.items() for inner in pair), {"{"})
    if isinstance(value, (list, tuple)):
        return set().union(*map(shown, value), {"[", str(len(value))})
    if isinstance(value, str) and len(value) > 60:
        return {str(len(value)), value[:30]}
    texts = {repr(value), str(value), ascii(value)}
    if value is None or isinstance(value, (bool, str)):
        return texts | {json.dumps(value)}
    if isinstance(value, int) and value.bit_length() > 64:
        texts.add(f"{value.bit_length()} bits")
    if isinstance(value, int):
        texts.add(repr(float(value)))  # of a field that is read as one
    if isinstance(value, float) and math.isfinite(value):
        texts.add(msgspec.json.encode(value).decode())
    return texts


def check_sentence(message: str, param: str | None, name: str, value: object) -> None:
    """One sentence or two that name the parameter and the value."""
    about = f"{name} = {shown_short(value)}: {message!r} ({param})"
    spellings = (name, name.replace("_", "-"))
    assert any(word in text for word in spellings for text in (message, param or "")), about
    assert any(text in message for text in shown(value)), about
    assert len(message) < 500 and "\n" not in message and "Traceback" not in message, about


def shown_short(value: object) -> str:
    """For our own messages."""
    return repr(value)[:60]


class Doors:
    """One model behind `LLM` and behind HTTP, both with what `vllm` calls neutral defaults."""

    def __init__(self, runner: asyncio.Runner) -> None:
        options = {
            "generation_config": "vllm", "scheduling_policy": "priority",
            "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512,
        }  # fmt: skip
        self.llm = LLM(**options)
        self.run = runner.run
        self.engine = self.run(AsyncLLM.start(EngineConfig.from_options(**options)))
        self.run(self.engine.wait_ready())
        app = build_app(ServerState(ServerConfig(), self.engine))
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=120
        )
        self.expected = self.canary_tokens()

    def close(self) -> None:
        self.llm.shutdown()
        self.run(self.client.aclose())
        self.run(self.engine.shutdown())

    def canary_tokens(self) -> list[Any]:
        """What a plain request gets at each door."""
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=6, logprobs=1)
        (output,) = self.llm.generate(PROMPT, params, use_tqdm=False)
        body = {
            "prompt": PROMPT, "temperature": 0.9, "seed": 5, "max_tokens": 6, "logprobs": 1,
            "return_token_ids": True,
        }  # fmt: skip
        (reply,) = self.post([("/v1/completions", body)])
        choice = reply.json()["choices"][0]
        return [
            output.outputs[0].token_ids,
            choice["token_ids"],
            choice["logprobs"],
            choice["text"],
        ]

    def check_canary(self) -> None:
        """Nothing has been disturbed."""
        found = self.canary_tokens()
        assert found == self.expected and found[0] == found[1]
        assert not self.llm.llm_engine.core.scheduler.requests

    def post(self, requests: Sequence[tuple[str, Any]]) -> list[httpx.Response]:
        """Sends bodies, all at once. JSON has no NaN, but clients send it."""

        async def send() -> list[httpx.Response]:
            head = {"content-type": "application/json"}
            return await asyncio.gather(
                *(self.client.post(p, content=json.dumps(b), headers=head) for p, b in requests)
            )

        return self.run(send())

    def generate(self, row: dict[str, Any]) -> Any:
        """The verdict of `LLM`: tokens of each choice, or the error."""
        given = {name: value for name, value in row.items() if name != "priority"}
        try:
            params = SamplingParams(**given)
            (output,) = self.llm.generate(
                PROMPT, params, priority=[row["priority"]], use_tqdm=False
            )
        except QuireError as error:
            return error
        assert all(choice.token_ids for choice in output.outputs)
        return [(list(c.token_ids), c.text, c.finish_reason) for c in output.outputs]


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with asyncio.Runner() as runner:
        made = Doors(runner)
        yield made
        made.close()


def completion_body(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": PROMPT, "return_token_ids": True, **row}


def chat_body(row: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": MESSAGES, "return_token_ids": True, **row}
    asked = body.pop("logprobs", None)
    return body if asked is None else body | {"logprobs": True, "top_logprobs": asked}


def choices_of(reply: httpx.Response) -> Any:
    return [(c["token_ids"], c["text"], c["finish_reason"]) for c in reply.json()["choices"]]


# ---- parameters of requests ----------------------------------------------------------------------


def test_rows_hold_all_pairs() -> None:
    rows = covering_rows(LEGAL, random.Random(1))
    held = {(a, repr(r[a]), b, repr(r[b])) for r in rows for a in r for b in r}
    for a, i, b, j in pairs_of(LEGAL):
        assert (a, repr(LEGAL[a][i]), b, repr(LEGAL[b][j])) in held
    of_chat = {"max_completion_tokens", "top_logprobs"}
    of_repetition = {"max_pattern_size", "min_pattern_size", "min_count"}
    of_pooling = {"dimensions", "max_tokens_per_query", "max_tokens_per_doc", "top_n"}
    of_beams = {"beam_width", "length_penalty"}
    others = {"truncate_prompt_tokens", "steps", "prompt_logprob_start"} | of_chat | of_pooling
    others |= of_beams | of_repetition
    assert set(FIELDS) - set(LEGAL) == others


@cases(1)
def test_legal_parameters_work_alike_at_every_door(rng: random.Random, doors: Doors) -> None:
    rows = [settled(row) for row in covering_rows(LEGAL, rng)]
    bodies = [("/v1/completions", completion_body(row)) for row in rows]
    bodies += [("/v1/chat/completions", chat_body(row)) for row in rows]
    replies = doors.post(bodies)
    for row, completion, chat in zip(rows, replies, replies[len(rows) :], strict=False):
        verdict = doors.generate(row)
        assert not isinstance(verdict, QuireError), f"{verdict} {row}"
        assert completion.status_code == 200, f"{completion.text} {row}"
        assert choices_of(completion) == verdict, row
        assert chat.status_code == 200, f"{chat.text} {row}"
        assert all(choice["token_ids"] for choice in chat.json()["choices"])
    doors.check_canary()


BAD = [(name, value) for name, (_, values) in PARAMS.items() for value in values]


@cases(1)
def test_an_illegal_parameter_is_named_at_every_door(rng: random.Random, doors: Doors) -> None:
    for name, value in rng.sample(BAD, len(BAD)):
        rows = [settled(row) | {name: value} for row in mixed_rows(LEGAL, rng)]
        bodies = [("/v1/completions", completion_body(row)) for row in rows]
        bodies += [("/v1/chat/completions", chat_body(row)) for row in rows]
        for reply in doors.post(bodies):
            check_refusal(reply, name, value)
        for row in rows:
            verdict = doors.generate(row)
            assert isinstance(verdict, QuireError), f"{name} = {shown_short(value)} was taken"
            assert verdict.status == 400
            check_sentence(verdict.message, verdict.param, name, value)
    doors.check_canary()


def check_refusal(reply: httpx.Response, name: str, value: object) -> None:
    """One sentence with a 4xx about a value; JSON that is none has no fields to name."""
    about = f"{name} = {shown_short(value)}: {reply.status_code} {reply.text}"
    assert 400 <= reply.status_code < 500, about
    error = reply.json()["error"]
    if "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value):
        check_sentence(error["message"], error["param"], name, value)


# ---- fields that only HTTP has -------------------------------------------------------------------

IDS = ([[5, 6], list(range(40))], [[-1], [VOCAB], [2**32], [HUGE], [True], [1.5], [None], 5])
HTTP_ONLY: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "/v1/completions": {
        "prompt": (["One", [5, 6]], [[-1] * 20, [VOCAB], [[2**32] * 20], [HUGE], 5, [True], [1.5]]),
        "truncate_prompt_tokens": (
            [None, -1, 1, INT32], [0, -2, INT32 + 1, HUGE, 1.5, "1", True, NAN],
        ),
        "truncation_side": ([None, "left", "right"], ["middle", 5, True]),
        "max_tokens": ([None, 1, 3], [-1, 1.5, HUGE]),
        "best_of": ([None, 1], [0, HUGE, 1.5, True]),
        "echo": SWITCH,
        "vllm_xargs": ([None, {}], [{"a": 1}, {"a": [1, "b"]}, "ab", 5, [["a", 1]]]),
        "cache_salt": ([None, "s"], ["", 5, "s" * 1025]),
        "request_id": ([None], ["", 5, "a b", "x" * 129, "\n"]),
        "stream": ([None, False], [1, "yes"]),
        "stream_options": ([None], [5, {"include_usage": 1}]),
    },
    "/v1/chat/completions": {
        "max_completion_tokens": ([None, 1, 3], [0, -1, INT32 + 1, HUGE, 1.5, True]),
        "logprobs": ([None, True], [1, "yes"]),
        "top_logprobs": ([None, 0], [-2, 21, HUGE, 1.5, "1", True]),
        "add_generation_prompt": SWITCH,
        "chat_template_kwargs": ([None, {}], [5, [1]]),
        "user": ([None, "me"], [5, "u" * 1025]),
    },
    "/tokenize": {
        "prompt": (["One", ""], [5, [5], True]),
        "add_special_tokens": SWITCH,
        "return_token_strs": SWITCH,
    },
    "/detokenize": {"tokens": IDS},
    "/explain_prefix": {
        "prompt": (["One", [5, 6]], [[-1] * 20, [VOCAB] * 20, [2**32] * 20, [HUGE], [True], 5]),
        "cache_salt": ([None, "s"], [5]),
    },
}  # fmt: skip
NEEDED = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 2},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5]},
    "/explain_prefix": {"prompt": PROMPT},
}


@cases(1)
def test_fields_of_http(rng: random.Random, doors: Doors) -> None:
    for path, fields in HTTP_ONLY.items():
        legal = {name: values for name, (values, _) in fields.items()}
        rows = covering_rows(legal, rng) if len(legal) > 1 else mixed_rows(legal, rng)
        rows = [row | ({"logprobs": True} if "top_logprobs" in row else {}) for row in rows]
        for row, reply in zip(
            rows, doors.post([(path, row_for(path, r)) for r in rows]), strict=True
        ):
            assert reply.status_code == 200, f"{reply.text} {row}"
        for name, (_, values) in fields.items():
            for value in values:
                some = [row_for(path, row | {name: value}) for row in mixed_rows(legal, rng)]
                if name == "top_logprobs":
                    some = [row | {"logprobs": True} for row in some]
                for reply in doors.post([(path, row) for row in some]):
                    check_refusal(reply, name, value)
    doors.check_canary()


def row_for(path: str, row: dict[str, Any]) -> dict[str, Any]:
    """What the path needs, then the row; what stays away is left out."""
    return NEEDED[path] | {name: value for name, value in row.items() if value is not None}


QUERIES = {
    "/v1/timeline": ("steps", ["0", "-1", "nan", "inf", "1e400", "x", "", "9" * 400, "0.5", "²"]),
    "/v1/diagnosis": ("seconds", ["0", "-1", "nan", "-inf", "x", "", "9" * 400, "1e-400", "²"]),
}


def test_questions_with_numbers(doors: Doors) -> None:
    for path, (name, values) in QUERIES.items():
        for value in (*values, "1", "1e300"):
            reply = doors.run(doors.client.get(path, params={name: value}))
            assert reply.status_code < 500, f"{path} {value} {reply.text}"
            if value not in ("1", "1e300", "", "0.5", "inf", "9" * 400):
                assert reply.status_code == 400, f"{path} {name}={value} {reply.text}"
                assert name in reply.json()["error"]["message"]


# ---- limits of a running engine ------------------------------------------------------------------

LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_num_seqs": ([8, 1, 2**20, None], [0, -1, 2**20 + 1, 2**63, HUGE, 1.5, 8.0, True, NAN]),
    "max_num_batched_tokens": (
        [64, 1, 17, INT32, None], [0, -1, INT32 + 1, 2**64, HUGE, 1.5, True],
    ),
    "long_prefill_token_threshold": ([0, 1, INT32, None], [-1, INT32 + 1, HUGE, 0.5, False]),
    "scheduling_policy": (["priority", "fcfs", "sjf", "fair", None], ["lifo", "", 5, ["fcfs"]]),
}  # fmt: skip
RESTORE = {name: legal[0] for name, (legal, _) in LIMITS.items()}


@cases(1)
def test_limits(rng: random.Random, doors: Doors) -> None:
    core = doors.llm.llm_engine.core
    legal = {name: values for name, (values, _) in LIMITS.items()}
    legal["max_num_seqs"] = [*legal["max_num_seqs"], 64]
    for row in covering_rows(legal, rng):
        given = {name: value for name, value in row.items() if value is not None}
        limits = RESTORE | given
        (reply,) = doors.post([("/limits", given)])
        if limits["max_num_seqs"] > limits["max_num_batched_tokens"]:
            check_sentence(
                reply.json()["error"]["message"], None, "max_num_seqs", limits["max_num_seqs"]
            )
            with pytest.raises(QuireError, match="is more than max_num_batched_tokens"):
                core.call("set_limits", given)
            continue
        assert reply.status_code == 200 and reply.json() == limits, reply.text
        assert core.call("set_limits", given) == limits
        doors.check_canary()
        core.call("set_limits", RESTORE)
        assert doors.post([("/limits", RESTORE)])[0].status_code == 200
    for name, (_, values) in LIMITS.items():
        for value in values:
            for other in (name, *rng.sample(sorted(RESTORE), 2)):
                given = {other: RESTORE[other], name: value}
                check_refusal(doors.post([("/limits", given)])[0], name, value)
                for refused in (
                    lambda given=given: core.call("set_limits", given),
                    lambda given=given: doors.run(doors.engine.set_limits(**given)),
                    lambda name=name, value=value: EngineConfig.from_options(**{name: value}),
                ):
                    with pytest.raises(QuireError) as caught:
                        refused()
                    check_sentence(caught.value.message, None, name, value)
    for value in (INT64 + 1, -HUGE, 1.5, True, "1"):
        check_refusal(doors.post([("/limits", {"priorities": {"r": value}})])[0], "priorit", value)
    assert doors.run(doors.client.get("/limits")).json() == RESTORE
    doors.check_canary()


# ---- options at the start ------------------------------------------------------------------------

BOTH_SWITCHES = ([True, False, None], [1, 0, "maybe", [True]])
OPTION_VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_model_len": ([None, -1, "auto", 512, "1k", "2K"], [0, -2, INT32 + 1, "8q", 1.5, True]),
    "seed": ([0, -7, INT64, -INT64 - 1], [INT64 + 1, HUGE, "x", 0.5, True]),
    "max_logprobs": ([20, 0, -1, INT32], [-2, INT32 + 1, "", NAN, True]),
    "block_size": ([16, "8", 128], [17, 0, -8, 2**40, 16.0, True]),
    "gpu_memory_utilization": ([0.5, 1, "0.25"], [0, -0.1, 1.01, NAN, INF, "much", True]),
    "kv_cache_memory_bytes": ([None, 2**27, "256M"], [0, EXACT + 1, 2**63, HUGE, 1e9, NAN, True]),
    "swap_space": ([None, 0, 0.01, "0.02"], [-1, 2.0**21, NAN, INF, 1e308, "4G", True]),
    "max_num_batched_tokens": ([64, 1, "2k", INT32], [0, INT32 + 1, HUGE, "64.0", 64.5, True]),
    "max_num_seqs": ([4, 1, "1k", 2**20], [0, -1, 2**20 + 1, 2**63, "many", 4.0, True]),
    "scheduler_aging_seconds": ([None, 0, 1e9], [-1, NAN, INF, 1e10, "x", True]),
    "stream_interval": ([1, 5, INT32], [0, -1, INT32 + 1, 2.0, "x", True, HUGE]),
    "long_prefill_token_threshold": ([0, 1, INT32], [-1, INT32 + 1, 0.5, True]),
    "scheduler_delay_factor": ([0, 0.5], [-0.1, NAN, INF, 1e308, True]),
    "max_num_queued_tokens": ([None, 1, EXACT, -1], [0, -2, EXACT + 1, 1.5, True]),
    "max_queued_bytes": ([None, 1, "1G", -1], [0, -2, EXACT + 1, 1.5, True]),
    "max_buffered_bytes": ([None, 1, "1M", -1], [0, -2, EXACT + 1, 1.5, True]),
    "watermark": ([0, 0.5, 0.999], [1, -0.1, NAN, True]),
    "record_steps": ([16, 0, 10**6], [-1, 10**6 + 1, 1.5, HUGE, True]),
    "max_log_len": ([None, 0, INT32], [-1, INT32 + 1, "x", True]),
    "trace_sampling_rate": ([1, 0, TINY], [-0.1, 1.1, NAN, True]),
    "kv_cache_metrics_sample": ([0.01, 1, TINY], [0, 1.1, NAN, True]),
    "core_restart_limit": ([16, 0, 10**6], [-1, 10**6 + 1, HUGE, 1.5, True]),
    "core_restart_window": ([300, 0, 1e9], [-1, NAN, INF, 1e308, True]),
    "core_stall_timeout": ([2.0, 0, 1e9], [-1, NAN, INF, 1e308, True]),
    "port": ([8000, 0, 65535], [-1, 65536, 2**63, "http", 1.5, True]),
    "max_body_bytes": ([2**20, "1M", 1024], [1023, 2**31, HUGE, NAN, True]),
    "max_n_sequences": ([1024, 1, "1k"], [0, -1, INT32 + 1, 1.5, True]),
    "max_stored_responses": ([1000, 0, "1k", INT32], [-1, INT32 + 1, 1.5, True]),
    "max_stored_response_bytes": ([2**20, "1M", 1], [0, EXACT + 1, HUGE, NAN, True]),
    "stored_response_seconds": ([3600, 0, 1e9], [-1, NAN, INF, 1e308, True]),
    "shutdown_timeout": ([0, 2.5, 1e9], [-1, NAN, INF, 1e308, True]),
    "stream_keep_alive": ([0, 2.5, 1e9], [-1, NAN, INF, 1e308, True]),
    "handover_timeout": ([0, 600, 1e9], [-1, NAN, INF, 1e308, True]),
    "ssl_cert_reqs": ([0], [-1, 3, 1.5, NAN, True]),
    "write_timeout": ([60, 0, 1e9], [-1, NAN, INF, 1e308, True]),
    "journal_max_bytes": ([2**16, "1G", EXACT], [2**16 - 1, 0, HUGE, 1.5, True]),
    "journal_claim_timeout": ([0, 300, 1e9], [-1, NAN, INF, 1e308, True]),
    "journal_fsync": (["never", "interval", "always"], ["sometimes", "", 5]),
    "stream_retention": ([300, 0, 1e9], [-1, NAN, INF, 1e308, True]),
    "max_kept_streams": ([1024, 1, "1k"], [0, -1, 10**6 + 1, HUGE, 1.5, True]),
    "max_kept_bytes": ([1, "256M", EXACT], [0, -1, EXACT + 1, 1.5, True]),
    "scheduling_policy": (["fcfs", "priority", "sjf", "fair"], ["lifo", "", 5]),
    "preemption_mode": (["auto", "swap", "recompute"], ["drop", 5]),
    "dtype": (["auto", "float32", "bfloat16"], ["int4", 5]),
    "enable_prefix_caching": BOTH_SWITCHES,
    "enable_chunked_prefill": BOTH_SWITCHES,
    "enforce_eager": BOTH_SWITCHES,
    "scheduler_reserve_full_isl": BOTH_SWITCHES,
}
SERVER = [flag.field for flag in flags(ServerConfig)]
LEGAL_OPTIONS = {name: legal for name, (legal, _) in OPTION_VALUES.items()}


@functools.cache
def parser() -> Parser:
    return build_parser()


def by_keyword(row: dict[str, Any]) -> Any:
    server = {n: v for n, v in row.items() if n in SERVER and v is not None}
    return EngineConfig.from_options(
        **{n: v for n, v in row.items() if n not in SERVER}
    ), ServerConfig(**server)


def by_flag(row: dict[str, Any]) -> Any:
    words = []
    for name, value in row.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) and name not in OPTIONS:
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words.append(f"{flag}={value}")
    namespace = parser().parse(words)
    return engine_config(namespace), server_config(namespace)


def by_file(folder: Path) -> Callable[[dict[str, Any]], Any]:
    def read(row: dict[str, Any]) -> Any:
        path = folder / "flags.yaml"
        path.write_text(yaml.safe_dump(row))
        namespace = parser().parse(["--config", str(path)])
        return engine_config(namespace), server_config(namespace)

    return read


def test_every_numeric_option_is_here() -> None:
    missing = set(OPTIONS) - set(OPTION_VALUES)
    assert missing == {"num_gpu_blocks_override", "max_num_queued_reqs"}, "rows like others'"


@cases(1)
def test_options_mean_the_same_at_every_door(rng: random.Random, tmp_path: Path) -> None:
    read = by_file(tmp_path)
    rows = rng.sample(rows_ := covering_rows(LEGAL_OPTIONS, rng), min(30, len(rows_)))
    for row in rows:
        assert by_keyword(row) == by_flag(row) == read(row), row
    for name, (_, values) in OPTION_VALUES.items():
        for value in values:
            row = {**rng.choice(rows), name: value}
            for door in (by_keyword, by_flag, read):
                if door is by_flag and name not in OPTIONS and not isinstance(value, str):
                    continue  # on the command line everything is text, and a switch has no value
                with pytest.raises(QuireError) as caught:
                    door(row)
                check_sentence(caught.value.message, caught.value.param, name, value)


@cases(3)
def test_engines_start_with_any_legal_options_or_say_why(rng: random.Random) -> None:
    server = {*SERVER, "max_num_queued_tokens", "max_queued_bytes", "max_buffered_bytes"}
    server |= {"core_restart_limit", "core_restart_window", "core_stall_timeout", "warm_spare"}
    table = {name: legal for name, legal in LEGAL_OPTIONS.items() if name not in server}
    row = {name: rng.choice(values) for name, values in table.items()}
    about = {"dtype": "bfloat16", "generation_config": "vllm"}
    try:
        llm = LLM(**row | about)
    except QuireError as error:
        assert any("--" + name.replace("_", "-") in error.message for name in row), error.message
        assert "\n" not in error.message
        return
    with llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = llm.generate([PROMPT, "One", "Two"], params, use_tqdm=False)
        assert outputs[0].outputs[0].text.startswith(" Paris"), row
