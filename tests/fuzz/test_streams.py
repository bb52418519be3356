"""Streamed pieces joined are the whole reply: text, tokens, log-probabilities, how it ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest

import plain_text
import wishes
from fuzz_kit import cases
from quire import AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from quire.config import ModelConfig, ServerConfig
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.output_processor import OutputProcessor
from quire.outputs import FinishReason
from quire.params import RequestOutputKind
from quire.serving.app import build_app
from quire.serving.server_state import ServerState
from quire.tokenizer import Tokenizer
from quire.utils.timing import ManualClock

CONTEXT = 2048
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind

# ---- the output processor, without a model -------------------------------------------------------

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = ("Größe 東京 🦊🦊", "once upon a time the end.", "e\u0301 naïve ", "00 fox\n\n", "𝔘𝔫𝔦")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(plain_text.FOLDER, None)


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Words, characters in parts, parts of characters that never come, special tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        kind = rng.random()
        if kind < 0.5:
            ids = plain_text.library().encode(rng.choice(TEXTS), add_special_tokens=False).ids
            start = rng.randrange(len(ids))
            tokens += ids[start : start + rng.randint(1, 9)]
        elif kind < 0.97:
            tokens.append(rng.randrange(5, wishes.VOCAB))
        else:
            tokens.append(rng.randrange(5))
    return tokens[:count]


def stops_in(rng: random.Random, tokens: list[int]) -> list[str]:
    """Parts of what the tokens spell, and what nearly is one."""
    text = b"".join(plain_text.pieces(tokens)).decode("utf-8", "replace")
    found = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        found.append(text[start : start + rng.choice([1, 2, 5, 12, 40])])
    if rng.random() < 0.3:
        found.append(found[0] + "x")
    return [stop for stop in found if stop and REPLACEMENT not in stop]


class Script:
    """What a core would say of one completion: tokens, numbers, and how it ends them."""

    def __init__(
        self, rng: random.Random, wish: dict[str, Any], prompt: list[int], tokens: list[int]
    ) -> None:
        self.tokens = tokens
        by_token = plain_text.token_end(wish, self.tokens, CONTEXT - len(prompt))
        assert by_token is not None, "max_tokens ends it"
        count, self.reason, self.stop_reason = by_token
        self.tokens = self.tokens[:count]
        self.end = plain_text.expected_end(wish, self.tokens, CONTEXT - len(prompt))
        asked = wish.get("logprobs")
        self.logprobs = None
        if asked is not None:
            self.logprobs = [self._entry(rng, token, asked) for token in self.tokens]
        self.scores = None
        if wish.get("prompt_logprobs") is not None:
            more = wish["prompt_logprobs"]
            self.scores = [None, *(self._entry(rng, token, more) for token in prompt[1:])]

    def _entry(self, rng: random.Random, token: int, more: int) -> TokenLogprobs:
        others = rng.sample(range(wishes.VOCAB), more)
        values = sorted((-rng.expovariate(1) for _ in range(more + 1)), reverse=True)
        return TokenLogprobs([token, *others], values, rng.randint(1, 50))

    def said(self, rng: random.Random, internal_id: str) -> Iterator[EngineCoreOutput]:
        """In groups of any size."""
        start = 0
        while start < len(self.tokens):
            end = min(len(self.tokens), start + rng.choice([1, 1, 1, 2, 5, 50]))
            last = end == len(self.tokens)
            yield EngineCoreOutput(
                internal_id,
                self.tokens[start:end],
                None if self.logprobs is None else self.logprobs[start:end],
                self.scores if start == 0 else None,
                FinishReason[self.reason.upper()] if last else None,
                self.stop_reason if last else None,
            )
            start = end


def delivered(
    rng: random.Random, wish: dict[str, Any], prompt: list[int], kind: RequestOutputKind,
    scripts: list[Script],
) -> list[RequestOutput]:  # fmt: skip
    """Everything a caller of this kind gets, the completions' words in random turns."""
    gate = InputProcessor(
        ModelConfig(), ModelConfig().read_shape(), tokenizer(), max_model_len=CONTEXT
    )
    processor = OutputProcessor(tokenizer(), ManualClock(1.0))
    params = SamplingParams(**wish, output_kind=kind)
    processed = gate.process("r", prompt, params, arrival_time=0.0)
    processor.add(processed)
    ids = [request.request_id for request in processed.requests]
    said = {i: s.said(rng, i) for i, s in zip(ids, scripts, strict=True)}
    got, stopped = [], []
    while said:
        batch = []
        for internal_id in rng.sample(sorted(said), rng.randint(1, len(said))):
            output = next(said[internal_id], None)
            if output is None:
                del said[internal_id]
            else:
                batch.append(output)
        done = processor.process(batch, 2.0)
        processor.check_integrity()
        got += done.request_outputs
        stopped += done.aborts
        if rng.random() < 0.5:  # the core may hear of it at once, or say more first
            said = {i: s for i, s in said.items() if i not in stopped}
    assert len(stopped) == len(set(stopped))
    assert processor.num_unfinished == 0
    return got


def joined(outputs: list[RequestOutput], kind: RequestOutputKind, count: int) -> list[Any]:
    """By completion: text, tokens, log-probabilities, end."""
    whole: list[Any] = [["", [], None, None] for _ in range(count)]
    for output in outputs:
        for c in output.outputs:
            parts = whole[c.index]
            if kind is not DELTA:
                parts[:3] = "", [], None
            parts[0] += c.text
            parts[1] += c.token_ids
            if c.logprobs is not None:
                parts[2] = (parts[2] or []) + [list(entry.items()) for entry in c.logprobs]
            if c.finish_reason is not None:
                parts[3] = (c.finish_reason, c.stop_reason, c.cumulative_logprob)
    return whole


@cases(100)
def test_outputs_of_every_kind_join_to_the_same(rng: random.Random) -> None:
    wish, prompt = wishes.params(rng, rng.choice([3, 30, 300])), wishes.prompt(rng)
    wish.pop("bad_words", None)
    tokens = [some_tokens(rng, wish["max_tokens"]) for _ in range(wish.get("n", 1))]
    if "stop" in wish and rng.random() < 0.8:
        wish["stop"] = stops_in(rng, rng.choice(tokens)) or wish["stop"]
    scripts = [Script(rng, wish, prompt, some) for some in tokens]
    results = {}
    for kind in RequestOutputKind:
        outputs = delivered(rng, wish, prompt, kind, scripts)
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        results[kind] = joined(outputs, kind, len(scripts))
        scored = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(scored) >= ("prompt_logprobs" in wish)
        if kind is DELTA:
            assert len(scored) <= 1
    assert results[CUMULATIVE] == results[DELTA] == results[FINAL_ONLY]
    for (text, tokens, _, end), script in zip(results[DELTA], scripts, strict=True):
        assert script.end is not None
        got = (len(tokens), text, end[0], end[1])
        assert got == script.end, f"{wish}: {script.tokens}"
        assert tokens == script.tokens[: script.end.num_tokens]


# ---- over HTTP, with the model -------------------------------------------------------------------


@pytest.fixture(scope="module")
def post() -> Iterator[Callable[[str, dict[str, Any]], httpx.Response]]:
    """Sends a body to a server without sockets, whose engine core is a real process."""
    with asyncio.Runner() as runner:
        config = EngineConfig.from_options(max_model_len=512, max_num_batched_tokens=64)
        engine = runner.run(AsyncLLM.start(config))
        runner.run(engine.wait_ready())
        state = ServerState(ServerConfig(), engine)
        transport = httpx.ASGITransport(build_app(state))
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120)
        yield lambda path, body: runner.run(client.post(path, json=body))
        runner.run(client.aclose())
        runner.run(engine.shutdown())


HTTP_ONLY = ("detokenize", "logprobs", "max_tokens", "prompt_logprobs", "n")
"""Fields whose spelling differs between the endpoints."""


def random_body(rng: random.Random, chat: bool) -> dict[str, Any]:
    """A legal body."""
    wish = wishes.params(rng, 60)
    body = {k: v for k, v in wish.items() if k not in HTTP_ONLY}
    body["max_tokens"], body["n"] = wish["max_tokens"], wish.get("n", 1)
    body.setdefault("temperature", 1.0)  # the model's own default is 0
    if "logit_bias" in body:
        body["logit_bias"] = {str(k): v for k, v in body["logit_bias"].items()}
    if rng.random() < 0.3:
        del body["seed"]  # the server's own choice is reported, and used for what is compared
    for name in ("echo", "return_token_ids", "return_tokens_as_token_ids"):
        if rng.random() < 0.3:
            body[name] = True
    if rng.random() < 0.3:
        body["prompt_logprobs"] = rng.choice([0, 3])
    if chat:
        text = rng.choice(wishes.OPENINGS)
        body["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.4:
            body["messages"].append({"role": "assistant", "content": "Größe: "})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if "logprobs" in wish:
            body |= {"logprobs": True, "top_logprobs": wish["logprobs"] or 1}
        return body
    if "logprobs" in wish:
        body["logprobs"] = wish["logprobs"]
    body["prompt"] = rng.choice(
        [
            rng.choice(wishes.OPENINGS),
            wishes.prompt(rng, 60),
            rng.sample(wishes.OPENINGS, 3),
            [wishes.prompt(rng, 60)] * 2,
        ]
    )
    return body


def choices_of(body: dict[str, Any], chat: bool) -> dict[int, dict[str, Any]]:
    """Of a whole reply, or of all chunks of a stream put together: what each choice says."""
    found: dict[int, dict[str, Any]] = {}
    for choice in body["choices"]:
        message = choice.pop("message", None) or choice.pop("delta", None) or {}
        part = {**choice, "text": message.get("content") or "" if chat else choice["text"]}
        whole = found.setdefault(part["index"], {"text": ""})
        whole["text"] += part.pop("text")
        logprobs = part.pop("logprobs", None) or {}
        for name, value in logprobs.items():
            if value is not None:
                whole.setdefault("logprobs", {}).setdefault(name, []).extend(value)
        whole.setdefault("token_ids", []).extend(part.pop("token_ids", None) or [])
        for name, value in part.items():
            if value is not None:
                assert name in ("index", "role") or name not in whole, f"{name} comes twice"
                whole[name] = value
    return found


def chunks_of(reply: httpx.Response) -> dict[str, Any]:
    """All chunks of a stream as one body."""
    frames = reply.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""], reply.text[-300:]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    top: dict[str, Any] = {"choices": [choice for c in chunks for choice in c["choices"]]}
    for chunk in chunks:
        for name in ("seed", "prompt_token_ids", "prompt_logprobs"):
            if name in chunk:
                assert name not in top, f"{name} comes twice"
                top[name] = chunk[name]
    assert chunks[-1]["choices"] == []
    top["usage"] = chunks[-1]["usage"]
    return top


@cases(40)
def test_streams_over_http_join_to_the_whole_reply(
    rng: random.Random, post: Callable[[str, dict[str, Any]], httpx.Response]
) -> None:
    chat = rng.random() < 0.5
    path, body = "/v1/chat/completions" if chat else "/v1/completions", random_body(rng, chat)
    reply = post(path, body)
    assert reply.status_code in (200, 500), reply.text
    if reply.status_code == 500:  # these parameters leave some position no token
        assert reply.json()["error"]["code"] == "step_failed", reply.text
        assert {"allowed_token_ids", "bad_words"} & set(body), reply.text
        return
    whole = reply.json()
    body |= {"seed": whole["seed"], "stream": True, "stream_options": {"include_usage": True}}
    body["stream_options"]["continuous_usage_stats"] = rng.random() < 0.3
    stream = chunks_of(post(path, body))
    assert choices_of(stream, chat) == choices_of(whole, chat), body
    for name in ("seed", "prompt_token_ids", "prompt_logprobs"):
        assert stream.get(name) == whole.get(name), name
    for counts in (stream["usage"], whole["usage"]):
        del counts["prompt_tokens_details"]  # the second time they are cached
    assert stream["usage"] == whole["usage"]


@cases(3)
def test_equal_prompts_of_one_request_differ(
    rng: random.Random, post: Callable[[str, dict[str, Any]], httpx.Response]
) -> None:
    """Each completion has random numbers of its own, and the reported seed repeats them all."""
    count, n = rng.randint(2, 6), rng.choice([1, 2])
    prompt = rng.choice([rng.choice(wishes.OPENINGS), wishes.prompt(rng, 60)])
    body = {"prompt": [prompt] * count, "n": n, "temperature": 2.0}  # never equal by chance
    body |= {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    if rng.random() < 0.5:
        body["seed"] = rng.getrandbits(50)
    reply = post("/v1/completions", body).json()
    again = post("/v1/completions", body | {"seed": reply["seed"]}).json()
    tokens = [tuple(choice["token_ids"]) for choice in reply["choices"]]
    assert [tuple(choice["token_ids"]) for choice in again["choices"]] == tokens
    assert len(tokens) == count * n
    assert len(set(tokens)) == len(tokens), f"equal completions of {body}, {reply['seed']}"
