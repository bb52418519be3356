"""`FrontEnd`: what happens to a request before it reaches a core, and to what comes back.

It owns the input gate, the output processor and all listeners, and it is the same for a core in
this process (`LLMEngine`) and one elsewhere (`AsyncLLM`). Who hears what:

| Event | Journal | Queue | Meters | Output processor | Records | Traces | Log of requests | Core |
|---|---|---|---|---|---|---|---|---|
| accepted | opens | counts | charge | registers first | names | begin | a line | gets it last |
| refused | | counts its own | | | | one span | | |
| outputs of a step | writes first | uncounts | charge | makes text | | | | |
| closed on this side | forgets | uncounts | uncount | | | | | told first |
| aborted | | | | last output | | | a line | |
| engine gone | | | uncount | | | end | | |

Listeners hear in the order of the columns. The journal hears before any caller does, so a token is
in it before it is on the wire. A request goes to the output processor first, where it can be found
and ended if something interrupts the rest, and to the core last. Statistics go to the sinks once
all that is done. Knows no process, no socket and no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from quire.config import EngineConfig, ModelConfig, ModelShape
from quire.config.engine import read_generation_config
from quire.core.output import EngineCoreOutput, failed_output
from quire.core.stats import IterationStats, StepStats
from quire.engine.frontend.checked import CheckedParams, filled
from quire.engine.frontend.disk.stored import Resumption, params_digest
from quire.engine.frontend.input_gate import InputGate, make_input_processor
from quire.engine.frontend.journal import Journal
from quire.engine.frontend.listeners import (
    AcceptedRequest,
    AnyParams,
    Listener,
    ListenerTable,
    RefusedRequest,
)
from quire.engine.frontend.load_progress import Loading
from quire.engine.frontend.meter import Entry, Meter
from quire.engine.frontend.metering import Metering
from quire.engine.frontend.output_processor import OutputProcessor, ProcessedOutputs
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.prompts import PromptType
from quire.engine.frontend.quarantine import Quarantine
from quire.engine.frontend.questions import Question, RecordListener
from quire.engine.frontend.queue_limits import QueueLimits
from quire.engine.frontend.recording import Recorded
from quire.engine.frontend.reporting import add_log_sinks, cache_facts, make_sinks
from quire.engine.frontend.request_log import RequestLog
from quire.engine.frontend.request_tracing import Tracing, make_tracer
from quire.engine.live_config import LiveConfig
from quire.engine.messages import AbortRequests, AddRequests, EngineCoreRequest, ToCore
from quire.engine.starvation import ApiWaits
from quire.errors import JournalMismatch, QuireError
from quire.observability.recorder.ring import StepRecords
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.structured.gate import LocalGate, MakeGate
from quire.structured.helper import HelperGate
from quire.tokenizer.fit import check_fit
from quire.tokenizer.template_helper import TemplateHelper
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.timing import Clock


class ToTheCore(Protocol):
    """Where messages go, whichever core is there at the moment."""

    @property
    def epoch(self) -> int:
        """Of the core that is there."""
        ...

    def send(self, message: ToCore) -> None:
        """Bring a message to it."""
        ...

    def prepare(self, message: ToCore) -> Callable[[], None]:
        """Encode a message, and return what brings it there.

        Raises:
            InvalidRequest: it cannot be encoded, or is over the limit of a message.
        """
        ...


def load_tokenizer(model: ModelConfig, shape: ModelShape) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
        StartupError: it cannot be read, or is not the model's.
    """
    tokenizer = Tokenizer.from_folder(model.tokenizer_folder, model.chat_template)
    check_fit(tokenizer, shape)
    return tokenizer


def _nowhere() -> None:
    """The core does not get it yet."""


class FrontEnd:
    """Accepts requests for one core and makes answers of what it produces.

    Args:
        live: The configuration, as it holds now.
        shape: The model's.
        tokenizer: See `load_tokenizer`.
        core: Where requests go.
        clock: Monotonic time.
        serves: Keep a journal, limit the queue, time the waits of this process, and convert
            log-probabilities of prompts when they are read. `LLM` has none of them: a journal is
            read when a core is replaced, which a core in the caller's process never is, and `LLM`
            takes all prompts at once.
        options: Further ones of `InputProcessor`.

    Raises:
        StartupError: the model's files or the configuration do not allow a start.
    """

    def __init__(
        self,
        live: LiveConfig,
        shape: ModelShape,
        tokenizer: Tokenizer,
        core: ToTheCore,
        clock: Clock,
        *,
        serves: bool,
        **options: Any,
    ) -> None:
        config = live.now
        self.live = live
        self.last_step: StepStats | None = None
        """What the core said of its latest step; `None` before the first."""
        self.clock = clock
        self._core = core
        self.tokenizer = tokenizer
        template = tokenizer.chat_template
        self.templates = TemplateHelper(template) if serves and template is not None else None
        """Renders conversations in processes that may be killed; None where nobody serves."""
        make_grammars: MakeGate = HelperGate if serves else LocalGate
        self.input = _make_gate(
            config, shape, tokenizer, options | {"make_grammars": make_grammars}
        )
        self.output = OutputProcessor(
            tokenizer,
            clock,
            "disk" if config.cache.swap_dir else "host",
            config.scheduler.stream_interval,
            lazily=serves,
        )
        self.journal = Journal() if serves else None
        self.queue = QueueLimits(self._count_rejection, clock) if serves else None
        self.meters = Metering() if serves else None
        self.records = _make_records(config)
        first = [ApiWaits()] if serves else []
        self.sinks, self.prometheus = make_sinks(config, clock, *first)
        self.sinks.add(self.records)
        tracer = make_tracer(config, clock, self.prometheus.store.dropped_spans.add)
        self.tracing = None if tracer is None else Tracing(tracer, config, clock)
        if tracer is not None:
            self.sinks.add(tracer)
        self._recording = Recorded(config, clock.now()) if config.observability.record else None
        if self._recording is not None:
            self.sinks.add(self._recording)
        log = RequestLog(config.observability, tokenizer.decode)
        self._quarantine = Quarantine()
        suspects = self._quarantine if serves else None
        records = RecordListener(self.records)
        meters = self.meters
        recording = self._recording
        listeners = (
            self.journal, suspects, self.queue, meters, records, recording, self.tracing, log,
        )  # fmt: skip
        self._listeners: list[Listener] = [one for one in listeners if isinstance(one, Listener)]
        self._tell = ListenerTable(self._listeners)

    @property
    def config(self) -> EngineConfig:
        """What holds now."""
        return self.live.now

    # ---- the engine's life -------------------------------------------------------------------

    def begin_core(self, epoch: int) -> None:
        """What is reported from now on comes from the core of this epoch."""
        self.sinks.begin_core(epoch)

    def started(self, loading: Loading, info: Mapping[str, Any]) -> None:
        """The first core is ready.

        Args:
            loading: The start.
            info: What the executor says of itself.
        """
        loading.finish()
        self.prometheus.set_cache_config(cache_facts(self.config, info))
        add_log_sinks(self.sinks, self.config, self.clock, info["device"])
        if self._recording is not None:
            self._recording.started(self.config, info)
        if self.tracing is not None:
            self.tracing.started(loading.phases, info)

    def fail(self, error: QuireError) -> None:
        """The engine is gone."""
        self._tell.failed(error)

    # ---- requests ----------------------------------------------------------------------------

    async def prepare(self, params: AnyParams) -> None:
        """Have the grammar of a request looked at, if it has one, and long lists of banned words
        tokenised, so that `accept` need not wait.

        Raises:
            TooManyRequests: too many others are being looked at.
        """
        prepare = getattr(self.input, "prepare", None)
        if isinstance(params, SamplingParams) and prepare is not None:
            await prepare(params)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            grammars = getattr(self.input, "grammars", None)
            if isinstance(grammars, HelperGate):
                await grammars.prepare(params.structured_outputs)

    def close(self) -> None:
        """End what helps to take requests in."""
        grammars = getattr(self.input, "grammars", None)
        if isinstance(grammars, HelperGate):
            grammars.close()
        if self.templates is not None:
            self.templates.close()

    def accept(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        max_wait: float | None = None,
        continues: bool = False,
        entry: Entry | None = None,
    ) -> ProcessedInput:
        """Take a request in and hand it to the core. Either everybody knows of it, or nobody.
        `max_wait`: seconds after which its caller has no use for it. `continues`: it is a further
        step of what was accepted before, so the limits of the queue do not count. `entry`: of
        whoever is charged for it.

        Raises:
            RequestError: it is invalid, or a limit is reached; nothing was queued.
            DeadlineUnreachable: its turn would come later than `max_wait`; nothing was queued.
        """
        arrival = self.clock.now()
        try:
            processed = self.input.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
            )
            if self.queue is not None and not continues:
                now = self.config.scheduler
                if entry is not None and self.meters is not None:
                    self.meters.check(entry, processed.requests, now, self._wait)
                self.queue.check(processed.requests, now, self.output.num_completions)
                if max_wait is not None:
                    self.queue.check_deadline(max_wait, now, self.output.num_completions)
            self.output.check_unused(request_id)
            # Nobody hears of a request that could not be sent.
            send = self._core.prepare(AddRequests(self._core.epoch, processed.requests))
        except QuireError as error:
            self._tell.refused(RefusedRequest(request_id, params, trace_headers, arrival, error))
            raise
        accepted = AcceptedRequest(
            request_id, processed, params, trace_headers, entry, continues=continues
        )
        self._announce(accepted, send)
        return processed

    def check_room(self, meter: Meter | None = None) -> None:
        """Refuse a request before it costs anything, if not even the smallest could be queued.

        Args:
            meter: Of whoever would be charged for it.

        Raises:
            TooManyRequests: the queue, or the party's share of it, is full.
        """
        if self.queue is not None:
            now = self.config.scheduler
            if meter is not None and self.meters is not None:
                self.meters.check_room(meter, now, self._wait)
            self.queue.check_count(1, now, self.output.num_completions)

    def check_fits(self, meter: Meter, count: int) -> None:
        """Refuse so many completions if they can never be queued together.

        Raises:
            KeyShareTooSmall: they are more than the party's share of the queue.
        """
        if self.meters is not None:
            self.meters.check_fits(meter, count, self.config.scheduler)

    def _wait(self) -> float | None:
        """Seconds until the turn of a request that came now, if they can be estimated."""
        if self.queue is None:
            return None
        return self.queue.wait(self.config.scheduler, self.output.num_completions) or None

    def resume(
        self,
        request_id: str,
        params: AnyParams,
        resumption: Resumption,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        entry: Entry | None = None,
    ) -> tuple[ProcessedInput, list[RequestOutput]]:
        """Go on with a request that another process accepted: what it brought so far is taken in
        as if the core said it now, and the core gets the rest to do. Limits of the queue do not
        count, because the request was accepted.

        Returns:
            The request, and the outputs so far, as they were grouped then.

        Raises:
            JournalMismatch: its parameters mean something else here.
            RequestError: it is not valid here, or its id is taken.
        """
        stored = resumption.prompt
        if isinstance(params, CheckedParams):
            params = params.with_seed(stored.seed)
        elif isinstance(params, SamplingParams):
            params = filled(params, seed=stored.seed)
        processed = self.input.process(
            request_id,
            stored.token_ids,
            params,
            arrival_time=self.clock.now(),
            priority=priority,
            cache_salt=cache_salt,
            client=client,
        )
        if params_digest(processed.params) != stored.params:
            raise JournalMismatch("the request's sampling parameters")
        self.output.check_unused(request_id)
        self._announce(AcceptedRequest(request_id, processed, params, trace_headers), _nowhere)
        ids = [request.request_id for request in processed.requests]
        found: list[RequestOutput] = []
        try:
            for step in resumption.steps:
                # Its statistics were those of the process before.
                taken = self.take([one.output(ids[one.index]) for one in step], None)
                found += taken.request_outputs
            assert self.journal is not None, "LLM resumes nothing"
            running = self.output.internal_ids(request_id)
            if entry is not None and self.meters is not None:
                self.meters.adopt(entry, running)
            if rest := [r for r in self.journal.replay() if r.request_id in running]:
                self._core.send(AddRequests(self._core.epoch, rest))
        except BaseException:
            self.abort(request_id)
            raise
        return processed, found

    def listen(self, listener: Listener) -> None:
        """Have one more listener hear of requests, right after the journal. To be called before the
        first request."""
        self._listeners.insert(1, listener)
        self._tell = ListenerTable(self._listeners)

    def _count_rejection(self, reason: str) -> None:
        self.report(None, IterationStats(admission_rejections={reason: 1}))

    def count_slow_reader(self) -> None:
        """A request was ended because its caller read too slowly."""
        self.report(None, IterationStats(num_slow_readers=1))

    def _announce(self, accepted: AcceptedRequest, send: Callable[[], None]) -> None:
        try:
            self.output.add(accepted.processed)
            self._tell.accepted(accepted)
            send()
        except BaseException:
            self.abort(accepted.request_id)
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request from outside.

        Returns:
            Its last output, with `finish_reason` "abort"; `None` if the id is unknown.
        """
        # The core comes first: if an exception leaves this half way, a second call still finds
        # the request, and it does no harm to end it there twice.
        internal = self.output.internal_ids(request_id)
        if internal:
            self._core.send(AbortRequests(self._core.epoch, internal))
        self._tell.closed(internal)
        # Others may have waited for this one to be tried, in a core that has nothing else to do:
        # no output would ever come and let them go on.
        self._let_go()
        _, final = self.output.abort(request_id)
        if final is not None:
            self._tell.aborted(request_id)
        self.report(None, self.output.take_stats())
        return final

    # ---- outputs -----------------------------------------------------------------------------

    def take(
        self,
        outputs: Sequence[EngineCoreOutput],
        stats: StepStats | None,
        *,
        deltas: bool = False,
    ) -> ProcessedOutputs:
        """Take in what a step produced. Once its request outputs, and its deltas if the caller
        takes those, have been handed over, `release` and `report` are to be called."""
        num_faults = self._tell.num_faults
        self._tell.stepped(outputs, stats)
        lost: list[str] = []
        if self._tell.num_faults > num_faults and self.journal is not None:
            lost = self._not_written(self.journal, outputs)
            error = "the output of this request could not be written down; see the server's log"
            outputs = [
                failed_output(i, error) if (i := o.request_id) in lost else o for o in outputs
            ]
        taken = self.output.process(outputs, self.clock.now(), deltas=deltas)
        taken.aborts += lost
        if taken.aborts:
            self._tell.closed(taken.aborts)
        return taken

    def _not_written(self, journal: Journal, outputs: Sequence[EngineCoreOutput]) -> list[str]:
        """The completions whose new tokens the journal lacks, because it raised. They must not be
        sent: a core that takes over would generate others in their place."""
        written, before = journal.tokens(), self.output.tokens()
        lost: list[str] = []
        for output in outputs:
            tokens = before.get(output.request_id)
            if tokens is not None:
                ended = output.finish_reason is not None
                expected = None if ended else [*tokens, *output.new_token_ids]
                if written.get(output.request_id) != expected:
                    lost.append(output.request_id)
        return lost

    def rewind(self, num_tokens: Mapping[str, int]) -> None:
        """Undo the last `take`: its step has not happened. For a front end without a journal.

        Args:
            num_tokens: By internal id, of what the core still works on: tokens before that step.
        """
        assert self.journal is None, "what is in the journal may be on the wire"
        self.output.rewind(num_tokens)

    def release(self, taken: ProcessedOutputs) -> None:
        """Have the core drop completions that ended on this side only, for example by a stop
        string."""
        if taken.aborts:
            self._core.send(AbortRequests(self._core.epoch, taken.aborts))
        self._let_go()

    def _let_go(self) -> None:
        """Send the core the suspects whose turn it is."""
        if released := self._quarantine.released():
            self._core.send(AddRequests(self._core.epoch, released))

    def report(self, stats: StepStats | None, iteration: IterationStats) -> None:
        """Hand statistics to all sinks."""
        self.last_step = stats or self.last_step
        self.sinks.record(stats, iteration)

    def replay(self, has_worked: bool) -> tuple[list[EngineCoreRequest], list[EngineCoreOutput]]:
        """What a new core must take over: the unfinished completions, with their output so far.

        Args:
            has_worked: Whether the core before it died at work, and not while it loaded.

        Returns:
            What the core gets, and the last outputs of requests that are taken out because cores
            die of them; they are to be taken in as those of a step are.
        """
        assert self.journal is not None, "there is no journal to replay"
        return self._quarantine.hand_over(self.journal.replay(), has_worked)

    # ---- for control verbs (`Front` in `engine/verbs.py`) --------------------------------------

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
        """Keep a copy of what the core now holds, for the core that may come after it.

        Args:
            limits: All of `LIVE_LIMITS`.
            priorities: What was changed, by internal id.
        """
        if self.journal is not None:
            for internal_id, priority in priorities.items():
                self.journal.set_priority(internal_id, priority)
                self._quarantine.set_priority(internal_id, priority)
        if self.live.change_limits(limits):
            self.records.change_limits(self.clock.now())

    # ---- what is known -----------------------------------------------------------------------

    def question(self) -> Question:
        """A copy of the records, to be asked on any thread: explanations, timeline, listing.

        Raises:
            InvalidRequest: no records are kept.
        """
        return Question(self.records, self.output.active(), self.clock.now(), self.config)

    def check_integrity(self, streams: Collection[str] | None = None) -> None:
        """Check that all who know of requests know of the same ones, and of the same tokens.

        Args:
            streams: External ids of the requests that somebody waits for; `None` if unknown.

        Raises:
            AssertionError: they do not; a bug.
        """
        self.output.check_integrity()
        active = list(self.output.active())
        if self.journal is not None:
            assert self.journal.tokens() == self.output.tokens(), "journal and outputs differ"
            self._quarantine.check_integrity(self.journal.tokens())
        if self.queue is not None:
            silent = {c.internal_id: c.num_prompt_tokens for c in active if not c.seen}
            self.queue.check_integrity(silent)
            assert self.meters is not None, "who limits the queue has meters"
            self.meters.check_integrity({c.internal_id for c in active}, silent)
        if streams is not None:
            known = {completion.external_id for completion in active}
            assert known == set(streams), f"streams of {set(streams)}, requests {known}"


def _make_gate(
    config: EngineConfig, shape: ModelShape, tokenizer: Tokenizer, options: dict[str, Any]
) -> InputGate:
    model = config.model
    assert model.max_model_len is not None, "resolve() settles it"
    return make_input_processor(
        model,
        shape,
        tokenizer,
        max_model_len=model.max_model_len,
        block_size=config.cache.block_size,
        generation_defaults=read_generation_config(model),
        **options,
    )


def _make_records(config: EngineConfig) -> StepRecords:
    """The ring, as large as configured."""
    cache = config.cache
    steps = config.observability.record_steps
    return StepRecords(steps, cache.block_size, cache.enable_prefix_caching)
