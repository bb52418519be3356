"""The life of a request as spans: `queue_wait`, `prefill` (one per chunk), `first_token`,
`decode_step`s, `preempted` and `swapped_out`, `stalled`, `finish`, under one root.

Except for `first_token`, the children of a completion follow one another without gaps from arrival
to end: each begins at the measured moment at which the previous one ended. Knows facts of steps,
but no engine and no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from quire.core.facts import Fact, Loss, Wait
from quire.core.stats import FinishedRequestStats
from quire.observability.traces.decode_runs import MAX_SPANS, DecodeRun, Mark, Stretch
from quire.observability.traces.spans import (
    Alike,
    Attributes,
    Event,
    RemoteParent,
    Span,
    SpanId,
    child_of,
    new_span_id,
    new_trace_id,
)

StepIds = Callable[[int], SpanId | None]
"""Returns the id of a step's span, if that is exported."""


@dataclass(slots=True)
class Phase:
    """One span of a completion in the making."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    step: int = 0
    """The step whose work it is; 0: none."""


class CompletionTrace:
    """What happened to one completion, in order of time.

    Args:
        index: Which of the request's `n`.
        arrival: When the frontend took it in.
    """

    def __init__(self, index: int, arrival: float) -> None:
        self.index = index
        self.arrival = arrival
        self.ended: FinishedRequestStats | None = None
        """What the frontend reported about its end."""
        self.forward_seconds = self.execute_seconds = 0.0
        """Seconds that the steps it was part of spent in the model and in the worker; with detailed
        traces."""
        self.core_done = False
        """Whether the core is done with it."""
        self._phases: list[Phase | DecodeRun] = []
        self._open = Phase("queue_wait", arrival, arrival)
        self._is_open = True
        self._mark = arrival
        self._computed = self._target = 0
        self._decoding = False
        self._sampled_at: float | None = None

    # ---- what happens ------------------------------------------------------------------------

    def queued(self, fact: Fact) -> None:
        """The core has queued it. The second time, this is a new core that took it over."""
        self._target = fact.a + fact.b
        if self._is_open:
            self._open.events.append(Event("queued", fact.time, {"quire.prompt_tokens": fact.a}))
            return
        self._open_phase(Phase("recovered", self._mark, fact.time, {"quire.tokens_kept": fact.b}))

    def waits(self, fact: Fact) -> None:
        """It is at the head of the queue and cannot be admitted, or waits for its grammar."""
        if self._is_open:
            about: Attributes = {"quire.reason": wait_name(fact.reason)}
            if fact.a:
                about |= {"quire.needed": fact.a, "quire.available": fact.b}
            self._open.events.append(Event("waits", fact.time, about))

    def admitted(self, fact: Fact) -> None:
        """It is admitted and runs from this step on."""
        self._open.end = fact.time
        self._open.attributes |= {"quire.step": fact.step, "quire.cached_tokens": fact.b}
        self._close_phase(fact.time)
        self._computed = fact.b
        # If all but the last token have KV (swapped in, or found in the prefix cache), nothing is
        # recomputed, and the next step decodes.
        self._decoding = self._sampled_at is not None and fact.b >= self._target - 1

    def worked(self, mark: Mark, count: int, right: int = 0, kept: bool = True) -> None:
        """A step computed `count` of its tokens.

        Args:
            mark: The step.
            count: Tokens scheduled.
            right: Number of draft tokens that were accepted.
            kept: Whether the result counts. It does not if the request failed in this step.
        """
        # A step samples one token, and each draft token that was right makes it one more.
        new = 1 + right if kept else 0
        if self._decoding:
            self._run().add(mark, new)
            self._target += new
        else:
            self._chunk(mark, count, new)
        self._mark = mark.end

    def _chunk(self, mark: Mark, count: int, new: int) -> None:
        """Part of a prompt, or of what has to be computed again."""
        about: Attributes = {"quire.tokens": count, "quire.batch.requests": mark.requests}
        about["quire.computed_before"] = self._computed
        if self._sampled_at is not None:
            about["quire.recomputed"] = True
        self._phases.append(Phase("prefill", self._mark, mark.end, about, step=mark.step))
        self._computed += count
        if new and self._computed >= self._target:
            self._decoding = True
            self._target += new
            if self._sampled_at is None:
                self._sampled_at = mark.end

    def stalled(self, step: int, end: float, reason: int) -> None:
        """It is running, but a step computed nothing for it."""
        last = self._phases[-1] if self._phases else None
        if isinstance(last, Phase) and last.name == "stalled":
            last.end = end
            last.attributes["quire.steps"] = int(str(last.attributes["quire.steps"])) + 1
        else:
            about: Attributes = {"quire.reason": wait_name(reason), "quire.steps": 1}
            self._phases.append(Phase("stalled", self._mark, end, about, step=step))
        self._mark = end

    def preempted(self, fact: Fact, winner: str | None) -> None:
        """It was preempted and waits to be admitted again."""
        swapped = bool(fact.c)
        about: Attributes = {
            "quire.reason": Loss(fact.reason).name.lower(),
            "quire.preemption.mode": "swap" if swapped else "recompute",
            "quire.tokens_lost": fact.a,
            "quire.blocks_given_up": fact.b,
        }
        if winner is not None:
            about["quire.preempted_for"] = winner
        phase = Phase("swapped_out" if swapped else "preempted", self._mark, fact.time, about)
        phase.events.append(Event("preempted", fact.time, {"quire.step": fact.step}))
        self._open_phase(phase)

    def _run(self) -> DecodeRun:
        last = self._phases[-1] if self._phases else None
        if isinstance(last, DecodeRun):
            return last
        run = DecodeRun(self._mark)
        self._phases.append(run)
        return run

    def _open_phase(self, phase: Phase) -> None:
        self._open, self._is_open = phase, True
        self._decoding = False

    def _close_phase(self, time: float) -> None:
        if self._is_open:
            self._phases.append(self._open)
            self._is_open = False
        self._mark = time

    # ---- as spans ----------------------------------------------------------------------------

    def spans(self, parent: SpanId, end: float, mode: str, step_ids: StepIds) -> Iterator[Span]:
        """All spans under `parent`, in order of time.

        Args:
            parent: The root, or the span of this completion.
            end: When the frontend considered it ended; later work is left out.
            mode: How decode steps are shown; see `DecodeRun.stretches`.
            step_ids: For the links to steps.
        """
        self._settle(end)
        room = MAX_SPANS
        for phase in self._phases:
            if isinstance(phase, Phase):
                yield self._span(phase, parent, step_ids)
                if phase.name == "prefill" and phase.end == self._sampled_at:
                    yield self._first_token(parent, phase.end)
            else:
                for span in self._decode(phase, parent, mode, max(room, 1), step_ids):
                    room -= 1
                    yield span
        yield self._finish(parent, end)

    def _settle(self, end: float) -> None:
        """Close the open span, and drop what was computed after the end."""
        if self._is_open:
            self._open.end = end
            self._close_phase(end)
        for phase in self._phases:
            if isinstance(phase, DecodeRun):
                phase.cut(end)
        self._phases = [phase for phase in self._phases if _is_kept(phase, end)]

    def _span(self, phase: Phase, parent: SpanId, step_ids: StepIds) -> Span:
        link = step_ids(phase.step) if phase.step else None
        if phase.step:
            phase.attributes["quire.step"] = phase.step
        return Span(
            phase.name,
            child_of(parent),
            parent,
            phase.start,
            phase.end,
            phase.attributes,
            [link] if link else [],
            phase.events,
        )

    def _first_token(self, parent: SpanId, sampled: float) -> Span:
        """The time from the end of the step that sampled the token until the frontend has it."""
        told = self.ended.first_token_ts if self.ended else 0.0
        about: Attributes = {}
        if told:
            about["gen_ai.latency.time_to_first_token"] = told - self.arrival
        return Span("first_token", child_of(parent), parent, sampled, max(sampled, told), about)

    def _decode(
        self, run: DecodeRun, parent: SpanId, mode: str, room: int, step_ids: StepIds
    ) -> Iterator[Span]:
        for part in run.stretches(mode, room):
            last = part.last
            if part.count == 1:
                yield _token(part, parent, step_ids)
                continue
            about: Attributes = {
                "quire.step": part.first.step,
                "quire.last_step": last.step,
                "quire.steps": part.count,
                "quire.tokens": part.tokens,
                "quire.batch.requests": last.requests,
                "quire.mean_seconds": (last.end - part.start) / part.count,
                "quire.longest_seconds": part.longest,
            }
            yield Span("decode_steps", child_of(parent), parent, part.start, last.end, about)

    def _finish(self, parent: SpanId, end: float) -> Span:
        last = self._phases[-1].end if self._phases else self.arrival
        about: Attributes = {}
        if self.ended:
            about["gen_ai.response.finish_reasons"] = (self.ended.finish_reason,)
            about["gen_ai.usage.output_tokens"] = self.ended.num_generation_tokens
        return Span("finish", child_of(parent), parent, last, max(last, end), about)


def _token(part: Stretch, parent: SpanId, step_ids: StepIds) -> Span:
    """The span of one decode step."""
    mark = part.last
    # All requests of a step have the same attributes and link, so they are made (and encoded) once.
    alike = mark.alike
    if alike is None:
        about: Attributes = {"quire.step": mark.step, "quire.batch.requests": mark.requests}
        link = step_ids(mark.step)
        alike = mark.alike = Alike(about | {"quire.tokens": 1}, (link,) if link else ())
    own = _SLOW if part.slow else _NOTHING
    if part.tokens == 1:
        return Span("decode_step", child_of(parent), parent, part.start, mark.end, own, alike=alike)
    # Drafts were accepted, or the request failed, so the number of tokens is this request's own and
    # the attributes shared by the step's spans do not fit.
    own = own | alike.attributes | {"quire.tokens": part.tokens}
    return Span("decode_step", child_of(parent), parent, part.start, mark.end, own, alike.links)


_NOTHING: Final[Attributes] = {}
_SLOW: Final[Attributes] = {"quire.slow": True}
"""Shared by many spans, so it must not be changed."""


def _is_kept(phase: Phase | DecodeRun, end: float) -> bool:
    return len(phase) > 0 if isinstance(phase, DecodeRun) else phase.end <= end


class RequestTrace:
    """One request of a caller: the root, and its completions.

    Args:
        external_id: The id the caller knows.
        arrival: When the frontend took it in.
        attributes: Of the root.
        parent: The caller's span.
    """

    def __init__(
        self,
        external_id: str,
        arrival: float,
        attributes: Attributes,
        parent: RemoteParent | None = None,
    ) -> None:
        self.external_id = external_id
        self.arrival = arrival
        self.attributes = attributes
        self.completions: dict[str, CompletionTrace] = {}
        """By internal id."""
        self.ended_at: float | None = None
        self.error: tuple[str, str] | None = None
        """Type and text, if something other than its completions ended it."""
        self._parent = parent
        trace_id = parent.id.trace_id if parent else new_trace_id()
        self.id = SpanId(trace_id, new_span_id())

    def spans(self, mode: str, step_ids: StepIds) -> Iterator[Span]:
        """The root and everything under it."""
        assert self.ended_at is not None, "it has not ended"
        yield self._root(self.ended_at)
        for completion in self.completions.values():
            parent, ended = self.id, completion.ended
            end = ended.finished_ts if ended else self.ended_at
            if len(self.completions) > 1:
                about = {"quire.completion.index": completion.index, **outcome(ended)}
                about |= _in_the_model([completion])
                span = Span("completion", child_of(self.id), self.id, self.arrival, end, about)
                parent = span.id
                yield span
            yield from completion.spans(parent, end, mode, step_ids)

    def _root(self, end: float) -> Span:
        ended = [c.ended for c in self.completions.values() if c.ended]
        about = dict(self.attributes)
        if ended:
            about |= outcome(ended[0])
            about |= _totals(ended, self.arrival, end)
        about |= _in_the_model(self.completions.values())
        error = self.error
        if error is None and any(e.finish_reason == "error" for e in ended):
            error = ("StepFailed", "the engine failed on this request")
        if error is not None:
            about["error.type"] = error[0]
        return Span(
            "llm_request",
            self.id,
            self._parent.id if self._parent else None,
            self.arrival,
            end,
            about,
            is_server=True,
            error=error[1] if error else None,
            tracestate=self._parent.tracestate if self._parent else "",
        )


def outcome(ended: FinishedRequestStats | None) -> Attributes:
    """How one completion ended, under the names that vLLM and OpenTelemetry use."""
    if ended is None:
        return {}
    return {
        "gen_ai.latency.e2e": ended.e2e_time,
        "gen_ai.latency.time_in_queue": ended.queue_time,
        "gen_ai.latency.time_in_model_prefill": ended.prefill_time,
        "gen_ai.latency.time_in_model_decode": ended.decode_time,
        "gen_ai.latency.time_in_model_inference": ended.inference_time,
        "quire.cached_tokens": ended.num_cached_tokens,
        "quire.preemptions": ended.num_preemptions,
    }


def _totals(ended: list[FinishedRequestStats], arrival: float, end: float) -> Attributes:
    """Totals over all completions; the prompt counts once."""
    generated, prompt = sum(e.num_generation_tokens for e in ended), ended[0].num_prompt_tokens
    firsts = [e.first_token_ts for e in ended if e.first_token_ts]
    about: Attributes = {
        "gen_ai.latency.e2e": end - arrival,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.num_sequences": len(ended),
        "gen_ai.response.finish_reasons": tuple(e.finish_reason for e in ended),
        "quire.preemptions": sum(e.num_preemptions for e in ended),
    }
    if firsts:
        about["gen_ai.latency.time_to_first_token"] = min(firsts) - arrival
    return about


def _in_the_model(completions: Collection[CompletionTrace]) -> Attributes:
    """What detailed traces measure, under vLLM's names. Completions of one request share steps, so
    the longest time counts and not the sum."""
    forward = max((c.forward_seconds for c in completions), default=0.0)
    execute = max((c.execute_seconds for c in completions), default=0.0)
    seconds = {
        "gen_ai.latency.time_in_model_forward": forward,
        "gen_ai.latency.time_in_model_execute": execute,
    }
    return {name: value for name, value in seconds.items() if value}


def wait_name(reason: int) -> str:
    """`budget`, `blocks`, `max_num_seqs`, ..."""
    return Wait(reason).name.lower() if reason in set(Wait) else "unknown"
