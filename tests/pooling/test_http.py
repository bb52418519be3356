"""The pooling endpoints on real engines with tiny models, through the official client and raw."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

import tiny
from quire import LLM, AsyncLLM, EngineConfig, PoolingParams
from quire.config import ServerConfig
from quire.config.key_file import digest_of
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDERS = {
    "embed": ("BertModel", {"matryoshka_dimensions": [8, 16]}),
    "classify": ("BertForSequenceClassification", {"num_labels": 3}),
    "rerank": ("BertForSequenceClassification", {"num_labels": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (architecture, changes) in FOLDERS.items():
        made[name] = tmp_path_factory.mktemp(name)
        tiny.make(made[name], architecture, **changes)
    return made


async def served(folder: Path, name: str) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig.from_options(model=str(folder), served_model_name=[name])
    engine = await AsyncLLM.start(config)
    await engine.wait_ready()
    state = ServerState(ServerConfig(), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        client.engine = engine  # type: ignore[attr-defined]
        yield client
    assert state.in_flight == 0
    assert not state.active_ids
    assert engine.num_unfinished == 0
    await engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embed(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(folders["embed"], "embed"):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def classify(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(folders["classify"], "classify"):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rerank(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(folders["rerank"], "rerank"):
        yield client


def offline(folder: Path, inputs: Any, **params: Any) -> list[Any]:
    with LLM(str(folder)) as llm:
        outputs = llm.encode(inputs, PoolingParams(**params), use_tqdm=False)
        return [output.outputs.data for output in outputs]


async def ok(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


TEXTS = ["hello world", "paris , france ?", "the cat sat on the mat ."]


async def test_the_official_client(embed: httpx.AsyncClient, folders: dict[str, Path]) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=embed)
    reply = await client.embeddings.create(model="embed", input=TEXTS)
    want = offline(folders["embed"], TEXTS)
    assert [item.index for item in reply.data] == [0, 1, 2]
    for item, row in zip(reply.data, want, strict=True):
        assert np.array(item.embedding, "f4").tobytes() == row.tobytes()
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 6
    plain = await client.embeddings.create(model="embed", input=TEXTS[0], encoding_format="float")
    assert np.array(plain.data[0].embedding, "f4").tobytes() == want[0].tobytes()
    short = await client.embeddings.create(model="embed", input=TEXTS[0], dimensions=16)
    cut = want[0][:16] / np.linalg.norm(want[0][:16])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)


async def test_shapes_of_input(embed: httpx.AsyncClient, folders: dict[str, Path]) -> None:
    ids = [[2, 60, 3], [2, 61, 62, 3]]
    want = offline(folders["embed"], ids)
    lists = await ok(embed, "/v1/embeddings", input=ids)
    one = await ok(embed, "/v1/embeddings", input=ids[1], encoding_format="base64")
    assert [np.array(d["embedding"], "f4").tobytes() for d in lists["data"]] == [
        row.tobytes() for row in want
    ]
    assert base64.b64decode(one["data"][0]["embedding"]) == want[1].tobytes()
    assert lists["object"] == "list"
    assert lists["data"][0]["object"] == "embedding"
    assert lists["id"].startswith("embd-")
    assert lists["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}


async def test_cut_prompts(embed: httpx.AsyncClient, folders: dict[str, Path]) -> None:
    text = "hello world paris france"
    right = await ok(embed, "/v1/embeddings", input=text, truncate_prompt_tokens=4)
    assert right["usage"]["prompt_tokens"] == 4
    want = offline(folders["embed"], ["hello world"])[0]
    assert right["data"][0]["embedding"] == want.tolist()
    body = {"input": text, "truncate_prompt_tokens": 4, "truncation_side": "left"}
    left = await ok(embed, "/v1/embeddings", **body)
    assert left["data"][0]["embedding"] == offline(folders["embed"], ["paris france"])[0].tolist()
    long = await ok(embed, "/v1/embeddings", input="hello " * 500, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 160
    ids = await ok(embed, "/v1/embeddings", input=[60] * 500, truncate_prompt_tokens=-1)
    assert ids["usage"]["prompt_tokens"] == 160


async def test_raw_pooling(embed: httpx.AsyncClient, classify: httpx.AsyncClient) -> None:
    whole = await ok(embed, "/pooling", input="hello world", task="token_embed")
    assert np.array(whole["data"][0]["data"]).shape == (4, 48)
    assert whole["data"][0]["object"] == "pooling"
    vector = await ok(embed, "/pooling", input="hello world", use_activation=False)
    assert abs(np.linalg.norm(vector["data"][0]["data"]) - 1) > 0.1
    bare = await ok(classify, "/pooling", input="hello world", use_activation=False)
    assert len(bare["data"][0]["data"]) == 3
    assert abs(sum(bare["data"][0]["data"]) - 1) > 1e-3


async def test_classify(classify: httpx.AsyncClient, folders: dict[str, Path]) -> None:
    reply = await ok(classify, "/classify", input=TEXTS)
    for item, row in zip(reply["data"], offline(folders["classify"], TEXTS), strict=True):
        assert item["probs"] == row.tolist()
        assert item["num_classes"] == 3
        assert item["label"] == f"LABEL_{row.argmax()}"
        assert sum(item["probs"]) == pytest.approx(1.0, abs=1e-6)


async def test_scores_of_a_cross_encoder(
    rerank: httpx.AsyncClient, folders: dict[str, Path]
) -> None:
    with LLM(str(folders["rerank"])) as llm:
        want = [o.outputs.score for o in llm.score("hello ?", TEXTS, use_tqdm=False)]
    for path, names in (
        ("/score", ("text_1", "text_2")),
        ("/v1/score", ("queries", "documents")),
        ("/score", ("data_1", "data_2")),
        ("/score", ("queries", "items")),
    ):
        reply = await ok(rerank, path, **dict(zip(names, ("hello ?", TEXTS), strict=True)))
        assert [item["score"] for item in reply["data"]] == want
        assert reply["data"][0]["object"] == "score"
    pairwise = await ok(rerank, "/score", text_1=["hello ?"] * 3, text_2=TEXTS)
    assert [item["score"] for item in pairwise["data"]] == want
    assert len(set(want)) == 3


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(rerank: httpx.AsyncClient, path: str) -> None:
    scored = await ok(rerank, "/score", text_1="hello ?", text_2=TEXTS)
    scores = [item["score"] for item in scored["data"]]
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    reply = await ok(rerank, path, query="hello ?", documents=documents)
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [r["index"] for r in reply["results"]] == order
    assert [r["relevance_score"] for r in reply["results"]] == [scores[i] for i in order]
    assert [r["document"]["text"] for r in reply["results"]] == [TEXTS[i] for i in order]
    body = {"query": "hello ?", "documents": TEXTS, "top_n": 1, "return_documents": False}
    best = await ok(rerank, path, **body)
    assert best["results"] == [{"index": order[0], "relevance_score": scores[order[0]]}]
    assert best["usage"]["total_tokens"] == reply["usage"]["total_tokens"]


async def test_documents_are_cut(rerank: httpx.AsyncClient) -> None:
    body = {"query": "hello ?", "documents": ["paris " * 500]}
    refused = await rerank.post("/rerank", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = await ok(rerank, "/rerank", **body, max_tokens_per_doc=5)
    same = await ok(rerank, "/rerank", query="hello ?", documents=["paris " * 5])
    assert cut["results"][0]["relevance_score"] == same["results"][0]["relevance_score"]
    assert cut["usage"]["prompt_tokens"] == 2 + 5 + 3
    whole = await ok(rerank, "/rerank", **body, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == 160


async def test_scores_of_an_embedding_model(embed: httpx.AsyncClient) -> None:
    vectors = await ok(embed, "/v1/embeddings", input=["hello ?", *TEXTS])
    query, *rows = (np.array(item["embedding"]) for item in vectors["data"])
    reply = await ok(embed, "/rerank", query="hello ?", documents=TEXTS)
    for result in reply["results"]:
        want = float(query @ rows[result["index"]])
        assert result["relevance_score"] == pytest.approx(want, abs=1e-6)
    assert reply["usage"]["prompt_tokens"] == vectors["usage"]["prompt_tokens"]


USER = {"role": "user", "content": "x"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/classify": {"input": "hello"},
    "/score": {"text_1": "hello", "text_2": ["a", "b"]},
    "/rerank": {"query": "hello", "documents": ["a", "b"]},
}
BAD = [
    # path, what is changed in a good body, param, words of the message
    ("/v1/embeddings", {"input": None}, "input", ["input or messages"]),
    ("/v1/embeddings", {"input": []}, "input", ["an empty list"]),
    ("/v1/embeddings", {"input": ["a", 1]}, "input", ["a mixed list"]),
    ("/v1/embeddings", {"input": [[]]}, "input", ["at least one token"]),
    ("/v1/embeddings", {"input": [1, 66]}, "input", ["0 to 64", "66"]),
    ("/v1/embeddings", {"input": [-1]}, "input", ["0 to 64", "-1"]),
    ("/v1/embeddings", {"input": 5}, "input", ["a string", "5"]),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", ["1 to 2048", "2049"]),
    ("/v1/embeddings", {"input": "a " * 200}, "input", ["at most 160 tokens", "202"]),
    ("/v1/embeddings", {"input": [60] * 161}, "input", ["at most 160 tokens", "161"]),
    ("/v1/embeddings", {"input": "a " * 20_000}, "input", ["40000 characters"]),
    ("/v1/embeddings", {"inptu": "x"}, "inptu", ["Did you mean `input`"]),
    ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format", ["base64", '"hex"']),
    ("/v1/embeddings", {"dimensions": 9}, "dimensions", ["8, 16", "9"]),
    ("/v1/embeddings", {"dimensions": 0}, "dimensions", ["at least 1", "0"]),
    ("/v1/embeddings", {"dimensions": 1.5}, "dimensions", ["an integer", "1.5"]),
    ("/v1/embeddings", {"model": "nobody"}, "model", ["`nobody`", "`embed`"]),
    ("/v1/embeddings", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["-1", "0"]),
    ("/v1/embeddings", {"truncation_side": "up"}, "truncation_side", ["left or right", "up"]),
    ("/v1/embeddings", {"use_activation": True, "normalize": False}, "use_activation", ["differ"]),
    ("/v1/embeddings", {"embed_dtype": "float16"}, "embed_dtype", ["float32"]),
    ("/v1/embeddings", {"priority": 2**63}, "priority", [str(2**63)]),
    ("/v1/embeddings", {"cache_salt": ""}, "cache_salt", ["empty"]),
    ("/v1/embeddings", {"messages": []}, "input", ["input or messages"]),
    ("/v1/embeddings", {"chat_template_kwargs": {}}, "chat_template_kwargs", ["messages"]),
    ("/pooling", {"task": "sing"}, "task", ["embed", "sing"]),
    ("/pooling", {"task": "classify"}, "task", ["gives embeddings", "'classify'"]),
    ("/classify", {}, "task", ["gives embeddings", "'classify'"]),
    ("/score", {"text_1": None}, "queries", ["Give one of"]),
    ("/score", {"queries": "x"}, "queries", ["only one"]),
    ("/score", {"text_1": ["x", "y", "z"]}, "text_1", ["(2)", "3"]),
    ("/score", {"text_2": []}, "text_2", ["1 to 2048", "0"]),
    ("/score", {"text_2": [5]}, "text_2[0]", ["a string", "5"]),
    ("/rerank", {"query": None}, "query", ["a string", "null"]),
    ("/rerank", {"documents": []}, "documents", ["1 to 2048", "0"]),
    ("/rerank", {"documents": [{"text": 1}]}, "documents[0].text", ["a string"]),
    ("/rerank", {"top_n": -1}, "top_n", ["at least 0", "-1"]),
    ("/rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc", ["at least 1", "0"]),
    ("/rerank", {"rank_fields": ["x"]}, "rank_fields", ["texts"]),
]


@pytest.mark.parametrize(("path", "change", "param", "words"), BAD)
async def test_bad_input(
    embed: httpx.AsyncClient, path: str, change: dict[str, Any], param: str, words: list[str]
) -> None:
    reply = await embed.post(path, json=GOOD[path] | change)
    error = reply.json()["error"]
    assert reply.status_code == (404 if change.get("model") else 400), error
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error
    assert len(error["message"]) < 400


NUMBERS = {
    "/v1/embeddings": ("truncate_prompt_tokens", "dimensions", "priority"),
    "/score": ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc", "priority"),
    "/rerank": ("top_n", "max_tokens_per_query", "max_tokens_per_doc", "truncate_prompt_tokens"),
}


async def test_numbers_of_any_size(embed: httpx.AsyncClient, rerank: httpx.AsyncClient) -> None:
    for path, fields in NUMBERS.items():
        for field in fields:
            for value in (10**30, 2**64, -(2**63) - 1, 1.5, True, "1", [1]):
                for client in (embed, rerank) if path != "/v1/embeddings" else (embed,):
                    reply = await client.post(path, json=GOOD[path] | {"model": None, field: value})
                    error = reply.json()["error"]
                    assert reply.status_code == 400, f"{path} {field}={value} {reply.text}"
                    assert field in error["message"] and error["param"] == field, error
                    told = "true" if value is True else str(value)
                    assert told in error["message"] or "bits" in error["message"], error


async def test_wrong_kinds_of_model(
    embed: httpx.AsyncClient, classify: httpx.AsyncClient, rerank: httpx.AsyncClient
) -> None:
    cases = [
        (embed, "/v1/completions", {"prompt": "x"}, "gives embeddings; it generates no text"),
        (
            embed,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "no text",
        ),
        (classify, "/v1/completions", {"prompt": "x"}, "classifies; it generates no text"),
        (classify, "/v1/embeddings", {"input": "x"}, "'embed'"),
        (classify, "/score", GOOD["/score"], "3 classes"),
        (rerank, "/v1/embeddings", {"input": "x"}, "'embed'"),
    ]
    for client, path, body, words in cases:
        reply = await client.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "unsupported_task", reply.text
        assert words in reply.json()["error"]["message"]


async def test_async_encode_and_metrics(embed: httpx.AsyncClient) -> None:
    engine: AsyncLLM = embed.engine  # type: ignore[attr-defined]
    before = _metric(engine, "vllm:prompt_tokens_total")
    outputs = [o async for o in engine.encode([2, 60, 3], PoolingParams(), "mine")]
    assert len(outputs) == 1
    assert outputs[0].outputs.data.shape == (48,)
    assert _metric(engine, "vllm:prompt_tokens_total") == before + 3
    assert _metric(engine, 'vllm:request_success_total{engine="0",finished_reason="stop"') > 0


def _metric(engine: AsyncLLM, name: str) -> float:
    samples = engine.frontend.prometheus.snapshot()
    if name.startswith("vllm:request_success"):
        return sum(
            s.value for s in samples
            if s.name == "vllm:request_success" and s.labels.get("finished_reason") == "stop"
        )  # fmt: skip
    return sum(s.value for s in samples if s.name == name.removesuffix("_total"))


async def test_leaving_early_leaves_nothing(embed: httpx.AsyncClient) -> None:
    engine: AsyncLLM = embed.engine  # type: ignore[attr-defined]
    stream = await engine.submit([2, 60, 3], PoolingParams(), "gone")
    await stream.aclose()
    facts = await engine.call("check_integrity")
    assert facts["running"] == facts["waiting"] == 0
    assert facts["free_blocks"] == facts["total_blocks"]


async def test_invocations_answer_as_the_routes(
    embed: httpx.AsyncClient, classify: httpx.AsyncClient, rerank: httpx.AsyncClient
) -> None:
    pairs = {"text_1": TEXTS[0], "text_2": TEXTS}
    ranked = {"query": TEXTS[0], "documents": TEXTS}
    for client, path, body in (
        (embed, "/v1/embeddings", {"input": TEXTS}),
        (embed, "/score", pairs),
        (embed, "/rerank", ranked),
        (classify, "/classify", {"input": TEXTS}),
        (rerank, "/score", pairs),
        (rerank, "/rerank", ranked),
    ):
        wanted, found = [await ok(client, where, **body) for where in (path, "/invocations")]
        for reply in (wanted, found):
            reply.pop("created", None), reply.pop("id")
        assert wanted == found


async def test_a_key_has_its_limits_and_is_charged(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{digest_of(b'ann').hex()}:user:requests_per_minute=2\n")
    keys.chmod(0o600)
    engine = await AsyncLLM.start(EngineConfig.from_options(model=str(folders["embed"])))
    await engine.wait_ready()
    state = ServerState(ServerConfig(api_key_file=str(keys)), engine)
    transport = httpx.ASGITransport(build_app(state))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers={"x-api-key": "ann"}
    ) as client:
        asked = [("/v1/embeddings", {"input": ["a b", "c"]}), ("/pooling", {"input": "a"})]
        tokens = 0
        for path, body in asked:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            tokens += reply.json()["usage"]["prompt_tokens"]
        refused = await client.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 429 and refused.json()["error"]["key"] == "ann"
        [told] = (await client.get("/v1/usage")).json()["data"]
        assert told["tokens"] == {"prompt": tokens, "cached": 0, "generated": 0}
        assert told["requests"]["completed"] == 2 and told["limited"] == {"requests_per_minute": 1}
    state.accounts.check_integrity()
    engine.check_integrity()
    await engine.shutdown()
