"""Logits processors in vLLM's form, at every door, alone, in a crowd, chunked, preempted and after
the death of an engine core."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.errors import ConfigError, InvalidRequest, ProcessorRefused
from quire.outputs import RequestOutput
from routes_server import RoutesServer

PROMPT = "The capital of France is"
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "generation_config": "vllm"}
SUPPORT = str(Path(__file__).parent.parent / "support")
NAMES = [f"toy_processors:{name}" for name in ("OnlyToken", "Counting", "Sharper", "Wrapped")]
ALL = [*NAMES, "toy_processors:Harmful"]
ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "extra_args": {"count": True}},
    {"temperature": 1, "seed": 3, "extra_args": {"count": True, "sharpen": 4}},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "extra_args": {"ban": [5, 7], "sharpen": 3}},
    {"temperature": 1, "seed": 5, "extra_args": {"target_token": 300, "after": 20}},
    {"temperature": 1, "seed": 6, "min_p": 0.02, "top_k": 40, "extra_args": {"sharpen": 9},
     "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1, "seed": 7},
    {"temperature": 0},
]  # fmt: skip


def outputs_of(llm: LLM, asks: list[dict[str, Any]], **more: Any) -> list[RequestOutput]:
    params = [SamplingParams(**ask | {"max_tokens": 60, "ignore_eos": True} | more) for ask in asks]
    prompts = [f"{PROMPT} {i % len(ASKS)}" for i in range(len(asks))]
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(llm: LLM, asks: list[dict[str, Any]], **more: Any) -> list[Any]:
    outputs = outputs_of(llm, asks, **more)
    assert not any(output.error for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(**OPTIONS, logits_processors=ALL)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    made = LLM(**OPTIONS)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[RoutesServer]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", SUPPORT, prepend=":")
        made = RoutesServer(runner, OPTIONS | {"logits_processors": ALL})
        yield made
        made.close()


def test_they_do_what_they_say(llm: LLM, plain: LLM) -> None:
    found, before = tokens(llm, ASKS), tokens(plain, [a | {"extra_args": None} for a in ASKS])
    assert all(found[i] != before[i] for i in range(5)), "each changes its request"
    assert found[5:] == before[5:], "and no other"
    assert found[3][20:] == [300] * 40 and found[3][:20] == before[3][:20]
    assert not {5, 7} & set(found[2])
    assert all(len({*found[2][i : i + 3]}) == 3 for i in range(50)), "the output so far is seen"
    greedy = {"temperature": 0, "extra_args": {"sharpen": 1}}
    assert tokens(llm, [greedy]) == tokens(plain, [{"temperature": 0}])
    sharpest = {"temperature": 1, "seed": 1, "extra_args": {"sharpen": 1}}
    assert tokens(llm, [sharpest]) == tokens(plain, [{"temperature": 0}])


SMALL = {"num_gpu_blocks_override": 26, "max_model_len": 128}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        SMALL,
        SMALL | {"swap_space": 0.01, "preemption_mode": "swap"},
        {"enable_prefix_caching": False, "block_size": 8},
    ],
    ids=["chunked", "preempted", "swapped", "small blocks"],
)  # fmt: skip
def test_the_same_bytes_whatever_happens(llm: LLM, options: dict[str, Any]) -> None:
    expected = tokens(llm, ASKS)
    other = LLM(**OPTIONS | options, logits_processors=ALL)
    try:
        outputs = outputs_of(other, ASKS * 3)
        assert [output.outputs[0].token_ids for output in outputs] == expected * 3
        preempted = [o.metrics.num_preemptions > 0 for o in outputs if o.metrics is not None]
        assert any(preempted) == ("num_gpu_blocks_override" in options)
    finally:
        other.shutdown()


def test_long_outputs(llm: LLM, plain: LLM) -> None:
    ask = {"temperature": 1, "seed": 3, "extra_args": {"count": True, "sharpen": 6}}
    (found,) = tokens(llm, [ask], max_tokens=1000)
    assert len(found) == 1000
    assert found[:60] == tokens(llm, [ask])[0]


def body_of(ask: dict[str, Any]) -> dict[str, Any]:
    body = {k: v for k, v in ask.items() if k != "extra_args"}
    return body | {"vllm_xargs": ask.get("extra_args"), "max_tokens": 60, "ignore_eos": True}


def test_every_door_gives_the_same(server: RoutesServer, llm: LLM) -> None:
    for i, ask in enumerate(ASKS):
        prompt = f"{PROMPT} {i}"
        expected = tokens(llm, ASKS)[i]
        ids = llm.get_tokenizer().encode(prompt)
        body = {"prompt": prompt, "return_token_ids": True, **body_of(ask)}
        (choice,) = server.ask("/v1/completions", body)["choices"]
        assert choice["token_ids"] == expected
        params = ask | {"max_tokens": 60, "ignore_eos": True}
        (choice,) = server.ask(
            "/inference/v1/generate", {"token_ids": ids, "sampling_params": params}
        )["choices"]
        assert choice["token_ids"] == expected
        pieces = server.stream("/v1/completions", body | {"stream_interval": 4})
        assert [t for p in pieces for c in p["choices"] for t in c["token_ids"]] == expected
    say = [{"role": "user", "content": "hi"}]
    only = {"vllm_xargs": {"target_token": 300}, "temperature": 0}
    text = llm.get_tokenizer().decode([300] * 3)
    found = server.ask("/v1/chat/completions", {"messages": say, "max_tokens": 3, **only})
    assert found["choices"][0]["message"]["content"] == text
    said = {"messages": say, "max_tokens": 3, "model": "quire-demo"}
    found = server.ask("/v1/messages", said | only)
    assert found["content"][0]["text"] == text
    found = server.ask("/v1/responses", {"input": "hi", "max_output_tokens": 16, **only})
    assert found["output"][0]["content"][0]["text"].startswith(text)


DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "model": "quire-demo"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), DOORS)
def test_refusals(server: RoutesServer, path: str, body: dict[str, Any], stream: bool) -> None:
    body = body | {"max_tokens": 4, "stream": stream}
    for given, said in (
        ({"target_token": "x"}, "logits_processors refuse the request: OnlyToken: what it takes"),
        ({"target_token": 13}, "OnlyToken: 13 brings bad luck"),
        ({"a": "x" * 70_000}, "vllm_xargs must be at most 65536 bytes as JSON, got 700"),
    ):
        reply = server.run(server.client.post(path, json=body | {"vllm_xargs": given}))
        assert reply.status_code == 400, reply.text
        assert said in reply.text and "secret" not in reply.text and "Error:" not in reply.text
    reply = server.run(server.client.post(path, json=body | {"vllm_xargs": {"harm": "validate"}}))
    assert reply.status_code == 500 and "Harmful: validate_params raised" in reply.text
    assert "secret" not in reply.text


def test_nobody_would_read_it(plain: LLM) -> None:
    with pytest.raises(InvalidRequest, match="without any.*got dict") as caught:
        plain.generate("x", SamplingParams(extra_args={"a": 1}))
    assert caught.value.param == "extra_args"
    with asyncio.Runner() as runner:
        server = RoutesServer(runner, OPTIONS)
        for path, body in DOORS:
            for given in ({"a": 1}, {"a": [1, "b"]}):
                body = body | {"max_tokens": 4, "vllm_xargs": given}
                reply = server.run(server.client.post(path, json=body))
                assert reply.status_code == 400 and "vllm_xargs is for logits" in reply.text
            assert server.ask(path, body | {"vllm_xargs": {}})
        server.close()


def test_llm_raises(llm: LLM) -> None:
    with pytest.raises(ProcessorRefused, match="OnlyToken: 13 brings bad luck"):
        llm.generate(["x", "y"], SamplingParams(extra_args={"target_token": 13}))
    assert not llm.llm_engine.core.scheduler.requests
    assert tokens(llm, ASKS[:1])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("raise", "Harmful: apply raised"),
        ("update", "Harmful: update_state raised"),
        ("nan", "Harmful: apply returned NaN or positive infinity"),
        ("infinite", "Harmful: apply returned NaN or positive infinity"),
        ("nothing", "no token can be sampled"),
        ("shape", "Harmful: apply returned a tensor of shape (2048,), not (1, 2048)"),
        ("wider", "Harmful: apply returned a tensor of shape (1, 4096), not (1, 2048)"),
        ("none", "Harmful: apply returned NoneType, not a tensor"),
        ("integers", "Harmful: apply returned torch.int64, not floating-point numbers"),
    ],
)
def test_harm_ends_its_own_request_only(
    llm: LLM, server: RoutesServer, harm: str, said: str
) -> None:
    bad = {"temperature": 1, "seed": 1, "extra_args": {"harm": harm}}
    outputs = outputs_of(llm, [*ASKS, *ASKS, bad])
    (failed,) = [output for output in outputs if output.error is not None]
    assert failed is outputs[14] and said in str(failed.error) and "secret" not in str(failed.error)
    assert len(failed.outputs[0].token_ids) == 3
    good = [output.outputs[0].token_ids for output in outputs if output is not failed]
    assert good == tokens(llm, ASKS) * 2
    reply = server.run(
        server.client.post("/v1/completions", json=body_of(bad) | {"prompt": PROMPT})
    )
    assert reply.status_code == 500 and "secret" not in reply.text
    if "Harmful" in said:
        assert said in reply.text.replace('\\"', '"')


def test_requests_without_processors_keep_the_fast_way(llm: LLM, monkeypatch: Any) -> None:
    """A greedy request that no processor applies to needs no logits; a server that has processors
    which tell (`applies_to`, an adapter's `None`) is no slower for it."""
    made = LLM(**OPTIONS, logits_processors=["toy_processors:Counting", "toy_processors:Wrapped"])
    model = made.llm_engine.core.executor._worker.model
    called: list[str] = []

    def watch(name: str) -> None:
        compute = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, **k: (called.append(name), compute(*a, **k))[1])

    watch("compute_logits")
    watch("logits_after")
    try:
        expected = tokens(made, [{"temperature": 0}])
        assert not called
        tokens(made, [{"temperature": 0, "extra_args": {"count": 1}}])
        assert called
        assert expected == tokens(llm, [{"temperature": 0}])
    finally:
        made.shutdown()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:X", "cannot be imported: ModuleNotFoundError"),
        ("toy_processors:Missing", "cannot be imported: ImportError"),
        ("toy_processors", "cannot be imported: ValueError"),
        ("toy_processors:NoProcessor", "is not a subclass of"),
        ("toy_processors:NoApply", "does not define apply, is_argmax_invariant, update_state"),
        ("toy_processors:NotMade", "__init__ fails: AttributeError: quire's vllm_config has no"),
    ],
)
def test_a_bad_one_stops_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**OPTIONS, logits_processors=[name])
    assert caught.value.message.startswith(f"--logits-processors {name}")
    assert said in caught.value.message and "\n" not in caught.value.message


def test_classes_are_taken_like_their_names(llm: LLM) -> None:
    import toy_processors as toys

    classes = [toys.OnlyToken, toys.Counting, toys.Sharper, toys.Wrapped]
    made = LLM(**OPTIONS, logits_processors=classes)
    try:
        assert tokens(made, ASKS) == tokens(llm, ASKS)
    finally:
        made.shutdown()

    class Local(toys.Counting):
        pass

    with pytest.raises(ConfigError, match="top of a module, got .*Local"):
        LLM(**OPTIONS, logits_processors=[Local])
    with pytest.raises(ConfigError, match=r"must be a list of texts, got \[5\]"):
        EngineConfig.from_options(logits_processors=[5])


def test_a_pooling_model_has_none() -> None:
    with pytest.raises(ConfigError, match="--logits-processors .* generate.* pooling"):
        LLM(runner="pooling", convert="embed", logits_processors=NAMES)
