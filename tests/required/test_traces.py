"""The documents' rows about traces: C15, F1 to F5, B23. A real server, a real model, a receiver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from live_server import Server, serving
from otlp_receivers import GrpcReceiver, SpanSeen

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def receiver() -> Iterator[GrpcReceiver]:
    made = GrpcReceiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(receiver: GrpcReceiver) -> Iterator[Server]:
    flags = ("--otlp-traces-endpoint", receiver.endpoint, "--max-num-batched-tokens", "32")
    flags += ("--max-num-seqs", "4")
    with serving(*flags, env={"OTEL_SERVICE_NAME": "vllm-engine"}) as server:
        assert server.url
        yield server


def complete(server: Server, name: str, tokens: int = 6) -> SpanSeen | None:
    body = {"prompt": "The capital of France is " * 12, "max_tokens": tokens, "ignore_eos": True}
    headers = {"x-request-id": name, "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return None


def root_of(receiver: GrpcReceiver, name: str) -> SpanSeen:
    wanted = f"cmpl-{name}-0"
    receiver.seen.wait(
        lambda seen: any(
            s.attributes.get("gen_ai.request.id") == wanted for s in seen.named("llm_request")
        )
    )
    return receiver.seen.root(wanted)


def test_c15_f1_request_spans(server: Server, receiver: GrpcReceiver) -> None:
    complete(server, "f1")
    root = root_of(receiver, "f1")
    names = [s.name for s in receiver.seen.children(root)]
    chunks = names.count("prefill")
    assert chunks >= 2
    assert names == [
        "queue_wait", *["prefill"] * chunks, "first_token", *["decode_step"] * 5, "finish",
    ]  # fmt: skip
    assert root.trace.hex() == TRACE, "the caller's trace goes on"
    parts = [s for s in receiver.seen.children(root) if s.name != "first_token"]
    assert sum(s.seconds for s in parts) == pytest.approx(root.seconds, abs=1e-4)


def test_f2_step_spans(server: Server, receiver: GrpcReceiver) -> None:
    complete(server, "f2")
    root_of(receiver, "f2")
    step = receiver.seen.named("engine_step")[-1]
    tree = {s.name: [c.name for c in receiver.seen.children(s)] for s in receiver.seen.spans
            if s.trace == step.trace}  # fmt: skip
    assert tree["engine_step"] == ["schedule", "execute_model", "update_from_output"]
    assert {"allocate_slots", "update_block_table"} <= set(tree["schedule"])
    assert tree["execute_model"] == ["forward", "sample"]


def test_f3_service_name(server: Server, receiver: GrpcReceiver) -> None:
    receiver.seen.wait(lambda seen: bool(seen.named("startup")))
    assert receiver.seen.resource["service.name"] == "vllm-engine"
    phases = [s.name for s in receiver.seen.children(receiver.seen.only("startup"))]
    assert phases[:2] == ["frontend", "engine_core_process"] and "loading_weights" in phases


def test_f4_an_aborted_request_has_a_trace(server: Server, receiver: GrpcReceiver) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "gone"}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as reply:
        next(reply.iter_lines())
    root = root_of(receiver, "gone")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    children = receiver.seen.children(root)
    assert children[0].name == "queue_wait" and children[-1].name == "finish"


def test_b23_the_long_span_of_a_slow_request(server: Server, receiver: GrpcReceiver) -> None:
    """Four long answers fill the seats; the fifth request waits, and its trace says so."""
    body = {"prompt": "Once", "max_tokens": 250, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(httpx.stream("POST", url, json=body, timeout=30)) for _ in range(4)
        ]
        lines = [stream.iter_lines() for stream in streams]
        for line in lines:
            next(line)  # each has its seat, and most of its tokens before it
        complete(server, "slow", 1)
        for line in lines:
            assert list(line)[-2] == "data: [DONE]"
    children = receiver.seen.children(root_of(receiver, "slow"))
    longest = max(children, key=lambda s: s.seconds)
    assert longest.name == "queue_wait"
    reasons = [about["quire.reason"] for name, about in longest.events if name == "waits"]
    assert "max_num_seqs" in reasons
