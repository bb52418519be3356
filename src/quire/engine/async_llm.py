"""`AsyncLLM`: the engine for servers: a front end, a supervised core, and one stream per request.

The core runs in a process of its own; this side never loads torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.config import EngineConfig, read_pooler
from quire.core.stats import IterationStats
from quire.engine.cores.restarts import RestartBudget
from quire.engine.cores.spare import CoreProcesses
from quire.engine.cores.supervisor import CoreEvents, Supervisor
from quire.engine.cores.watchdog import LOOK_SECONDS
from quire.engine.frontend.disk.identity import identity
from quire.engine.frontend.front_end import FrontEnd, load_tokenizer
from quire.engine.frontend.load_progress import Loading
from quire.engine.frontend.questions import explain_live
from quire.engine.frontend.stream import Outbox, RequestStream, StreamBuffers
from quire.engine.live_config import LiveConfig
from quire.engine.verbs import find_verb
from quire.errors import (
    EngineDead,
    EngineError,
    ProcessorFailed,
    ProcessorRefused,
    QuireError,
    StartupError,
    StepFailed,
)
from quire.logger import get_logger
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.utils.timing import Clock, RealClock

if TYPE_CHECKING:
    from quire.core.output import EngineCoreOutput
    from quire.core.stats import StepStats
    from quire.engine.cores.handle import MakeCore
    from quire.engine.frontend.disk.disk_journal import DiskJournal
    from quire.engine.frontend.disk.stored import Resumption
    from quire.engine.frontend.listeners import AnyParams
    from quire.engine.frontend.meter import Entry, Meter
    from quire.engine.frontend.output_processor import Delta
    from quire.engine.frontend.processed_input import ProcessedInput
    from quire.engine.frontend.prompts import PromptType
    from quire.engine.frontend.questions import Question
    from quire.engine.messages import EngineCoreRequest, Outputs
    from quire.observability.explain.explanation import Explanation

logger = get_logger(__name__)

SENT_TOGETHER: Final = 64
"""Streams whose text is rendered before any of it is sent. With more, the first would wait long."""


class AsyncLLM:
    """An engine that serves many callers of one event loop.

    Make one with `AsyncLLM.start()`. It is usable once `wait_ready()` has returned.

    Args:
        config: As given by the user.
        entropy: Mixed into the seeds of requests without one.
        clock, make_core: Replaceable in tests.
        replaces: Asked with its error whether a core that died is replaced; see `Supervisor`. The
            configuration's `RestartBudget` unless given.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        entropy: bytes,
        clock: Clock | None = None,
        make_core: MakeCore | None = None,
        replaces: Callable[[QuireError], bool] | None = None,
    ) -> None:
        self.clock = clock or RealClock()
        self._loading = Loading(self.clock, "frontend")
        live, shape = LiveConfig.begin(config)
        assert live.now.model.max_model_len is not None, "resolve() settles it"
        self.max_model_len: int = live.now.model.max_model_len
        self.vocab_size = shape.vocab_size
        self.tokenizer = load_tokenizer(live.given.model, shape)
        self.pooler = read_pooler(live.now.model, shape)
        """How the model pools; `None` if it generates text."""
        events = CoreEvents(
            started=self._on_start,
            loading=self._loading.update,
            ready=self._on_ready,
            stalled=self._on_stall,
            outputs=self._on_outputs,
            replay=self._replay,
            recovered=self._on_recovered,
            dead=self._on_death,
        )
        self._processes = CoreProcesses(live.now.recovery.warm_spare and make_core is None)
        self._budget = RestartBudget(live.now.recovery, self.clock)
        self.supervisor = Supervisor(
            live,
            events,
            make_core or self._processes.make,
            self.clock,
            replaces or self._may_be_replaced,
        )
        self.frontend = FrontEnd(
            live,
            shape,
            self.tokenizer,
            self.supervisor,
            self.clock,
            serves=True,
            entropy=entropy,
        )
        self.frontend.prometheus.store.spare_is_ready = lambda: self.spare == "ready"
        self.default_params: SamplingParams = self.frontend.input.default_params()
        self._streams: dict[str, RequestStream] = {}
        limit = live.now.scheduler.server_limit("max_buffered_bytes")
        self.templates = self.frontend.templates
        self.buffers = StreamBuffers(limit, self.frontend.count_slow_reader)
        """What readers have yet to take."""
        self._outbox = Outbox()
        self._ticker: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

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
        engine._loading.enter("engine core process")
        engine.supervisor.start()
        engine._watcher = asyncio.create_task(engine._watch())
        return engine

    async def wait_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            StartupError: the core could not start; its own reason.
        """
        await self.supervisor.wait_ready()

    async def shutdown(self) -> None:
        """End all streams and the core process."""
        for task in (self._ticker, self._watcher):
            if task is not None:
                task.cancel()
        self.frontend.close()
        sinks = asyncio.to_thread(self.frontend.sinks.close)
        await asyncio.gather(self.supervisor.shutdown(), sinks)
        await self._processes.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # ---- requests ----------------------------------------------------------------------------

    async def submit(
        self,
        prompt: PromptType,
        params: AnyParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        trace_headers: Mapping[str, str] | None = None,
        max_wait: float | None = None,
        continues: bool = False,
        entry: Entry | None = None,
    ) -> RequestStream:
        """Accept a request; `trace_headers` may hold the caller's `traceparent` and `tracestate`,
        and `max_wait` the seconds after which the caller has no use for it. One that `continues`
        what was accepted before is not refused because the queue is full. The meter of `entry` is
        charged for it.
        Further prompts with equal parameters are cheaper with `RequestStream.checked` of the first.

        Raises:
            RequestError: it is invalid; nothing was queued.
            DeadlineUnreachable: its turn would come later than `max_wait`; nothing was queued.
            EngineDead: the engine has stopped.
        """
        self.supervisor.check_alive()
        await self.frontend.prepare(params)
        await self._ask_processors(params)
        self.supervisor.check_alive()
        processed = self.frontend.accept(
            request_id,
            prompt,
            params,
            trace_headers=trace_headers,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
            max_wait=max_wait,
            continues=continues,
            entry=entry,
        )
        return self._stream(request_id, processed)

    async def _ask_processors(self, params: AnyParams) -> None:
        """Ask logits processors before anything is sent, where a request has words for them. The
        core asks them again about every request; here they are asked because its caller may still
        be told with a status."""
        if not isinstance(params, SamplingParams) or not params.extra_args:
            return
        if not self.config.model.logits_processors:
            return
        try:
            await self.call("check_processors", sampling_params=msgspec.to_builtins(params))
        except (ProcessorRefused, ProcessorFailed):
            raise
        except EngineError as error:  # a core that is replaced meanwhile: the next one is asked
            logger.warning("logits processors were not asked: %s", error.message)

    def _stream(self, request_id: str, processed: ProcessedInput) -> RequestStream:
        stream = RequestStream(
            request_id,
            processed.seed,
            processed.checked,
            self._abort_now,
            self.buffers,
            self._outbox,
        )
        self._streams[request_id] = stream
        return stream

    def check_room(self, meter: Meter | None = None) -> None:
        """Refuse a request before it costs anything, if not even the smallest could be queued.

        Args:
            meter: Of whoever would be charged for it.

        Raises:
            TooManyRequests: the queue, or the party's share of it, is full.
        """
        self.frontend.check_room(meter)

    def check_fits(self, meter: Meter, count: int) -> None:
        """Refuse a request for so many completions if they can never be queued together.

        Raises:
            KeyShareTooSmall: they are more than the party's share of the queue.
        """
        self.frontend.check_fits(meter, count)

    async def resume(
        self,
        params: AnyParams,
        request_id: str,
        resumption: Resumption,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        entry: Entry | None = None,
    ) -> RequestStream:
        """Go on with a request that another process accepted and wrote to its journal. The stream
        begins with what there was, grouped as it was.

        Raises:
            JournalMismatch: its parameters mean something else here.
            RequestError: it is not valid here.
            EngineDead: the engine has stopped.
        """
        self.supervisor.check_alive()
        processed, outputs = self.frontend.resume(
            request_id,
            params,
            resumption,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
            entry=entry,
        )
        stream = self._stream(request_id, processed)
        stream.preload(outputs)
        if outputs and outputs[-1].finished:
            del self._streams[request_id]
        return stream

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request; leaving the loop early aborts it."""
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
        )
        async with aclosing(stream):
            async for output in stream:
                yield output

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
        async with aclosing(stream):
            async for output in stream:
                if output.error is not None:
                    raise StepFailed(output.error)
                if output.pooled is not None:
                    yield PoolingRequestOutput.of(output)

    async def abort(self, request_id: str, error: QuireError | None = None) -> None:
        """End a request; its stream gets a last output with `finish_reason` "abort", or raises
        `error` if that is given. Unknown ids are ignored."""
        self._abort_now(request_id, error)

    def _abort_now(self, request_id: str, error: QuireError | None = None) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        final = self.frontend.abort(request_id)
        if final is not None:
            stream.put(error or final)

    # ---- control verbs -----------------------------------------------------------------------

    async def call(self, verb: str, /, **args: Any) -> Any:
        """Run a control verb (`engine/verbs.py`) in the core, between two steps.

        Raises:
            QuireError: there is no such verb, its arguments do not fit, or it failed.
            EngineDead: the engine has stopped.
        """
        self.supervisor.check_alive()
        front, asked = self.frontend, find_verb(verb)
        sent = asked.ask(front, args)

        def hear(result: Any) -> None:
            asked.tell(front, sent, result)

        # The front end hears of the result when the reply arrives, not when this coroutine has its
        # next turn: a core that dies in between is replaced by one that has the new limits.
        return await self.supervisor.call(verb, sent, hear)

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

    # ---- what is known -----------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """What holds now, with all that the model's shape settles."""
        return self.frontend.config

    @property
    def state(self) -> str:
        """`loading`, `ready`, `replacing` or `dead`."""
        return self.supervisor.state

    @property
    def error(self) -> QuireError | None:
        """Why the engine is dead; `None` while it is not."""
        return self.supervisor.error

    @property
    def progress(self) -> tuple[str, int, int]:
        """While loading or replacing: phase, done, total."""
        return self.supervisor.progress

    @property
    def info(self) -> dict[str, Any]:
        """What the core reported when it was ready: blocks, device, memory."""
        return self.supervisor.info

    @property
    def last_step(self) -> StepStats | None:
        """What the core said of its latest step; `None` before the first."""
        return self.frontend.last_step

    @property
    def spare(self) -> str:
        """The spare process: `off`, `none`, `starting` or `ready`."""
        return self._processes.spare

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise if the engine has stopped or makes no progress.

        Raises:
            EngineDead: with the reason.
        """
        self.supervisor.check_alive()
        if self.is_stalled:
            raise EngineDead("the engine core makes no progress")

    @property
    def is_stalled(self) -> bool:
        """Whether the core makes no progress: it is about to be replaced, unless
        `--core-stall-timeout` is 0."""
        return self.supervisor.is_stalled

    def keep_journal(self, journal: DiskJournal) -> None:
        """Have a journal on disk hear of requests, once the core is ready and before the first."""
        self.frontend.listen(journal)
        journal.begin(identity(self.config, self.info))

    def metrics_text(self) -> bytes:
        """The Prometheus exposition."""
        return self.frontend.prometheus.render()

    def question(self) -> Question:
        """A copy of the records, to be asked on any thread: explanations, timeline, listing.

        Raises:
            InvalidRequest: no records are kept.
        """
        return self.frontend.question()

    async def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went, by completion.

        Raises:
            NotFound: the id is in no record.
            InvalidRequest: no records are kept.
        """
        return await explain_live(self.frontend, self._prefix_of, request_id)

    async def _prefix_of(self, request: EngineCoreRequest) -> dict[str, Any]:
        return await self.explain_prefix(request.prompt_token_ids, request.cache_salt)

    def check_integrity(self) -> None:
        """Check that front end and streams know of the same requests and tokens.

        Raises:
            AssertionError: they do not; a bug.
        """
        self.frontend.check_integrity(self._streams.keys())

    # ---- news of the core --------------------------------------------------------------------

    def _may_be_replaced(self, error: QuireError) -> bool:
        # What the first core could not start with, the second could not either.
        return self.state != "loading" and self._budget(error)

    def _on_start(self, epoch: int) -> None:
        self.frontend.begin_core(epoch)

    def _on_ready(self, info: dict[str, Any]) -> None:
        self._processes.core_is_ready()
        if self._ticker is None:  # the first core
            try:
                self.frontend.started(self._loading, info)
            except Exception as error:
                # Who waits for the start would wait for ever: nobody else hears of this.
                self.supervisor.end(_start_error(error))
                raise
            self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        """Let the stat line notice that nothing happens."""
        while True:
            await asyncio.sleep(1)
            self.frontend.sinks.tick()

    async def _watch(self) -> None:
        """See that the core makes progress. A fault in the watch must not end it."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.supervisor.check_progress()
            except Exception:
                logger.exception("the progress of the engine core could not be checked")

    def _on_stall(self, kind: str) -> None:
        self.frontend.report(None, IterationStats(core_stalls={kind: 1}))

    def _on_outputs(self, message: Outputs) -> None:
        self._take(message.outputs, message.stats)

    def _take(self, outputs: list[EngineCoreOutput], stats: StepStats | None) -> None:
        taken = self.frontend.take(outputs, stats, deltas=True)
        self.frontend.release(taken)
        self._hand_on_deltas(taken.deltas)
        for output in taken.request_outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            try:
                stream.put(output)
            except Exception:
                self._not_handed_on(output.request_id)
        self.frontend.report(stats, taken.iteration)

    def _hand_on_deltas(self, deltas: Sequence[Delta]) -> None:
        streams = self._streams
        for first in range(0, len(deltas), SENT_TOGETHER):
            try:
                for delta in deltas[first : first + SENT_TOGETHER]:
                    stream = streams.get(delta.request_id)
                    if stream is not None:
                        try:
                            stream.put_delta(delta)
                        except Exception:
                            self._not_handed_on(delta.request_id)
            finally:
                self._outbox.send()

    def _not_handed_on(self, request_id: str) -> None:
        # Its caller gets no more; the others' outputs of this step are not lost with it.
        logger.exception("an output of request %s could not be handed on", request_id)

    def _replay(self, has_worked: bool) -> list[EngineCoreRequest]:
        requests, outputs = self.frontend.replay(has_worked)
        if outputs:
            self._take(outputs, None)
        return requests

    def _on_recovered(self, parts: Mapping[str, float]) -> None:
        self.frontend.report(None, IterationStats(core_recovery=dict(parts)))

    def _on_death(self, error: QuireError) -> None:
        """End everything that waits for the core."""
        self._loading.finish()
        self.frontend.fail(error)
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()


def _start_error(error: Exception) -> QuireError:
    """What a start ends with that the front end could not go along with."""
    if isinstance(error, QuireError):
        return error
    return StartupError(f"the engine core is ready, but the front end could not start: {error!r}")
