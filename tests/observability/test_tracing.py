"""Traces of the engine with scripted tokens, as OTLP receivers get them."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fake_executor import FakeExecutor
from otlp_receivers import GrpcReceiver, HttpReceiver, SpanSeen
from patience import PATIENCE, wait_for
from quire.config import EngineConfig
from quire.core.batch import ScheduledBatch
from quire.core.scheduler import Scheduler
from quire.core.stats import IterationStats, StepStats
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, InvalidRequest
from quire.observability.traces import tracer as tracing
from quire.observability.traces.builder import TraceBuilder, TracedRequest
from quire.observability.traces.spans import SpanId
from quire.params import SamplingParams
from quire.utils.timing import ManualClock
from record_rig import Rig

LONG = list(range(100, 150))


@pytest.fixture(autouse=True)
def last_spans_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", PATIENCE)


@pytest.fixture(params=[GrpcReceiver, HttpReceiver], ids=["grpc", "http"])
def receiver(request: pytest.FixtureRequest) -> Iterator[GrpcReceiver | HttpReceiver]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def http() -> Iterator[HttpReceiver]:
    made = HttpReceiver()
    yield made
    made.close()


class SlowExecutor(FakeExecutor):
    """Takes a measurable while per step, so that lengths mean something: of the real clock, or of
    one that the test advances."""

    pause = 0.003
    clock: ManualClock | None = None

    def execute(self, batch):  # type: ignore[no-untyped-def]
        if self.clock is None:
            time.sleep(self.pause)
        else:
            self.clock.advance(self.pause)
        result = super().execute(batch)
        result.forward_seconds = 0.002
        result.sample_seconds = 0.0005
        return result


def make(
    endpoint: str | None,
    num_blocks: int = 100,
    clock: ManualClock | None = None,
    **options: object,
) -> LLMEngine:
    executor = SlowExecutor(lambda prompt, n: 300 + n, num_blocks=num_blocks)
    executor.clock = clock
    options = {"disable_log_stats": True, "otlp_traces_endpoint": endpoint, **options}
    return LLMEngine(EngineConfig.from_options(**options), executor=executor, clock=clock)


def drain(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def params(tokens: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def chain(children: list[SpanSeen]) -> list[SpanSeen]:
    """The children that follow one another: all but `first_token`, which is beside them."""
    return [span for span in children if span.name != "first_token"]


def assert_adds_up(root: SpanSeen, children: list[SpanSeen]) -> None:
    parts = chain(children)
    assert parts[0].start == pytest.approx(root.start, abs=2e-6)
    assert parts[-1].end == pytest.approx(root.end, abs=2e-6)
    for before, after in zip(parts, parts[1:], strict=False):
        assert after.start == pytest.approx(before.end, abs=2e-6), (before.name, after.name)
    assert sum(s.seconds for s in parts) == pytest.approx(root.seconds, abs=1e-5)


def test_a_request_is_a_tree_of_spans(receiver: GrpcReceiver | HttpReceiver) -> None:
    engine = make(receiver.endpoint, max_num_batched_tokens=20, max_num_seqs=4)
    before = time.time()
    engine.add_request("a", LONG, params(5, temperature=0.5, top_p=0.9))
    drain(engine)
    engine.shutdown()
    seen = receiver.seen
    root = seen.root("a")
    children = seen.children(root)
    assert [s.name for s in children] == [
        "queue_wait", *["prefill"] * 3, "first_token", *["decode_step"] * 4, "finish",
    ]  # fmt: skip
    assert [s.attributes["quire.tokens"] for s in children if s.name == "prefill"] == [20, 20, 10]
    assert_adds_up(root, children)
    assert root.kind == 2 and root.error is None and root.parent == b""
    assert before - 1 < root.start < root.end < time.time() + 1
    about = root.attributes
    assert about["gen_ai.usage.prompt_tokens"] == 50
    assert about["gen_ai.usage.completion_tokens"] == 5
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.request.max_tokens"] == 5
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert about["gen_ai.latency.e2e"] == pytest.approx(root.seconds, abs=1e-5)
    first = next(s for s in children if s.name == "first_token")
    told = about["gen_ai.latency.time_to_first_token"]
    assert told == pytest.approx(first.end - root.start, abs=1e-5)
    decode = [s for s in children if s.name == "decode_step"]
    assert all(s.seconds >= SlowExecutor.pause for s in decode)
    assert seen.resource["service.name"] == "quire"


def test_no_span_ends_before_it_begins_where_a_step_stumbles(
    http: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core looked at its clock, and then had no processor for a second or two: that is no part
    of the step."""
    clock, schedule = ManualClock(), Scheduler.schedule
    waits = itertools.chain([1.0, 0.0, 2.0], itertools.repeat(0.0))

    def late(scheduler: Scheduler) -> ScheduledBatch:
        clock.advance(next(waits))
        return schedule(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", late)
    engine = make(http.endpoint, clock=clock, max_num_batched_tokens=20, max_num_seqs=4)
    engine.add_request("a", LONG, params(3))
    drain(engine)
    engine.shutdown()
    children = chain(http.seen.children(http.seen.root("a")))
    assert [span.attributes.get("quire.tokens") for span in children][1:4] == [20, 20, 10]
    assert all(span.start <= span.end for span in children)
    assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(children))


def test_steps_are_trees_and_linked_both_ways(http: HttpReceiver) -> None:
    engine = make(http.endpoint)
    engine.add_request("a", LONG, params(3))
    engine.add_request("b", LONG[:7], params(3))
    drain(engine)
    engine.shutdown()
    seen = http.seen
    steps = seen.named("engine_step")
    assert [s.attributes["quire.step"] for s in steps] == [1, 2, 3]
    roots = {(r.trace, r.id) for r in seen.named("llm_request")}
    for step in steps:
        assert set(step.links) == roots
        children = seen.children(step)
        names = [s.name for s in children]
        assert names == ["schedule", "execute_model", "update_from_output"]
        schedule, execute, update = children
        assert sum(s.seconds for s in children) == pytest.approx(step.seconds, abs=1e-5)
        assert {s.name for s in seen.children(schedule)} == {
            "allocate_slots",
            "update_block_table",
        }
        forward, sample = seen.children(execute)
        assert forward.name == "forward" and forward.seconds == pytest.approx(0.002, abs=1e-5)
        assert sample.name == "sample" and sample.seconds == pytest.approx(0.0005, abs=1e-5)
        assert execute.start <= forward.start and sample.end <= execute.end
        assert update.end == step.end
    by_id = {(s.trace, s.id): s for s in steps}
    for name in ("prefill", "decode_step"):
        for span in seen.named(name):
            (link,) = span.links
            assert by_id[link].attributes["quire.step"] == span.attributes["quire.step"]
            assert by_id[link].end == pytest.approx(span.end, abs=2e-6)


def test_a_preemption_has_its_span_and_its_reason(http: HttpReceiver) -> None:
    engine = make(http.endpoint, num_blocks=9, enable_prefix_caching=False)
    engine.add_request("old", LONG, params(40))
    engine.add_request("young", LONG[:40], params(40))
    drain(engine)
    engine.shutdown()
    seen = http.seen
    root = seen.root("young")
    children = seen.children(root)
    lost = [s for s in children if s.name == "preempted"]
    assert len(lost) == 1
    assert lost[0].attributes["quire.reason"] == "blocks"
    assert lost[0].attributes["quire.preempted_for"] == "old"
    assert lost[0].attributes["quire.tokens_lost"] > 40
    again = [s for s in children if s.name == "prefill" and s.attributes.get("quire.recomputed")]
    assert again and again[0].start == pytest.approx(lost[0].end, abs=2e-6)
    assert_adds_up(root, children)
    assert root.attributes["quire.preemptions"] == 1
    assert root.attributes["gen_ai.usage.completion_tokens"] == 40
    tokens = 1 + sum(s.attributes["quire.tokens"] for s in children if s.name == "decode_step")
    assert tokens + len(again) == 40, "each span accounts for its tokens"
    (event,) = seen.named("preempt_requests")
    assert event.attributes["quire.request"] == "young"
    (freed,) = seen.children(event)
    assert freed.name == "free_blocks" and freed.attributes["quire.blocks.freed"] > 2


def test_aborted_requests_have_spans(http: HttpReceiver) -> None:
    engine = make(http.endpoint, max_num_seqs=1)
    engine.add_request("running", LONG, params(500))
    engine.add_request("waiting", LONG, params(500))
    for _ in range(4):
        engine.step()
    engine.abort_request(["waiting"])
    engine.step()
    engine.abort_request(["running"])
    drain(engine)
    engine.shutdown()
    for name in ("running", "waiting"):
        root = http.seen.root(name)
        assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
        assert_adds_up(root, http.seen.children(root))
    names = [s.name for s in http.seen.children(http.seen.root("waiting"))]
    assert names == ["queue_wait", "finish"]
    waiting = http.seen.children(http.seen.root("waiting"))[0]
    assert ("waits", {"quire.reason": "max_num_seqs", "quire.needed": 2, "quire.available": 1}) in (
        waiting.events
    )


def test_failed_and_refused_requests_have_spans(http: HttpReceiver) -> None:
    engine = make(http.endpoint)
    engine.add_request("bad", LONG, params(500))
    engine.add_request("good", LONG, params(8))
    for _ in range(3):
        engine.step()
    internal = next(i for i in engine.core.scheduler.requests if i.startswith("bad"))
    engine.core.executor.fail = {internal: "it broke"}
    drain(engine)
    with pytest.raises(InvalidRequest):
        engine.add_request("refused", [10**9], params(1))
    engine.shutdown()
    bad, refused = http.seen.root("bad"), http.seen.root("refused")
    assert bad.error == "the engine failed on this request"
    assert bad.attributes["error.type"] == "StepFailed"
    assert_adds_up(bad, http.seen.children(bad))
    assert refused.error is not None and "1000000000" in refused.error
    assert refused.attributes["error.type"] == "InvalidRequest"
    good = http.seen.root("good")
    assert good.error is None
    assert_adds_up(good, http.seen.children(good))


def test_several_completions_share_a_root(http: HttpReceiver) -> None:
    engine = make(http.endpoint)
    engine.add_request("n", LONG, params(3, n=2))
    drain(engine)
    engine.shutdown()
    root = http.seen.root("n")
    completions = http.seen.children(root)
    assert [c.name for c in completions] == ["completion"] * 2
    assert root.attributes["gen_ai.usage.completion_tokens"] == 6
    for completion in completions:
        names = [s.name for s in http.seen.children(completion)]
        assert names[0] == "queue_wait" and names[-1] == "finish"
        assert_adds_up(completion, http.seen.children(completion))


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("flags, sent", [("01", True), ("00", False)])
def test_the_callers_trace_goes_on(http: HttpReceiver, flags: str, sent: bool) -> None:
    engine = make(http.endpoint, trace_sampling_rate=0.0 if sent else 1.0)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flags}", "tracestate": "a=1"}
    engine.add_request("t", LONG, params(2), trace_headers=headers)
    engine.add_request("u", LONG, params(2))
    drain(engine)
    engine.shutdown()
    ids = {s.attributes["gen_ai.request.id"] for s in http.seen.named("llm_request")}
    assert ids == ({"t"} if sent else {"u"})
    if sent:
        root = http.seen.root("t")
        assert root.trace.hex() == TRACE and root.parent.hex() == "b7ad6b7169203331"
        assert root.state == "a=1"


def test_head_sampling(http: HttpReceiver) -> None:
    engine = make(http.endpoint, trace_sampling_rate=0.25, max_num_seqs=64)
    for i in range(200):
        engine.add_request(str(i), [100 + i], params(1))
    drain(engine)
    engine.shutdown()
    assert 20 < len(http.seen.named("llm_request")) < 85  # mean 50, 5 standard deviations: 31


@pytest.mark.parametrize("mode", ["all", "slow", "none"])
def test_a_long_answer_stays_readable(http: HttpReceiver, mode: str) -> None:
    clock = ManualClock(1000.0)
    engine = make(http.endpoint, num_blocks=200, clock=clock, trace_decode_steps=mode)
    engine.add_request("long", LONG, params(1900))
    steps, executor = 0, engine.core.executor
    while engine.has_unfinished_requests:
        steps += 1
        executor.pause = 0.05 if steps == 950 else SlowExecutor.pause  # type: ignore[attr-defined]
        engine.step()
    engine.shutdown()
    root = http.seen.root("long")
    children = http.seen.children(root)
    assert_adds_up(root, children)
    single = [s for s in children if s.name == "decode_step"]
    merged = [s for s in children if s.name == "decode_steps"]
    assert sum(s.attributes["quire.tokens"] for s in single + merged) == 1899
    assert len(single) + len(merged) <= 1000
    if mode == "none":
        assert not single and len(merged) == 1
    else:
        slowest = max(single, key=lambda s: s.seconds)
        assert slowest.seconds == pytest.approx(0.05, abs=1e-5) and slowest.attributes["quire.slow"]
        assert 0 < len(single) < 0.1 * 1900
    shown = [s.attributes["quire.step"] for s in http.seen.named("engine_step")]
    if mode == "all":
        assert shown == list(range(1, 1901))
    elif mode == "slow":
        assert 950 in shown and len(shown) < 10
    else:
        assert len(shown) == 2


def test_startup_is_a_trace(http: HttpReceiver) -> None:
    make(http.endpoint).shutdown()
    root = http.seen.only("startup")
    assert [s.name for s in http.seen.children(root)] == ["engine_core", "loading_weights"]
    assert root.attributes["quire.device"] == "cpu"


def test_server_metrics(http: HttpReceiver) -> None:
    engine = make(http.endpoint, otlp_metrics_endpoint=http.metrics_endpoint)
    engine.add_request("m", LONG, params(4))
    drain(engine)
    engine.shutdown()
    found = http.seen.metrics
    assert set(found) == {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
    }
    (point,) = found["gen_ai.server.time_per_output_token"].histogram.data_points
    assert point.count == 1 and point.sum >= SlowExecutor.pause
    assert list(point.explicit_bounds)[:2] == [0.01, 0.025]
    root = http.seen.root("m")
    (point,) = found["gen_ai.server.time_to_first_token"].histogram.data_points
    assert point.sum == pytest.approx(root.attributes["gen_ai.latency.time_to_first_token"])


@pytest.mark.parametrize("path", ["", "/v1/traces"], ids=["grpc", "http"])
def test_an_endpoint_that_is_not_there(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
    engine = make(endpoint)
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)

    def dropped() -> float:
        values = {m.name: m for m in engine.frontend.prometheus.snapshot()}
        return values["quire:trace_spans_dropped"].value  # type: ignore[no-any-return,union-attr]

    with caplog.at_level(logging.WARNING):
        for name in "abc":
            engine.add_request(name, LONG, params(3))
            drain(engine)
        wait_for(dropped, "dropped spans")
        engine.shutdown()
    told = {id(r): r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING}
    warnings = list(told.values())
    assert len(warnings) == 1 and "--otlp-traces-endpoint" in warnings[0]
    lost = dropped()
    assert lost > 30
    assert dropped() == lost, "collected twice"


def test_serving_does_not_wait_for_the_endpoint(http: HttpReceiver) -> None:
    """Spans are sent by a thread of their own: steps go on while a message is under way."""
    engine = make(http.endpoint)
    sender, sends = engine.frontend.tracing.tracer._exporter, threading.Event()
    arrived = threading.Event()
    send = sender.export

    def slow(spans: object) -> bool:
        arrived.set()
        assert sends.wait(PATIENCE), "serving waits for the endpoint"
        return send(spans)  # type: ignore[no-any-return]

    sender.export = slow
    engine.add_request("first", LONG, params(3))
    drain(engine)
    assert arrived.wait(PATIENCE)
    engine.add_request("meanwhile", LONG, params(3))
    drain(engine)
    sends.set()
    engine.shutdown()
    assert http.seen.root("first") and http.seen.root("meanwhile")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"otlp_traces_endpoint": "localhost:4317"}, "http://localhost:4317"),
        ({"trace_decode_steps": "some"}, "all, slow, none"),
        ({"trace_sampling_rate": 1.5}, r"in \[0, 1\], got 1.5"),
        ({"otlp_metrics_endpoint": "http://a:1"}, "--otlp-traces-endpoint"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(**options)


def test_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.observability.traces.otel import protocol

    assert protocol("http://h:4317") == "grpc" and protocol("http://h:4318") == "http"
    assert protocol("http://h:80/v1/traces") == "http"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert protocol("http://h:4317") == "http"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="grpc or http/protobuf"):
        make("http://h:4317")


def test_the_service_name(http: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "vllm-engine")
    make(http.endpoint).shutdown()
    assert http.seen.resource["service.name"] == "vllm-engine"


def test_an_engine_that_dies_ends_its_traces(http: HttpReceiver) -> None:
    engine = make(http.endpoint)
    engine.add_request("lost", LONG, params(500))
    for _ in range(3):
        engine.step()
    engine.frontend.fail(RuntimeError("the core died"))
    engine.shutdown()
    root = http.seen.root("lost")
    assert root.error == "the core died"
    assert_adds_up(root, http.seen.children(root))


@pytest.mark.parametrize("told", [True, False])
def test_numbers_of_a_core_that_died_mean_nothing_any_more(told: bool) -> None:
    """Each core numbers its requests from 1. Here the second core's only request is of no trace, so
    nothing of its steps may point to the first core's two, which would run on for ever; `told` is
    False to show that the news of the second core matters."""
    rig, builder = Rig(), TraceBuilder()
    links: list[set[SpanId]] = []
    record = rig.records.record

    def both(step: StepStats, iteration: IterationStats) -> None:
        record(step, iteration)
        links.append({link for span in builder.step(step) for link in span.links})

    rig.records.record = both  # type: ignore[method-assign,assignment]
    for name in ("first", "second"):
        internal = rig.add(name, 30, 10)
        builder.accept(TracedRequest(name, (internal,), rig.arrivals[internal], {}))
    rig.step()
    rig.start_core()
    if told:
        builder.begin_core()
    rig.add("untraced", 30, 10)
    rig.step()
    assert links[0] and bool(links[1]) is not told
