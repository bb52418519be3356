"""`LLMEngine`: a front end and a core in one process, driven by their caller."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config import EngineConfig, RecoveryConfig
from quire.config.locate import located
from quire.config.scheduler import SERVER_LIMITS
from quire.core.stats import StepStats
from quire.engine.cores.culprit import find_culprit
from quire.engine.cores.inline import InlineCore
from quire.engine.engine_verbs import EngineVerbs
from quire.engine.foreign import ABSENT_OF_LLM_ENGINE, check_request_options
from quire.engine.frontend.front_end import FrontEnd, load_tokenizer
from quire.engine.frontend.load_progress import Loading
from quire.engine.frontend.questions import explain_inline
from quire.engine.live_config import LiveConfig
from quire.engine.messages import FromCore, Outputs, Progress
from quire.engine.verbs import find_verb
from quire.errors import ConfigError, Conflict, EngineDead
from quire.logger import get_logger
from quire.utils.absent import absent
from quire.utils.function_trace import trace_functions
from quire.utils.signals import pass_on_signals
from quire.utils.timing import Clock, RealClock

if TYPE_CHECKING:
    from quire.engine.core import ProgressCallback
    from quire.engine.frontend.listeners import AnyParams
    from quire.engine.frontend.output_processor import ProcessedOutputs
    from quire.engine.frontend.prompts import PromptType
    from quire.engine.frontend.questions import Question
    from quire.engine.messages import EngineCoreRequest
    from quire.executor.base import Executor
    from quire.observability.explain.explanation import Explanation
    from quire.outputs import RequestOutput

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
        executor: Executor | str = "inline",
        clock: Clock | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        if envs.TRACE_FUNCTION:
            logger.warning("QUIRE_TRACE_FUNCTION: calls go to %s", trace_functions())
        for name in SERVER_LIMITS:
            if getattr(config.scheduler, name) is not None:
                raise ConfigError(f"{name} is a limit of servers; LLM takes all prompts at once")
        if config.recovery != RecoveryConfig():
            raise ConfigError(
                f"{', '.join(f.name for f in fields(RecoveryConfig))} are options of servers: the "
                "engine core of LLM is in the caller's process and cannot be replaced"
            )
        self.clock = clock or RealClock()
        self.lock = threading.RLock()
        """Held while the engine is used: threads may share it, and take turns."""
        self._taken: list[tuple[ProcessedOutputs, StepStats | None]] = []
        # what steps produced, until the caller has it; mostly of one
        self._num_taken = 0
        # entries of it from before the current step
        self._num_changes: int | None = None
        # the scheduler's count when the current step began; None between steps
        self._progress = progress
        self._loading = Loading(self.clock, "engine core")
        config = located(config)
        shape = config.model.read_shape()
        tokenizer = load_tokenizer(config.model, shape)
        self._inline = InlineCore(1, self._on_message, executor=executor, clock=self.clock)
        try:
            self._inline.start(config)
        finally:
            self._loading.finish()
        self.core = self._inline.core
        """The core in this process."""
        self.frontend = FrontEnd(
            LiveConfig(config, self.core.config),
            shape,
            tokenizer,
            self._inline,
            self.clock,
            serves=False,
            kv_capacity_tokens=self.core.kv.capacity_tokens,
        )
        self.frontend.begin_core(self._inline.epoch)
        self.frontend.started(self._loading, self.core.info.to_dict())
        self._ended = False

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams,
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
        with self.lock:
            self._enter()
            self.frontend.accept(
                request_id,
                prompt,
                params,
                trace_headers=trace_headers,
                priority=priority,
                cache_salt=cache_salt,
                client=client,
            )
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one engine step and return what it means to the callers.

        A step that is left by an exception, say a Ctrl-C, has not happened: the next one tries it
        again, and no output is lost. A request that makes steps raise ends with its own error.
        """
        with self.lock:
            self._enter()
            if not self._taken:
                self._step()
            return self._hand_over()

    def _step(self) -> None:
        """Step. A step that raises is tried once more, which helps against what passes. If it
        raises again, the request that causes it is looked for and ended; what is no single
        request's fault, and what a signal handler has raised, is the caller's."""
        try:
            self._step_once()
        except Exception as error:
            pass_on_signals(error)
            logger.exception("a step raised %s and is tried once more", type(error).__name__)
            try:
                self._step_once()
            except Exception as again:
                pass_on_signals(again)
                self._end_culprit(again)

    def _end_culprit(self, error: Exception) -> None:
        culprit = find_culprit(self.core, self._step_once)
        if culprit is None:
            raise error
        logger.error("request %s makes steps raise, and ends", culprit, exc_info=error)
        reason = f"internal error in a step of it ({type(error).__name__}); see the log"
        output = self.core.fail_request(culprit, reason)
        if output is not None:
            self._taken.append((self.frontend.take([output], None), None))

    def _step_once(self) -> None:
        self._num_taken = len(self._taken)
        self._num_changes = self.core.scheduler.num_changes
        try:
            self._inline.step()
        except BaseException:
            self._recover()
            raise
        self._num_changes = None

    def _on_message(self, message: FromCore) -> None:
        match message:
            case Outputs():
                taken = self.frontend.take(message.outputs, message.stats)
                self._taken.append((taken, message.stats))
            case Progress():
                self._loading.update(message.phase, message.done, message.total)
                if self._progress is not None:
                    self._progress(message.phase, message.done, message.total)

    def _enter(self) -> None:
        """Before anything is done: see that nothing is half done.

        Raises:
            Conflict: something is being done, and this call comes from within it.
        """
        if self._num_changes is not None or self._taken or self.core.scheduler.is_changing:
            self._refuse_reentry()
            self._recover()

    def _refuse_reentry(self) -> None:
        """A signal handler runs on top of what it interrupts, and the lock lets its own thread
        through: going on would undo, or do twice, what is only paused. The stack tells that from
        what was left by an exception; a flag could be left standing by a second one."""
        busy = (LLMEngine._step.__code__, LLMEngine._hand_over.__code__)
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            holder = frame.f_locals.get("self")
            if holder is self.core or (holder is self and frame.f_code in busy):
                raise Conflict(
                    "the engine was called from within its own step, by a signal handler "
                    "probably; have the handler set a flag, and call the engine when the "
                    "interrupted call has returned"
                )
            frame = frame.f_back

    def _recover(self) -> None:
        """If a step was left half done, undo it, in the core and in the outputs. If this is
        interrupted itself, the next call does it again."""
        if self._num_changes is None:
            return
        self.core.recover()
        if self.core.scheduler.num_changes == self._num_changes:
            del self._taken[self._num_taken :]
            self.frontend.rewind(
                {r.request_id: r.num_output_tokens for r in self.core.scheduler.requests.values()}
            )
        self._num_changes = None

    def _hand_over(self) -> list[RequestOutput]:
        """What remains to be done once a step holds. If an exception interrupts it, the next call
        does the rest; only the last statement gives the outputs away."""
        if not self._taken:
            return []
        taken, stats = self._taken[0]
        self.frontend.release(taken)
        self._taken[0] = taken, None
        if stats is not None:
            self.frontend.report(stats, taken.iteration)
        return self._taken.pop(0)[0].request_outputs

    def abort_request(self, request_ids: list[str]) -> None:
        """End requests by their external ids; unknown ones are ignored."""
        with self.lock:
            self._enter()
            for request_id in request_ids:
                self.frontend.abort(request_id)

    def question(self) -> Question:
        """A copy of the records, to be asked: explanations, timeline, listing.

        Raises:
            InvalidRequest: no records are kept.
        """
        with self.lock:
            return self.frontend.question()

    def call(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a control verb of the core, between the steps of other threads.

        Raises:
            InvalidRequest: there is no such verb, or its arguments do not fit.
        """
        asked = find_verb(verb)
        with self.lock:
            self._enter()
            sent = asked.ask(self.frontend, args)
            return asked.tell(self.frontend, sent, self.core.call(verb, sent))

    def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went: one explanation for each of its completions.

        Raises:
            NotFound: the id is in no record; some that are get named.
            InvalidRequest: no records are kept.
        """
        with self.lock:
            return explain_inline(self.frontend, self._prefix_of, request_id)

    def _prefix_of(self, request: EngineCoreRequest) -> dict[str, Any]:
        args = {
            "prompt_token_ids": request.prompt_token_ids,
            "cache_salt": request.cache_salt,
        }
        return dict(self.call("explain_prefix", args))

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to do."""
        return self.core.has_requests or bool(self._taken)

    def shutdown(self) -> None:
        """Let go of the model, and send what traces there are. Safe to call twice."""
        with self.lock:
            if self._ended:
                return
            self._enter()
            self._ended = True
            self._inline.stop()
            self.frontend.sinks.close()
