"""The rows about traces: C15, E3, E4, F1 to F5, B23. A real server, a real model, a
receiver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import openai
import pytest

from live_server import Server, serving
from otlp_receivers import GrpcReceiver, SpanSeen
from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.observability.traces import tracer as tracing
from quire.observability.traces.otel import protocol

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
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
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
    """`--otlp-traces-endpoint`: a request is a tree of spans, in its caller's trace, whose parts
    add up."""
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
    """A step is a tree of spans: schedule, forward, sample, update."""
    complete(server, "f2")
    root_of(receiver, "f2")
    step = receiver.seen.named("engine_step")[-1]
    tree = {s.name: [c.name for c in receiver.seen.children(s)] for s in receiver.seen.spans
            if s.trace == step.trace}  # fmt: skip
    assert tree["engine_step"] == ["schedule", "execute_model", "update_from_output"]
    assert {"allocate_slots", "update_block_table"} <= set(tree["schedule"])
    assert tree["execute_model"] == ["forward", "sample"]


def test_f3_service_name(server: Server, receiver: GrpcReceiver) -> None:
    """The service has the name in `OTEL_SERVICE_NAME`; the start is a trace, too."""
    receiver.seen.wait(lambda seen: bool(seen.named("startup")))
    assert receiver.seen.resource["service.name"] == "vllm-engine"
    phases = [s.name for s in receiver.seen.children(receiver.seen.only("startup"))]
    assert phases[:2] == ["frontend", "engine_core_process"] and "loading_weights" in phases


def test_f4_an_aborted_request_has_a_trace(server: Server, receiver: GrpcReceiver) -> None:
    """A client that disconnects leaves a trace that says `abort`."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "gone"}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as reply:
        next(reply.iter_lines())
    root = root_of(receiver, "gone")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    children = receiver.seen.children(root)
    assert children[0].name == "queue_wait" and children[-1].name == "finish"


def test_b23_the_long_span_of_a_slow_request(server: Server, receiver: GrpcReceiver) -> None:
    """Four long answers take all places; the fifth request waits, and its trace says so."""
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(httpx.stream("POST", url, json=body, timeout=PATIENCE))
            for _ in range(4)
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


@pytest.mark.parametrize("asked", ["model", "worker", "all"])
def test_f5_detailed_traces(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--collect-detailed-traces` shows the time of each layer, of attention and MLP in it, and of
    the worker."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", PATIENCE)
    receiver = GrpcReceiver()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(otlp_traces_endpoint=receiver.endpoint, collect_detailed_traces=[asked]) as llm:
        (ours,) = llm.generate("Hello", params, use_tqdm=False)
        layers = llm.llm_engine.config.model.read_shape().num_layers
    with LLM() as plain:
        (bare,) = plain.generate("Hello", params, use_tqdm=False)
    assert ours.outputs[0].token_ids == bare.outputs[0].token_ids
    receiver.seen.wait(lambda seen: bool(seen.named("llm_request")))
    receiver.close()
    seen, (root,) = receiver.seen, receiver.seen.named("llm_request")
    executions = seen.named("execute_model")
    assert len(executions) == 4
    for execution in executions:
        parts = {span.name: span for span in seen.children(execution)}
        assert set(parts) == {"forward", "sample", *(["worker"] if asked != "model" else [])}
        if asked != "model":
            worker, inside = parts["worker"], parts["forward"].seconds + parts["sample"].seconds
            assert inside <= worker.seconds <= execution.seconds + 1e-5
        shown = seen.children(parts["forward"])
        numbers = [span.attributes["quire.layer"] for span in shown]
        assert numbers == (list(range(layers)) if asked != "worker" else [])
        for span in shown:
            halves = [span.attributes[f"quire.{part}_seconds"] for part in ("attention", "mlp")]
            assert min(halves) > 0 and sum(halves) <= span.seconds + 1e-5
        assert sum(span.seconds for span in shown) <= parts["forward"].seconds
    forward = root.attributes.get("gen_ai.latency.time_in_model_forward")
    execute = root.attributes.get("gen_ai.latency.time_in_model_execute")
    assert (forward is not None, execute is not None) == (asked != "worker", asked != "model")
    total = sum(span.seconds for span in seen.named("forward"))
    assert forward is None or forward == pytest.approx(total, abs=1e-5)


def test_f5_bad_details() -> None:
    """`--collect-detailed-traces` without an endpoint, or with an unknown value, is refused."""
    with pytest.raises(ConfigError, match="needs --otlp-traces-endpoint"):
        EngineConfig.from_options(collect_detailed_traces=["model"])
    with pytest.raises(ConfigError, match="of model, worker, all, got 'modle'"):
        EngineConfig.from_options(
            otlp_traces_endpoint="http://h:4317", collect_detailed_traces=["worker,modle"]
        )


def test_e3_ports_of_collectors() -> None:
    """Traces go to port 4317 over gRPC and to port 4318 over HTTP, as collectors and Jaeger
    expect."""
    assert protocol("http://localhost:4317") == "grpc"
    assert protocol("http://localhost:4318") == "http"


def test_e4_openai_api(server: Server) -> None:
    """OpenAI's own client works with the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        prompt = "The capital of France is"
        text = client.completions.create(model=model.id, prompt=prompt, max_tokens=4)
        assert text.choices[0].text.startswith(" Paris")
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        stream = client.chat.completions.create(
            model=model.id,
            messages=messages,
            max_tokens=16,
            stream=True,  # type: ignore[arg-type]
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
