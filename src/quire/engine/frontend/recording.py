"""`--record`: hands what happens to requests, and the decisions of each step, to a recorder.

Nothing is computed here: the recorder's thread does that. Knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from quire.config import EngineConfig
from quire.config.observability import ObservabilityConfig
from quire.core.facts import FactKind, unpack
from quire.core.output import EngineCoreOutput
from quire.core.stats import IterationStats, StepStats
from quire.engine.frontend.listeners import AcceptedRequest, Listener
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.version import __version__
from quire.workload.recorder import OpenRequest, TraceRecorder
from quire.workload.trace import TraceHeader, TraceStep

KEPT: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "skip_reading_prefix_cache", "ignore_eos",
)  # fmt: skip
"""Sampling parameters that are recorded, where they are not at their defaults: none can hold text
or token ids."""
_DEFAULTS: Final = SamplingParams()


def ended_in(records: bytes) -> Iterator[int]:
    """Numbers of the requests that ended, by the records of a step."""
    return (fact.request for fact in unpack(records) if fact.kind == FactKind.FINISHED)


def check_recordable(path: str) -> None:
    """Tell before an engine is started whether its recording can be written. What is in the file
    stays there: an engine that cannot start must not cost the last recording.

    Raises:
        ConfigError: it cannot.
    """
    try:
        open(path, "ab").close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--record: cannot write {path!r}: {reason}") from None


class Recorded(Listener):
    """Listener and sink of a recording.

    Args:
        config: As given by the user, with `observability.record`.
        now: Seconds on the engine's clock.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, config: EngineConfig, now: float) -> None:
        observed = config.observability
        assert observed.record is not None, "somebody wants a recording"
        check_recordable(observed.record)
        self._with_text = observed.record_text
        self._path, self._now, self._config = observed.record, now, config
        self._header = TraceHeader(
            block_size=config.cache.block_size,
            source=f"recorded by quire {__version__}",
            model=config.model.names[0],
            origin=now,
        )
        self._recorder: TraceRecorder | None = None

    def started(self, config: EngineConfig, info: Mapping[str, Any]) -> None:
        """The engine is ready, and says of itself how it was resolved."""
        # Templates may hold a system prompt, and addresses of collectors a password; neither is
        # needed to decide the same.
        model = replace(config.model, chat_template=None, override_generation_config={})
        plain = replace(config, model=model, observability=ObservabilityConfig())
        self._header.config = plain.to_dict()
        self._header.info = dict(info)
        self._recorder = TraceRecorder(
            self._path, self._header, self._now, ended_in, with_text=self._with_text
        )
        self._recorder.begin_core()

    def accepted(self, accepted: AcceptedRequest) -> None:
        """Requests come in."""
        if self._recorder is not None:
            for request in accepted.requests:
                text = accepted.processed.prompt_text if self._with_text else None
                self._recorder.accept(request.request_id, self._opened(request, text))

    def _opened(self, request: EngineCoreRequest, text: str | None) -> OpenRequest:
        params = request.sampling_params
        kept = {n: v for n in KEPT if (v := getattr(params, n)) != getattr(_DEFAULTS, n)}
        return OpenRequest(
            request.arrival_time,
            request.prompt_token_ids,
            request.priority,
            request.client,
            kept,
            request.cache_salt or "",
            text,
        )

    def stepped(self, outputs: Sequence[EngineCoreOutput], stats: StepStats | None) -> None:
        """A step has produced something."""
        if self._recorder is None:
            return
        step = None
        if stats is not None:
            step = TraceStep(
                stats.step, stats.start, stats.step_seconds, stats.facts, stats.forward_seconds,
                stats.swap_seconds,
            )  # fmt: skip
        self._recorder.step(
            [(o.request_id, o.new_token_ids) for o in outputs],
            [(o.request_id, str(o.finish_reason)) for o in outputs if o.finish_reason is not None],
            step,
            stats.names if stats is not None else (),
        )

    def closed(self, internal_ids: Sequence[str]) -> None:
        """Completions were ended on this side."""
        if self._recorder is not None:
            self._recorder.close_requests(list(internal_ids))

    # ---- as a sink ---------------------------------------------------------------------------

    def record(self, step: StepStats | None, iteration: IterationStats | None) -> None:
        """`stepped` has heard all of it."""

    def begin_core(self, epoch: int) -> None:
        """Another core takes over."""
        if self._recorder is not None:
            self._recorder.begin_core()

    def close(self) -> None:
        """Write what is there."""
        if self._recorder is not None:
            self._recorder.close()
