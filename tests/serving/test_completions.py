"""`POST /v1/completions`, `/tokenize`, `/detokenize` and `/v1/models`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fake_engine import BOS, FakeEngine


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def events(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    reply = await client.post("/v1/completions", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def test_reply(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await post(client, prompt="ab", model="quire-demo")
    assert reply.pop("id").startswith("cmpl-")
    reply.pop("created"), reply.pop("system_fingerprint")
    assert reply == {
        "object": "text_completion",
        "model": "quire-demo",
        "choices": [
            {
                "index": 0,
                "text": "Hey",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "seed": 1001,
    }
    prompt, params, request_id, *_ = engine.submitted[0]
    assert prompt == [BOS, 97, 98]
    assert params.max_tokens == 16
    assert request_id.endswith("-0")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_shapes_of_prompts(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, expected: list[list[int]]
) -> None:
    reply = await post(client, prompt=prompt, n=2)
    assert [entry[0] for entry in engine.submitted] == expected
    assert [c["index"] for c in reply["choices"]] == list(range(2 * len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert reply["usage"]["completion_tokens"] == 3 * 2 * len(expected)


async def test_one_seed_repeats_a_request_of_several_prompts(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await post(client, prompt=["a", "b", "c"])
    assert reply["seed"] == 1001
    drawn = [entry[1].seed for entry in engine.submitted]
    assert drawn[0] is None and len({1001, *drawn[1:]}) == 3
    again = await post(client, prompt=["a", "b", "c"], seed=reply["seed"])
    assert again["seed"] == 1001
    assert [entry[1].seed for entry in engine.submitted[3:]] == [1001, *drawn[1:]]


async def test_without_special_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, prompt="a", add_special_tokens=False)
    assert engine.submitted[0][0] == [97]


async def test_echo_as_the_evaluation_harness_uses_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    ids = [97, 98, 99, 100]
    body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
    reply = await post(client, **body, temperature=0)
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abcdH"
    assert logprobs["tokens"] == ["a", "b", "c", "d", "H"], "exactly one generated token"
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    pairs = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    greedy = [own == max(top.values()) for own, top in pairs]
    assert greedy == [True, False, True, True]
    params = engine.submitted[0][1]
    assert (params.prompt_logprobs, params.logprobs, params.max_tokens) == (1, 1, 1)


async def test_echo_without_logprobs_keeps_the_prefix_cache(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    reply = await post(client, prompt="ab", echo=True)
    assert reply["choices"][0]["text"] == "abHey"
    assert engine.submitted[0][1].prompt_logprobs is None


async def test_echo_of_the_prompt_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 0}
    reply = await post(client, **body)
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert reply["usage"]["completion_tokens"] == 0
    chunks = await events(client, **body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "ab"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("echoed", "scored"), [(1, 4), (4, 1), (0, 4), (2, 2), (4, 0)])
async def test_echoed_and_prompt_logprobs_each_have_as_many_as_they_ask_for(
    client: httpx.AsyncClient, echoed: int, scored: int
) -> None:
    body = {"prompt": [97, 98, 99], "echo": True, "max_tokens": 1}
    choice = (await post(client, **body, logprobs=echoed, prompt_logprobs=scored))["choices"][0]
    alone = (await post(client, **body, logprobs=echoed))["choices"][0]
    assert choice["logprobs"] == alone["logprobs"]
    (other,) = (await post(client, prompt=[97, 98, 99], prompt_logprobs=scored))["choices"]
    assert choice["prompt_logprobs"] == other["prompt_logprobs"]


@pytest.mark.parametrize("prompt", ["abcd", [97, 98, 99, 100], ["abcd"]])
async def test_offsets_are_places_in_an_echoed_text_without_logprobs_of_its_own(
    client: httpx.AsyncClient, prompt: Any
) -> None:
    body = {"prompt": prompt, "echo": True, "logprob_token_ids": [7], "seed": 3}
    (choice,) = (await post(client, **body))["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert text.startswith("abcd") and found["text_offset"][0] == 4
    pairs = list(zip(found["text_offset"], found["tokens"], strict=True))
    assert pairs and all(text.startswith(token, at) for at, token in pairs if token in text)
    chunks = await events(client, **body)
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
    assert sum((one["text_offset"] for one in told if one), []) == found["text_offset"]


async def test_equal_texts_of_candidates_keep_the_likeliest(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine._text", lambda token_id: "\ufffd")
    body = {"prompt": [97, 98, 99], "echo": True, "logprobs": 2, "max_tokens": 1}
    logprobs = (await post(client, **body))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][1] == {"\ufffd": -0.1}, "the other's is lower"
    assert logprobs["top_logprobs"][2] == {"\ufffd": -0.1}, "its own logprob is -2.5"
    assert logprobs["token_logprobs"][2] == -2.5


@pytest.mark.parametrize(
    "extras", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}]
)
async def test_stream_equals_whole(client: httpx.AsyncClient, extras: dict[str, Any]) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 1, **extras}
    whole = await post(client, **body)
    chunks = await events(client, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert chunks[0]["seed"] == 1 and "seed" not in chunks[1]
    for choice in whole["choices"]:
        mine = [
            c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]
        ]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == "stop"
        for key, values in (choice["logprobs"] or {}).items():
            assert [v for c in mine for v in c["logprobs"][key]] == values


async def test_golden_stream(
    client: httpx.AsyncClient, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serving.exchange.time.time", lambda: 1_700_000_000.5)
    state.model_for().fingerprint = "FP"
    reply = await client.post(
        "/v1/completions",
        json={"prompt": "a", "stream": True},
        headers={"x-request-id": "r"},
    )
    head = (
        'data: {"id":"cmpl-r","object":"text_completion","created":1700000000,'
        '"model":"quire-demo","system_fingerprint":"FP","choices":[{"index":0,'
    )
    end = '"finish_reason":null,"stop_reason":null}],"seed":1001}\n\n'
    assert reply.text == (
        head + '"text":"H","logprobs":null,' + end
        + head + '"text":"e","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '"text":"y","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_prompt_logprobs_reach_each_choice_even_if_they_come_late(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.output

    def late(*args: Any, **kwargs: Any) -> Any:
        """The scores come with the second output."""
        span = args[3]
        return real(*args, **{**kwargs, "scored": span[0] == 1})

    monkeypatch.setattr(engine, "output", late)
    chunks = await events(client, prompt=[97, 98], n=2, echo=True, logprobs=1)
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        tokens = [t for c in mine for t in c["logprobs"]["tokens"]]
        assert tokens == ["a", "b", "H", "e", "y"]
        assert mine[0]["text"] == "abH"


async def test_token_ids(client: httpx.AsyncClient) -> None:
    choice = (await post(client, prompt=[1, 2], return_token_ids=True))["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([72, 101, 121], [1, 2])
    chunks = await events(client, prompt=[1, 2], return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [1, 2]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == [72, 101, 121]


async def test_best_of_equal_to_n(client: httpx.AsyncClient) -> None:
    await post(client, prompt="a", best_of=1)
    await post(client, prompt="a", n=3, best_of=3)


async def test_refused_prompt_aborts_those_before_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.hang.clear()
    reply = await client.post("/v1/completions", json={"prompt": ["ok", "x" * 600]})
    assert reply.status_code == 400
    assert len(engine.aborted) == 1


async def test_failure_of_one_prompt_ends_the_stream_with_an_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.break_after = 2
    chunks = await events(client, prompt=["a", "b"])
    assert chunks[-1]["error"]["code"] == "step_failed"


async def test_tokenize_text(client: httpx.AsyncClient) -> None:
    reply = await client.post("/tokenize", json={"prompt": "ab"})
    assert reply.json() == {
        "count": 3, "max_model_len": 512, "tokens": [BOS, 97, 98], "token_strs": None,
    }  # fmt: skip
    body = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    reply = await client.post("/tokenize", json=body)
    assert (reply.json()["tokens"], reply.json()["token_strs"]) == ([97, 98], ["a", "b"])


async def test_tokenize_chat(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    reply = await client.post("/tokenize", json=body)
    assert bytes(reply.json()["tokens"]) == b"<user>hi"


async def test_detokenize(client: httpx.AsyncClient) -> None:
    reply = await client.post("/detokenize", json={"tokens": [BOS, 97, 98]})
    assert reply.json() == {"prompt": "<s>ab"}


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["quire-demo", "org/small"]
    card = (await client.get("/v1/models/org/small")).json()
    assert card == listed["data"][1]
    assert (card["object"], card["max_model_len"], card["owned_by"]) == ("model", 512, "quire")
    reply = await client.get("/v1/models/org/large")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
