"""One body cannot stand for a thousand times its work: limits, and what is done once.

Work is counted, not timed.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire.params
from fake_engine import VOCAB_SIZE, FakeEngine
from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.serving import limits
from quire.serving.app import build_app
from quire.serving.openai import completion_reply as completions
from quire.serving.server_state import ServerState
from silent_core import SilentCore, silent_engine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ["alpha", "beta", "gamma"]


@pytest.fixture
async def silent() -> AsyncIterator[tuple[httpx.AsyncClient, AsyncLLM, SilentCore]]:
    engine, core = silent_engine()
    transport = httpx.ASGITransport(build_app(ServerState(ServerConfig(), engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, engine, core


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often parameters were checked."""
    counts: Counter[str] = Counter()
    check = quire.params._check

    def counted(params: Any) -> None:
        counts["checks"] += 1
        check(params)

    monkeypatch.setattr(quire.params, "_check", counted)
    return counts


@pytest.mark.parametrize("shape", [{"prompt": ["a"] * 64}, {"prompt": ["a"] * 32, "n": 2}])
async def test_parameters_are_read_once_for_all_prompts_and_choices(
    silent: Any, work: Counter[str], monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    client, engine, core = silent
    encoded: Counter[str] = Counter()
    encode = engine.tokenizer.encode

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded[text.strip()] += 1
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", counted)
    body = {
        "max_tokens": 1,
        "temperature": 1,
        "bad_words": WORDS * 2,
        "allowed_token_ids": [*range(2000), *range(1000)],
        "stop_token_ids": [7, 7, 8],
        "stop": ["x", "x"],
        "logit_bias": {"3": 1.0},
    }
    reply = await client.post(TEXT, json=shape | body)
    assert reply.status_code == 200, reply.text
    assert work["checks"] == 1
    assert [encoded[word] for word in WORDS] == [2, 2, 2], "bare and after a space, once each"
    assert len(core.sent) == 64
    first = core.sent[0].sampling_params
    assert first.allowed_token_ids == list(range(2000))
    assert (first.stop_token_ids, first.stop, first.bad_words) == ([7, 8], ["x"], WORDS)
    for request in core.sent:  # one copy in the journal, however many prompts
        for name in ("allowed_token_ids", "logit_bias", "bad_words_token_ids", "stop_token_ids"):
            assert getattr(request.sampling_params, name) is getattr(first, name), name


async def test_what_belongs_to_one_prompt_is_still_filled_in_for_each(silent: Any) -> None:
    client, engine, core = silent
    reply = await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
    assert reply.status_code == 200
    room = engine.max_model_len - reply.json()["usage"]["prompt_tokens"]
    assert core.sent[0].sampling_params.max_tokens == room
    body = {"prompt": [[1] * 2040, [1] * 2000], "max_tokens": 30, "min_tokens": 20}
    error = (await client.post(TEXT, json=body)).json()["error"]
    assert error["param"] == "min_tokens" and "at most 8" in error["message"]
    body["prompt"] = body["prompt"][::-1]
    error = (await client.post(TEXT, json=body)).json()["error"]
    assert error["param"] == "min_tokens" and "at most 8" in error["message"]


SCORED = {"prompt": "abcd", "n": 128, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_a_prompt_are_built_once_for_all_choices(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    built, spelt = Counter[str](), Counter[int]()
    real, spell = completions.spliced_scores, completions.TokenTexts.spell

    def counted(*given: Any) -> Any:
        built["prompts"] += 1
        return real(*given)

    def counted_spell(self: Any, token_id: int, logprob: Any = None) -> str:
        spelt[token_id] += 1
        return spell(self, token_id, logprob)

    monkeypatch.setattr(completions, "spliced_scores", counted)
    monkeypatch.setattr(completions.TokenTexts, "spell", counted_spell)
    body = SCORED | {"echo": True, "logprobs": 1, "stream": stream}
    reply = await client.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    assert built["prompts"] == 1
    assert spelt[ord("a")] <= 4, "the echoed tokens are spelt once, not for each choice"
    if stream:
        frames = [f.removeprefix("data: ") for f in reply.text.split("\n\n") if f]
        choices = [c for f in frames if f != "[DONE]" for c in json.loads(f)["choices"]]
        choices = [c for c in choices if c["text"].startswith("abcd")]
    else:
        choices = reply.json()["choices"]
    assert len(choices) == 128
    for choice in choices:
        assert choice["prompt_logprobs"] == choices[0]["prompt_logprobs"] is not None
        assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c", "d", "H"]
        assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 6, 7]


LISTS = [
    ({"prompt": ["a"] * 1025}, TEXT, "prompt", "1024 prompts, got 1025"),
    ({"prompt": [[1]] * 1025}, TEXT, "prompt", "1024 prompts, got 1025"),
    ({"prompt": ["a"] * 9, "n": 128}, TEXT, "prompt",
     "1024 completions (prompts times n; --max-n-sequences)"),
    ({"allowed_token_ids": [1] * (2**19 + 1)}, CHAT, "allowed_token_ids", "524288 ids, got 524289"),
    ({"stop_token_ids": [1] * (2**19 + 1)}, CHAT, "stop_token_ids", "524288 ids, got 524289"),
    ({"prompt": ["a"] * 1024, "logit_bias": {str(i): 1 for i in range(4096)}, "stop": "x"}, TEXT,
     None, "4194304, got 4195328"),
    ({"prompt": ["a"] * 1024, "bad_words": ["x" * 100] * 41}, TEXT, None, "got 4198400"),
    ({"prompt": [[1] * 40_000], "n": 128}, TEXT, "prompt", "4194304 where n is above 1"),
    ({"prompt": [[1] * 8_000], "n": 128, "prompt_logprobs": 2}, TEXT, "prompt_logprobs",
     "2097152 numbers in all"),
    ({"prompt": [[1] * 8_000], "n": 128, "logprobs": 2, "echo": True}, TEXT, "prompt_logprobs",
     "got 3072000"),
    ({"messages": [{"role": "user", "content": "x" * 8_000}], "n": 128, "prompt_logprobs": 2}, CHAT,
     "prompt_logprobs", "2097152 numbers in all"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "path", "param", "words"), LISTS)
async def test_more_is_refused_in_one_sentence(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    change: dict[str, Any],
    path: str,
    param: str | None,
    words: str,
) -> None:
    engine.max_model_len = 10**6
    good = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
    reply = await client.post(path, json=good | change)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert error["param"] == param and words in error["message"], error
    assert error["message"].endswith(".") and len(error["message"]) < 300
    assert not engine.submitted


AT_THE_LIMIT = [
    {"prompt": ["a"] * 1024},
    {"prompt": ["a"] * 8, "n": 128},
    {"allowed_token_ids": list(range(VOCAB_SIZE)) * 1747},
    {"prompt": [[1] * 32_768], "n": 128},
    {"prompt": [[1] * 40_000]},
]


@pytest.mark.parametrize("change", AT_THE_LIMIT, ids=range(len(AT_THE_LIMIT)))
async def test_the_limit_itself_is_allowed(
    client: httpx.AsyncClient, engine: FakeEngine, change: dict[str, Any]
) -> None:
    engine.max_model_len = 10**6
    reply = await client.post(TEXT, json={"prompt": "a", "max_tokens": 1} | change)
    assert reply.status_code == 200, reply.text


async def test_many_short_texts_are_tokenised_off_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    encode = engine.tokenizer.encode

    def seen(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", seen)
    await client.post(TEXT, json={"prompt": ["x" * 100] * 100})
    assert threads and threading.main_thread() not in threads
    threads.clear()
    await client.post(TEXT, json={"prompt": ["x" * 40] * 100})
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize(("count", "off"), [(20, False), (200, True)])
async def test_long_conversations_are_rendered_off_the_loop(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    off: bool,
) -> None:
    threads = set()
    render = engine.tokenizer.apply_chat_template

    def seen(*args: Any, **kwargs: Any) -> str:
        threads.add(threading.current_thread())
        return render(*args, **kwargs)

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", seen)
    engine.max_model_len = 10**5
    body = {"messages": [{"role": "user", "content": "x"}] * count}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert (threading.main_thread() not in threads) == off


def test_every_limit_says_its_number_and_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    rows = [value for value in vars(limits).values() if isinstance(value, limits.Limit)]
    assert len(rows) >= 7
    for row in rows:
        assert str(row.most) in row.rule.format(param="prompt", most=row.most)
        assert f"| {row.most} |" in page
