"""`AsyncLLM`: the engine for servers. The core runs in its own process; this side never loads
torch.

It turns prompts into requests at the input gate, keeps the journal, turns the core's outputs into
text, and hands them to one stream per request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, read_pooler
from quire.config.engine import read_generation_config
from quire.config.locate import located
from quire.core.admission import with_limits
from quire.core.stats import IterationStats
from quire.engine.cores.death import Death
from quire.engine.cores.process_handle import CoreProcess
from quire.engine.frontend.calls import PendingCalls
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.input_gate import make_input_processor
from quire.engine.frontend.journal import Journal
from quire.engine.frontend.load_progress import LoadProgress
from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.frontend.prompts import PromptType
from quire.engine.frontend.questions import Question, accept, explain_live, make_records
from quire.engine.frontend.queue_limits import QueueLimits
from quire.engine.frontend.reporting import add_log_sinks, cache_facts, make_sinks
from quire.engine.frontend.request_log import RequestLog
from quire.engine.frontend.request_tracing import Tracing
from quire.engine.frontend.stream import RequestStream
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Failure,
    FromCore,
    Outputs,
    Progress,
    Ready,
    Reply,
)
from quire.engine.starvation import ApiWaits
from quire.engine.verbs import find_verb
from quire.errors import EngineDead, QuireError, StepFailed
from quire.logger import get_logger
from quire.observability.traces.tracer import PhaseLog
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.tokenizer.fit import check_fit
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.timing import Clock, RealClock

if TYPE_CHECKING:
    from quire.observability.explain.explanation import Explanation

logger = get_logger(__name__)

MAX_STEP_SECONDS = 60.0
"""A busy core that is silent for longer is called unhealthy."""


class AsyncLLM:
    """An engine that serves many callers of one event loop.

    Make one with `AsyncLLM.start()`. It is usable once `wait_ready()` has returned.
    """

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None, entropy: bytes) -> None:
        self.clock = clock or RealClock()
        self._phases = PhaseLog(self.clock.now(), "frontend")
        config = located(config)
        shape = config.model.read_shape()
        self.given_config = config
        self.config, _ = config.resolve(shape)
        assert self.config.model.max_model_len is not None
        self.max_model_len: int = self.config.model.max_model_len
        self.vocab_size = shape.vocab_size
        self.tokenizer = Tokenizer.from_folder(
            config.model.tokenizer_folder, config.model.chat_template
        )
        check_fit(self.tokenizer, shape)
        self.pooler = read_pooler(self.config.model, shape)
        """How the model pools; `None` if it generates text."""
        self.input = make_input_processor(
            self.config.model,
            shape,
            self.tokenizer,
            max_model_len=self.max_model_len,
            block_size=self.config.cache.block_size,
            generation_defaults=read_generation_config(self.config.model),
            entropy=entropy,
        )
        tier = "disk" if self.config.cache.swap_dir else "host"
        self.output = OutputProcessor(self.tokenizer, self.clock, tier)
        self.default_params: SamplingParams = self.input.default_params()
        self.journal = Journal()
        self.request_log = RequestLog(self.config.observability, self.tokenizer.decode)
        self.sinks, self.prometheus = make_sinks(self.config, self.clock, ApiWaits())
        self.records = make_records(self.config)
        self.sinks.add(self.records)
        dropped = self.prometheus.store.dropped_spans.add
        self.tracing = Tracing(self.config, self.clock, dropped, self._phases)
        if self.tracing.tracer is not None:
            self.sinks.add(self.tracing.tracer)
        self.queue = QueueLimits(self._count_rejection)
        self.state = "loading"
        """`loading`, `ready` or `dead`."""
        self.progress: tuple[str, int, int] = ("starting", 0, 0)
        self._shown = LoadProgress(self.clock)
        self.info: dict[str, Any] = {}
        """What the core reported when it was ready: blocks, device, memory."""
        self.died = asyncio.Event()
        self._settled = asyncio.Event()
        self.error: QuireError | None = None
        """Why the engine is dead."""
        self._core: CoreProcess | None = None
        self._epoch = 0
        self._streams: dict[str, RequestStream] = {}
        self._calls = PendingCalls(self._send)
        self._last_message = self.clock.now()
        self._ticker: asyncio.Task[None] | None = None

    # ---- life --------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: EngineConfig, *, entropy: bytes | None = None) -> AsyncLLM:
        """Start the engine core and return while it loads.

        Args:
            config: As given by the user.
            entropy: Mixed into the seeds of requests without one; random unless given.

        Raises:
            StartupError: the configuration or the model folder is bad.
        """
        engine = cls(config, entropy=os.urandom(16) if entropy is None else entropy)
        await engine._spawn()
        return engine

    async def _spawn(self) -> None:
        self._epoch += 1
        self._phases.enter("engine core process", self.clock.now())
        self._core = CoreProcess(self._epoch, self._on_message, self._on_exit)
        await self._core.start(self.given_config)

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartupError: the core could not start; its own reason.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error

    async def shutdown(self) -> None:
        """End all streams and the core process."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._die(EngineDead("the engine was shut down"))
        closing = [asyncio.to_thread(self.sinks.close)]
        if self._core is not None:
            closing.append(self._core.stop())
        await asyncio.gather(*closing)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # ---- requests ----------------------------------------------------------------------------

    async def submit(
        self,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestStream:
        """Accept a request; `trace_headers` may hold the caller's `traceparent` and `tracestate`.
        Further prompts with equal parameters are cheaper with `RequestStream.checked` of the first.

        Raises:
            RequestError: it is invalid; nothing was queued.
            EngineDead: the engine has stopped.
        """
        if self.state == "dead":
            raise self.error or EngineDead("the engine has stopped")
        with self.tracing.refusals(request_id, params, trace_headers) as arrival:
            processed = self.input.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
            )
            self.queue.check(processed.requests, self.config.scheduler, len(self.journal))
            self.output.add(processed)
        self.queue.add(processed.requests)
        self.journal.open(processed.requests)
        accept(self.records, processed.requests)
        self.tracing.accept(processed.requests, params, trace_headers)
        stream = RequestStream(request_id, processed.seed, processed.checked, self._abort_now)
        self._streams[request_id] = stream
        self.request_log.received(request_id, processed)
        self._send(AddRequests(self._epoch, processed.requests))
        return stream

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request; leaving the loop early aborts it."""
        stream = await self.submit(
            prompt, sampling_params, request_id, priority=priority, cache_salt=cache_salt
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """What the model pools out of one prompt; leaving early aborts it.

        Raises:
            RequestError: it is invalid; nothing was queued.
            EngineError: the engine failed on it.
        """
        stream = await self.submit(prompt, pooling_params, request_id, priority=priority)
        try:
            async for output in stream:
                if output.error is not None:
                    raise StepFailed(output.error)
                if output.pooled is not None:
                    yield PoolingRequestOutput.of(output)
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with `finish_reason` "abort". Unknown ids
        are ignored."""
        self._abort_now(request_id)

    def _abort_now(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        internal, final = self.output.abort(request_id)
        self.journal.close(internal)
        self.queue.drop(internal)
        self.sinks.record(None, self.output.take_stats())
        if self.state != "dead":
            self._send(AbortRequests(self._epoch, internal))
        if final is not None:
            stream.put(final)
        self.request_log.aborted([request_id])

    # ---- control and facts -------------------------------------------------------------------

    async def call(self, verb: str, /, **args: Any) -> Any:
        """Run a control verb (`engine/verbs.py`) in the core, between two steps.

        Raises:
            QuireError: there is no such verb, its arguments do not fit, or it failed.
            EngineDead: the engine has stopped.
        """
        if self.state == "dead":
            raise self.error or EngineDead("the engine has stopped")
        asked = find_verb(verb)
        sent = asked.ask(self, args)
        return asked.tell(self, sent, await self._calls.call(self._epoch, verb, sent))

    def check_prefix(self, ids: list[int], cache_salt: str | None) -> None:
        """Check a prompt's tokens and salt as a request's are checked.

        Raises:
            InvalidRequest: they are not of this model.
        """
        self.input.check_prefix(ids, cache_salt)

    def internal_ids(self, request_id: str) -> list[str]:
        """The unfinished completions of a request, by the id that its caller knows."""
        return self.output.internal_ids(request_id)

    def adopt_limits(self, limits: Mapping[str, Any], priorities: Mapping[str, int]) -> None:
        """Keep a copy of what the core now holds."""
        for internal_id, priority in priorities.items():
            self.journal.set_priority([internal_id], priority)
        self.config, changed = with_limits(self.config, limits)
        if changed:
            self.records.change_limits(self.clock.now())

    async def set_limits(
        self, priorities: Mapping[str, int] | None = None, **limits: Any
    ) -> dict[str, Any]:
        """Change scheduler limits while requests run; the names are `LIVE_LIMITS`. Priorities of
        unfinished requests go by request id.

        Returns:
            All limits, as they hold now.

        Raises:
            QuireError: a name or value is bad, or a request is unknown; nothing has changed.
        """
        return dict(await self.call("set_limits", priorities=priorities, **limits))

    async def start_profile(self) -> None:
        """Start the profiler in the core's process.

        Raises:
            ConfigError: none is configured.
            Conflict: it runs already.
        """
        await self.call("start_profile")

    async def stop_profile(self) -> None:
        """Stop the profiler and write its trace.

        Raises:
            Conflict: it does not run.
        """
        await self.call("stop_profile")

    def _count_rejection(self, reason: str) -> None:
        self.sinks.record(None, IterationStats(admission_rejections={reason: 1}))

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return bool(await self.call("reset_prefix_cache"))

    async def explain_prefix(
        self, prompt_token_ids: list[int], cache_salt: str | None = None
    ) -> dict[str, Any]:
        """Why a prompt would, or would not, find its prefix in the cache: see
        `quire.core.kv.answer.PrefixAnswer`.

        Raises:
            InvalidRequest: the prompt is empty, not of this model or too long, or the salt is bad.
        """
        args = {"prompt_token_ids": prompt_token_ids, "cache_salt": cache_salt}
        return dict(await self.call("explain_prefix", **args))

    async def check_health(self) -> None:
        """Raise if the engine has stopped or makes no progress.

        Raises:
            EngineDead: with the reason.
        """
        if self.state == "dead":
            raise self.error or EngineDead("the engine has stopped")
        age = self.last_step_age()
        if age is not None and age > MAX_STEP_SECONDS:
            raise EngineDead(
                f"the engine core has been silent for {age:.0f} s with requests running"
            )

    def last_step_age(self) -> float | None:
        """Seconds since a busy core last sent anything; None while it has nothing to do."""
        return self.clock.now() - self._last_message if len(self.journal) else None

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._streams)

    @property
    def core_pid(self) -> int | None:
        """Process id of the engine core."""
        return self._core.pid if self._core else None

    def metrics_text(self) -> bytes:
        """The Prometheus exposition."""
        return self.prometheus.render()

    def question(self) -> Question:
        """A copy of the records, to be asked on any thread: explanations, timeline, listing.

        Raises:
            InvalidRequest: no records are kept.
        """
        return Question(self.records, self.output.active(), self.clock.now(), self.config)

    async def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went, by completion.

        Raises:
            NotFound: the id is in no record.
            InvalidRequest: no records are kept.
        """
        return await explain_live(self, request_id)

    # ---- messages of the core ----------------------------------------------------------------

    def _send(self, message: Any) -> None:
        assert self._core is not None, "start() makes one"
        self._core.send(message)

    def _on_message(self, message: FromCore) -> None:
        if message.epoch != self._epoch:
            return  # words of a core that was replaced
        if len(self.journal) == 0 or not isinstance(message, Reply):
            self._last_message = self.clock.now()
        match message:
            case Outputs():
                self._on_outputs(message)
            case Reply():
                self._calls.answer(message)
            case Progress(phase=phase, done=done, total=total):
                self.progress = (phase, done, total)
                self._phases.enter(phase, self.clock.now())
                self._shown.update(phase, done, total)
            case Ready(info=info):
                self._on_ready(info)
            case Failure():
                self._die(message.error())

    def _on_ready(self, info: dict[str, Any]) -> None:
        self._shown.finish()
        self.info = info
        self.prometheus.set_cache_config(cache_facts(self.config, info))
        add_log_sinks(self.sinks, self.config, self.clock, info["device"])
        self._ticker = asyncio.create_task(self._tick())
        self.tracing.started(info)
        self.state = "ready"
        self.progress = ("ready", 1, 1)
        self._settled.set()

    async def _tick(self) -> None:
        """Let the stat line notice that nothing happens."""
        while True:
            await asyncio.sleep(1)
            self.sinks.tick()

    def _on_outputs(self, message: Outputs) -> None:
        # Journal first: a token must be in it before it is on the wire.
        known = self.journal.record(message.outputs)
        self.queue.step(known, message.stats.num_waiting if message.stats else None)
        processed = self.output.process(known, self.clock.now())
        if processed.aborts:
            self.journal.close(processed.aborts)
            self._send(AbortRequests(self._epoch, processed.aborts))
        for output in processed.request_outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream.put(output)
        self.sinks.record(message.stats, processed.iteration)

    def _on_exit(self, core: CoreProcess, death: Death) -> None:
        if core.epoch != self._epoch or self.state == "dead":
            return
        logger.error("the engine core died (%s). %s", death.what, death.why)
        self._die(EngineDead(f"the engine core died ({death.what})", advice=death.why))

    def _die(self, error: QuireError) -> None:
        """End everything that waits for the core."""
        if self.state == "dead":
            return
        self.state = "dead"
        self.error = error
        self._shown.finish()
        self.tracing.end_all(error)
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        self._calls.fail(error)
        self._settled.set()
        self.died.set()
