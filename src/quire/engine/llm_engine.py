"""`LLMEngine`: input gate, core and output processor in one process, driven by its caller."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config import EngineConfig
from quire.config.engine import read_generation_config
from quire.config.locate import located
from quire.core.admission import with_limits
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.core import EngineCore, ProgressCallback
from quire.engine.engine_verbs import EngineVerbs
from quire.engine.foreign import ABSENT_OF_LLM_ENGINE, absent, check_request_options
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.input_gate import make_input_processor
from quire.engine.frontend.load_progress import LoadProgress
from quire.engine.frontend.output_processor import OutputProcessor, ProcessedOutputs
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.prompts import PromptType
from quire.engine.frontend.questions import (
    Question,
    accept,
    make_records,
    tell_prefix,
    waiting_request,
)
from quire.engine.frontend.reporting import add_log_sinks, cache_facts, make_sinks
from quire.engine.frontend.request_log import RequestLog
from quire.engine.frontend.request_tracing import Tracing
from quire.engine.verbs import find_verb
from quire.errors import ConfigError, EngineDead, QuireError
from quire.executor.base import Executor
from quire.logger import get_logger
from quire.observability.traces.tracer import PhaseLog
from quire.outputs import RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.tokenizer.fit import check_fit
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.function_trace import trace_functions
from quire.utils.timing import Clock, RealClock

if TYPE_CHECKING:
    from quire.observability.explain.explanation import Explanation

logger = get_logger(__name__)


@absent(ABSENT_OF_LLM_ENGINE)
class LLMEngine(EngineVerbs):
    """The synchronous engine under `LLM`.

    Args:
        config: As given by the user.
        executor, clock: Replaceable in tests.
        progress: Called with (phase, done, total) while loading.

    Raises:
        StartupError: the configuration, the model folder or the memory does not allow a start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None = None,
        clock: Clock | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        if envs.TRACE_FUNCTION:
            logger.warning("QUIRE_TRACE_FUNCTION: calls go to %s", trace_functions())
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(config.scheduler, name) is not None:
                raise ConfigError(f"{name} is a limit of servers; LLM takes all prompts at once")
        self.clock = clock or RealClock()
        self.lock = threading.RLock()
        """Held while the engine is used: threads may share it, and take turns."""
        self._taken: list[ProcessedOutputs] = []
        self._stats: StepStats | None = None
        # what a step produced, until it is handed over
        self._num_changes: int | None = None
        # of the scheduler when the step began that is under way
        config = located(config)
        self.tokenizer = Tokenizer.from_folder(
            config.model.tokenizer_folder, config.model.chat_template
        )
        check_fit(self.tokenizer, config.model.read_shape())
        phases = PhaseLog(self.clock.now(), "engine core")
        shown = LoadProgress(self.clock)

        def tell(phase: str, done: int, total: int) -> None:
            phases.enter(phase, self.clock.now())
            shown.update(phase, done, total)
            if progress is not None:
                progress(phase, done, total)

        try:
            self.core = EngineCore(config, executor=executor, clock=self.clock, progress=tell)
        finally:
            shown.finish()
        self.config = self.core.config
        model = self.config.model
        assert model.max_model_len is not None
        self.input = make_input_processor(
            model,
            model.read_shape(),
            self.tokenizer,
            max_model_len=model.max_model_len,
            kv_capacity_tokens=self.core.kv.capacity_tokens,
            block_size=self.config.cache.block_size,
            generation_defaults=read_generation_config(model),
        )
        tier = "disk" if self.config.cache.swap_dir else "host"
        self.output = OutputProcessor(self.tokenizer, self.clock, tier)
        self.request_log = RequestLog(self.config.observability, self.tokenizer.decode)
        self.sinks, self.prometheus = make_sinks(self.config, self.clock)
        self.records = make_records(self.config)
        self.sinks.add(self.records)
        self.prometheus.set_cache_config(cache_facts(self.config, self.core.info.to_dict()))
        add_log_sinks(self.sinks, self.config, self.clock, self.core.info.device)
        dropped = self.prometheus.store.dropped_spans.add
        self.tracing = Tracing(self.config, self.clock, dropped, phases)
        if self.tracing.tracer is not None:
            self.sinks.add(self.tracing.tracer)
        self.tracing.started(self.core.info.to_dict())
        self._ended = False

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | CheckedParams,
        arrival_time: float | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
        *,
        cache_salt: str | None = None,
        client: str = "",
    ) -> str:
        """Queue a request; `n` > 1 makes `n` of them, which share the prompt's blocks.

        `trace_headers` may hold the caller's `traceparent` and `tracestate`. What is not explained
        here may only be `None`: it is there for programs that pass it.

        Returns:
            `request_id`.

        Raises:
            RequestError: it is invalid; nothing was queued.
            EngineDead: `shutdown()` was called.
        """
        if self._ended:
            raise EngineDead("This engine was shut down and takes no requests; make a new one.")
        check_request_options(
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            session_id=session_id,
            prompt_text=prompt_text,
            kv_hints=kv_hints,
        )
        with self.lock, self.tracing.refusals(request_id, params, trace_headers) as arrival:
            processed = self.input.process(
                request_id,
                prompt,
                params,
                arrival_time=arrival,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
            )
            self._recover()
            self._add(request_id, processed, params, trace_headers)
        return request_id

    def _add(
        self,
        request_id: str,
        processed: ProcessedInput,
        params: SamplingParams | PoolingParams | CheckedParams,
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        """Let everybody know of a request, or nobody."""
        try:
            self.output.add(processed)
            self.tracing.accept(processed.requests, params, trace_headers)
            accept(self.records, processed.requests)
            self.request_log.received(request_id, processed)
            for request in processed.requests:
                self.core.add_request(request)
        except QuireError:
            raise  # refused: its id belongs to another
        except BaseException:
            self.abort_request([request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Run one engine step and return what it means to the callers.

        A step that is left by an exception, say a Ctrl-C, has not happened: the next one tries it
        again, and no output is lost.
        """
        with self.lock:
            self._recover()
            if not self._taken:
                self._step()
            return self._hand_over()

    def _step(self) -> None:
        self._num_changes = self.core.scheduler.num_changes
        try:
            self.core.step_into(self._take_in)
        except BaseException:
            self._recover()
            raise
        self._num_changes = None

    def _take_in(self, outputs: list[EngineCoreOutput], stats: StepStats) -> None:
        self._taken = [self.output.process(outputs, self.clock.now())]
        self._stats = stats

    def _recover(self) -> None:
        """If a step was left half done, take back its part in the outputs, too. Can be interrupted
        itself: whoever comes next does it again."""
        if self._num_changes is None:
            return
        self.core.recover()
        if self.core.scheduler.num_changes == self._num_changes:
            self._taken = []
            self.output.rewind(
                {r.request_id: r.num_output_tokens for r in self.core.scheduler.requests.values()}
            )
        self._num_changes = None

    def _hand_over(self) -> list[RequestOutput]:
        """What is left to do once a step stands, up to the last statement: what an exception
        interrupts here, the next call does."""
        if not self._taken:
            return []
        taken, stats = self._taken[0], self._stats
        self.core.abort_requests(taken.aborts)
        self._stats = None
        if stats is not None:
            self.sinks.record(stats, taken.iteration)
        return self._taken.pop().request_outputs

    def abort_request(self, request_ids: list[str]) -> None:
        """End requests by their external ids; unknown ones are ignored."""
        with self.lock:
            self._recover()
            for request_id in request_ids:
                self.core.abort_requests(self.output.internal_ids(request_id))
                _, final = self.output.abort(request_id)
                if final is not None:
                    self.request_log.aborted([request_id])
            self.sinks.record(None, self.output.take_stats())

    def question(self) -> Question:
        """A copy of the records, to be asked: explanations, timeline, listing.

        Raises:
            InvalidRequest: no records are kept.
        """
        with self.lock:
            return Question(self.records, self.output.active(), self.clock.now(), self.config)

    def call(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a control verb of the core, between the steps of other threads.

        Raises:
            InvalidRequest: there is no such verb, or its arguments do not fit.
        """
        asked = find_verb(verb)
        with self.lock:
            self._recover()
            sent = asked.ask(self, args)
            return asked.tell(self, sent, self.core.call(verb, sent))

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
        self.config, changed = with_limits(self.config, limits)
        if changed:
            self.records.change_limits(self.clock.now())

    def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went: one explanation for each of its completions.

        Raises:
            NotFound: the id is in no record; some that are get named.
            InvalidRequest: no records are kept.
        """
        with self.lock:
            told = self.question().explain(request_id)
            request = waiting_request(told, self.output)
            if request is not None:
                answer = None
                if request.sampling_params.reads_prefix_cache:
                    args = {
                        "prompt_token_ids": request.prompt_token_ids,
                        "cache_salt": request.cache_salt,
                    }
                    answer = self.call("explain_prefix", args)
                tell_prefix(told, request, answer, self.config.cache.block_size)
            return told

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        return self.core.has_requests or bool(self._taken)

    def shutdown(self) -> None:
        """Let go of the model, and send what traces there are. Safe to call twice."""
        with self.lock:
            if self._ended:
                return
            self._ended = True
            self.core.shutdown()
            self.sinks.close()
