"""From core outputs to what callers get: text, stop strings, log-probabilities, timings.

Holds one record for each active request and one for each of its completions, and nothing once a
request has ended. Knows nothing of how outputs reach their callers, of scheduling, or of the core
beyond its `EngineCoreOutput`s. Where a stop string matched, it returns the ids that the core must
end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.core.stats import FinishedRequestStats, IterationStats
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.prompt_logprobs import PromptLogprobs, candidates, pack
from quire.engine.messages import EngineCoreRequest
from quire.errors import NOT_A_NUMBER, InvalidRequest
from quire.outputs import (
    CompletionOutput,
    FinishReason,
    Pooled,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from quire.params import RequestOutputKind
from quire.tokenizer import IncrementalDetokenizer, Tokenizer
from quire.utils.signals import pass_on_signals
from quire.utils.timing import Clock

logger = logging.getLogger(__name__)

UNPROCESSED: Final = "the output of this request could not be processed; see the server's log"
"""The error of a request whose text, log-probabilities or timings raised."""


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of processing one batch of core outputs."""

    request_outputs: list[RequestOutput]
    """At most one per request, in the order in which the core named them."""
    aborts: list[str]
    """Internal ids that the core must end: a stop string matched."""
    iteration: IterationStats
    deltas: list[Delta] = field(default_factory=list)
    """If the caller takes them: outputs that have nothing to say but some text, in the same order.
    They are not among `request_outputs`."""


class Delta(msgspec.Struct, eq=False, gc=False):
    """New tokens of a request that streams one completion: nearly all outputs of a server are no
    more than that, and it costs a small part of a `RequestOutput`."""

    request_id: str
    text: str
    token_ids: list[int]
    _completion: _Completion

    def full(self) -> RequestOutput:
        """The same as any other output. To be called before the next step is processed, as it tells
        the times that are known then."""
        completion = self._completion
        # A list of its own: outputs that wait for their reader grow, and listeners such as the
        # journal on disk read the core's list later.
        output = CompletionOutput(completion.index, self.text, list(self.token_ids), None, None)
        return _request_output(completion.request, [output])


@dataclass(frozen=True, slots=True)
class ActiveCompletion:
    """A completion that has not ended, for listings."""

    external_id: str
    index: int
    internal_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    seen: bool = True
    """Whether the core has spoken of it yet."""


@dataclass(slots=True, eq=False)
class _Completion:
    """One of a request's `n` completions."""

    # What is read for each token of a stream stands together.
    detokenizer: IncrementalDetokenizer
    core_request: EngineCoreRequest
    request: _Request
    flows: bool = False
    """Whether what comes until its end is tokens of which nothing but the text is wanted, at
    once."""
    last_token_ts: float = 0.0
    delivered: int = 0
    """Tokens that earlier outputs contained."""
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    interval: int = 1
    """Tokens that make an output due."""
    last_delivery: tuple[_Batch | None, int] = (None, 0)
    """With an interval: the batch of the last output, and `delivered` before it."""
    seen: bool = False
    """Whether the core has told when it was scheduled."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    num_cached_tokens: int = 0
    num_promoted_tokens: int = 0
    num_preemptions: int = 0
    prompt_pieces: list[bytes | None] | None = None
    """Of its prompt log-probabilities, what has come of a list that is sent in pieces."""

    @property
    def internal_id(self) -> str:
        """What the core calls it."""
        return self.core_request.request_id

    @property
    def index(self) -> int:
        """Its place among the request's completions."""
        return self.core_request.index

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far."""
        return len(self.detokenizer.token_ids)


@dataclass(slots=True, eq=False)
class _Request:
    """One active request."""

    processed: ProcessedInput
    completions: list[_Completion]
    metrics: RequestMetrics
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    prompt_logprobs_delivered: bool = False
    scored: Pooled | None = None
    scored_delivered: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None
    pooled: Pooled | None = None

    @property
    def is_open(self) -> bool:
        """Whether a completion has not ended. They mostly end in their order, so the last ones tell
        soonest: a thousand may end in one step, and each of them asks."""
        # No generator: it is asked for every token.
        for completion in reversed(self.completions):  # noqa: SIM110
            if completion.finish_reason is None:
                return True
        return False

    @property
    def first(self) -> EngineCoreRequest:
        """What all its completions have in common can be read here."""
        return self.processed.requests[0]


@dataclass(slots=True)
class _Batch:
    """What one call of `process` has gathered."""

    outputs: list[EngineCoreOutput]
    ended: list[_Completion] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    deltas: list[Delta] | None = None
    """Of completions that flow; `None`: the caller does not take them."""
    news: dict[str, list[_Completion]] = field(default_factory=dict)
    """By external id: the other completions that have something new, each once."""

    def add(self, completion: _Completion) -> None:
        touched = self.news.setdefault(completion.request.first.external_id, [])
        if completion not in touched:
            touched.append(completion)


class OutputProcessor:
    """Turns core outputs into `RequestOutput`s; one per frontend.

    `tokenizer` may be `None`: then outputs hold ids and no text. `clock` times aborts; all other
    times are given by the caller. `second_tier` is what statistics call the second KV tier: `host`
    or `disk`. `stream_interval` is the least number of tokens per output of a stream, but for the
    first one and the last. `lazily`: log-probabilities of prompts are a `PromptLogprobs`, and not a
    list.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        clock: Clock,
        second_tier: str = "host",
        stream_interval: int = 1,
        *,
        lazily: bool = False,
    ) -> None:
        self._lazily = lazily
        self._spell = None if tokenizer is None else tokenizer.id_to_text
        self._stream_interval = stream_interval
        self._tokenizer = tokenizer
        self._clock = clock
        self._second_tier = second_tier
        self._requests: dict[str, _Request] = {}
        self._completions: dict[str, _Completion] = {}
        self._stats = IterationStats()
        self._latest = _Batch([])

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_completions(self) -> int:
        """Completions that have not ended."""
        return len(self._completions)

    def check_unused(self, external_id: str) -> None:
        """Refuse a request whose id is taken.

        Raises:
            InvalidRequest: a request of the same id is active.
        """
        if external_id in self._requests:
            raise InvalidRequest(
                f"request_id {external_id!r} is in use by a request that has not ended; "
                "choose another or wait for its end.",
                param="request_id",
            )

    def add(self, processed: ProcessedInput) -> None:
        """Register an admitted request whose id is unused; call it before the core gets it."""
        first = processed.requests[0]
        assert first.external_id not in self._requests, f"{first.external_id} is in use"
        metrics = RequestMetrics(arrival_time=first.arrival_time)
        request = _Request(processed, [], metrics)
        request.completions += [self._completion(request, r) for r in processed.requests]
        completions = {c.internal_id: c for c in request.completions}
        # The request first: whatever interrupts this, `abort` finds all that there is.
        self._requests[first.external_id] = request
        self._completions |= completions

    def process(
        self, outputs: Iterable[EngineCoreOutput], now: float, *, deltas: bool = False
    ) -> ProcessedOutputs:
        """Take in what a step produced; `now` is when it reached the frontend.

        Outputs of ids that are not active (ended by a stop string, aborted) are ignored. `deltas`:
        whether the caller takes those.
        """
        before = self._latest
        batch = self._latest = _Batch(list(outputs), deltas=[] if deltas else None)
        self._part(before.ended)
        known, found = self._completions, batch.deltas
        for output in batch.outputs:
            completion = known.get(output.request_id)
            if completion is None:
                continue
            try:
                if found is not None and completion.flows and _is_tokens(output):
                    self._flow(completion, output, now, batch)
                else:
                    self._take_in(completion, output, now, batch)
            except Exception as error:  # whatever went wrong belongs to this completion alone
                self._contain(error, completion, now, batch)
        delivered = [
            self._deliver_alone(self._requests[i], news, now, batch)
            for i, news in batch.news.items()
        ]
        request_outputs = [output for output in delivered if output is not None]
        for external_id in batch.news:
            self._forget_if_ended(external_id)
        return ProcessedOutputs(
            request_outputs, batch.aborts, self.take_stats(), batch.deltas or []
        )

    def rewind(self, num_tokens: Mapping[str, int]) -> None:
        """Undo the last `process`, however far it got, because its step has not happened. Text,
        log-probabilities and state are functions of the tokens, so what it touched is made again
        from the tokens before it.

        Args:
            num_tokens: By internal id, of what the core still works on: tokens before that step.
        """
        touched = {c.internal_id: c for c in self._latest.ended}
        touched |= self._completions
        requests: dict[str, _Request] = {}
        for output in self._latest.outputs:
            completion = touched.get(output.request_id)
            if completion is not None and output.request_id in num_tokens:
                self._rewind(completion, num_tokens[output.request_id])
                requests[completion.request.first.external_id] = completion.request
        for external_id, request in requests.items():
            _rewind_request(request)
            self._requests[external_id] = request
        self._stats = IterationStats()

    def _rewind(self, completion: _Completion, num_tokens: int) -> None:
        fresh = self._completion(completion.request, completion.core_request)
        known, delivered = completion.detokenizer.token_ids, num_tokens
        kind = completion.request.processed.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY:
            delivered = 0
        elif completion.interval > 1:
            batch, before = completion.last_delivery
            delivered = before if batch is self._latest else completion.delivered
        fresh.detokenizer.update(known[:delivered])
        if kind is RequestOutputKind.DELTA:
            fresh.detokenizer.take(finished=False, delta=True)
        fresh.detokenizer.update(known[delivered:num_tokens])
        completion.delivered = delivered
        if completion.logprobs is not None:
            del completion.logprobs[num_tokens:]
            completion.cumulative_logprob = 0.0
            for position in completion.logprobs:
                # The first is the sampled one.
                completion.cumulative_logprob += next(iter(position.values())).logprob
        completion.detokenizer = fresh.detokenizer
        completion.finish_reason = completion.stop_reason = None
        completion.seen &= num_tokens > 0
        completion.flows = False
        self._completions[completion.internal_id] = completion

    def internal_ids(self, external_id: str) -> list[str]:
        """The completions of a request that have not ended; none if the id is unknown."""
        request = self._requests.get(external_id)
        completions = request.completions if request else []
        return [c.internal_id for c in completions if c.finish_reason is None]

    def active(self) -> Iterator[ActiveCompletion]:
        """All completions that have not ended, oldest first."""
        for completion in self._completions.values():
            first = completion.request.first
            yield ActiveCompletion(
                first.external_id,
                completion.index,
                completion.internal_id,
                first.arrival_time,
                len(first.prompt_token_ids),
                completion.num_tokens,
                completion.seen,
            )

    def tokens(self) -> dict[str, list[int]]:
        """Output so far of each completion that has not ended, by internal id."""
        return {i: c.detokenizer.token_ids for i, c in self._completions.items()}

    def request_of(self, internal_id: str) -> EngineCoreRequest | None:
        """What a completion that has not ended was asked for."""
        completion = self._completions.get(internal_id)
        return completion.request.first if completion else None

    def abort(self, external_id: str) -> tuple[list[str], RequestOutput | None]:
        """End a request from outside: its internal ids that the core still works on, and its last
        output, with `finish_reason` "abort" where a completion had not ended.

        An unknown or ended id gives `([], None)`. The end is counted with the next statistics.
        """
        request = self._requests.get(external_id)
        if request is None:
            return [], None
        now = self._clock.now()
        aborted = [c for c in request.completions if c.finish_reason is None]
        for completion in aborted:
            self._end(completion, str(FinishReason.ABORT), None, now)
        output = self._deliver_alone(request, aborted, now, _Batch([]))
        self._forget_if_ended(external_id)
        return [c.internal_id for c in aborted], output

    def take_stats(self) -> IterationStats:
        """Statistics gathered since the last call; `process` calls it, so this is for aborts
        while the core is idle."""
        stats, self._stats = self._stats, IterationStats()
        return stats

    def check_integrity(self) -> None:
        """Check that the two tables agree and that nothing of an ended request is left.

        Raises:
            AssertionError: they do not; a bug in this module.
        """
        completions = [c for r in self._requests.values() for c in r.completions]
        running = {c.internal_id for c in completions if c.finish_reason is None}
        assert set(self._completions) == running, "known completions are not the running ones"
        for external_id, request in self._requests.items():
            assert request.is_open, f"{external_id} ended, but is still known"

    def _completion(self, request: _Request, core_request: EngineCoreRequest) -> _Completion:
        params = core_request.sampling_params
        scored = params.num_logprobs is not None
        return _Completion(
            request=request,
            core_request=core_request,
            detokenizer=IncrementalDetokenizer(
                self._tokenizer, params, core_request.prompt_token_ids
            ),
            logprobs=[] if scored else None,
            cumulative_logprob=0.0 if scored else None,
            interval=max(params.stream_interval or 1, self._stream_interval),
        )

    def _contain(
        self, error: Exception, completion: _Completion, now: float, batch: _Batch
    ) -> None:
        """An output could not be taken in: its completion ends, and no other."""
        pass_on_signals(error)
        logger.error(
            "output of request %s could not be processed", completion.internal_id, exc_info=error
        )
        if completion.finish_reason is None:
            self._fail(completion, now, batch)
        batch.add(completion)

    def _fail(self, completion: _Completion, now: float, batch: _Batch) -> None:
        """End a completion whose output cannot be processed, here and in the core."""
        completion.request.error = UNPROCESSED
        batch.aborts.append(completion.internal_id)
        try:
            self._end(completion, str(FinishReason.ERROR), None, now)
        except Exception as error:
            pass_on_signals(error)
            # Statistics are what `_end` does last.
            logger.exception("the end of request %s is not counted", completion.internal_id)

    def _deliver_alone(
        self, request: _Request, news: list[_Completion], now: float, batch: _Batch
    ) -> RequestOutput | None:
        """A request's next output. If that fails, the request ends, and no other."""
        try:
            return self._deliver(request, news)
        except Exception as error:
            pass_on_signals(error)
            logger.exception("no output could be made for %s", request.first.external_id)
        for completion in request.completions:
            if completion.finish_reason is None:
                self._fail(completion, now, batch)
        return _last_words(request)

    def _take_in(
        self, completion: _Completion, output: EngineCoreOutput, now: float, batch: _Batch
    ) -> None:
        self._take_in_rare(completion, output, now)
        stop = self._append_tokens(completion, output, now)
        self._take_in_end(completion, output, stop, now, batch)
        batch.add(completion)

    def _flow(
        self, completion: _Completion, output: EngineCoreOutput, now: float, batch: _Batch
    ) -> None:
        """`_take_in` of tokens that make a `Delta`. It does as little as can be, and touches few
        objects: a server does it for nearly every token."""
        tokens, detokenizer = output.new_token_ids, completion.detokenizer
        if detokenizer.can_flow:
            text = detokenizer.flow(tokens)
            stats = self._stats
            stats.num_generation_tokens += len(tokens)
            stats.inter_token_latency.append(now - completion.last_token_ts)
            completion.last_token_ts = now
        else:
            stop = self._append_tokens(completion, output, now)
            if stop is not None:
                self._take_in_end(completion, output, stop, now, batch)
                batch.add(completion)
                return
            text = detokenizer.take(finished=False, delta=True)
        completion.delivered += len(tokens)
        assert batch.deltas is not None, "whoever takes no deltas has nothing that flows"
        batch.deltas.append(Delta(completion.core_request.external_id, text, tokens, completion))

    def _take_in_end(
        self,
        completion: _Completion,
        output: EngineCoreOutput,
        stop: str | None,
        now: float,
        batch: _Batch,
    ) -> None:
        """End a completion if an output or a stop string ends it."""
        if stop is not None:
            self._end(completion, str(FinishReason.STOP), stop, now)
            if output.finish_reason is None:
                batch.aborts.append(completion.internal_id)
        elif output.finish_reason is not None:
            self._end(completion, str(output.finish_reason), output.stop_reason, now)

    def _take_in_rare(self, completion: _Completion, output: EngineCoreOutput, now: float) -> None:
        """Everything that an output can hold beside tokens and an end."""
        request = completion.request
        self._note_scheduling(completion, output)
        if output.new_prompt_logprobs is not None and request.prompt_logprobs is None:
            packed = [None if p is None else pack(p) for p in output.new_prompt_logprobs]
            scores = _join_pieces(completion, packed, output.prompt_logprobs_start)
            if scores is not None:
                found = PromptLogprobs(scores, self._spell)
                request.prompt_logprobs = found if self._lazily else list(found)
        if output.scored is not None:
            request.scored = output.scored
        if output.error is not None:
            request.error = output.error
        if output.pooled is not None:
            request.pooled = output.pooled
            self._time_prompt(completion, now)

    def _note_scheduling(self, completion: _Completion, output: EngineCoreOutput) -> None:
        """Note when it was queued and scheduled, once: after a replay into a new core these are
        still the times of the first."""
        if not completion.seen:
            completion.seen = True
            completion.queued_ts = output.queued_ts
            completion.scheduled_ts = output.scheduled_ts
            completion.num_cached_tokens = output.num_cached_tokens
            completion.num_promoted_tokens = output.num_promoted_tokens
        request, metrics = completion.request, completion.request.metrics
        if request.num_cached_tokens is None:
            request.num_cached_tokens = output.num_cached_tokens
            metrics.queued_ts, metrics.scheduled_ts = output.queued_ts, output.scheduled_ts
        if output.num_preemptions:
            completion.num_preemptions = max(completion.num_preemptions, output.num_preemptions)
            metrics.num_preemptions = sum(c.num_preemptions for c in request.completions)

    def _append_tokens(
        self, completion: _Completion, output: EngineCoreOutput, now: float
    ) -> str | None:
        """Text, log-probabilities and timings of new tokens; the stop string they hit, if any."""
        detokenizer = completion.detokenizer
        before = len(detokenizer.token_ids)
        stop = detokenizer.update(output.new_token_ids, output.finish_reason)
        kept = len(detokenizer.token_ids) - before
        if kept:
            self._time_tokens(completion, kept, now, first=not before)
        if completion.logprobs is not None:
            self._append_logprobs(completion, (output.new_logprobs or [])[:kept])
        return stop

    def _time_tokens(self, completion: _Completion, count: int, now: float, first: bool) -> None:
        """One sample per output event: to the first token, or since the last event."""
        stats, metrics = self._stats, completion.request.metrics
        stats.num_generation_tokens += count
        if first:
            self._time_prompt(completion, now)
        else:
            stats.inter_token_latency.append(now - completion.last_token_ts)
        if not metrics.num_generation_tokens:
            metrics.first_token_ts = now
        completion.last_token_ts = metrics.last_token_ts = now
        metrics.num_generation_tokens += count

    def _time_prompt(self, completion: _Completion, now: float) -> None:
        """The prompt has its result: a first token, or what was pooled."""
        shared, stats = completion.request.first, self._stats
        completion.first_token_ts = completion.last_token_ts = now
        stats.time_to_first_token.append(now - shared.arrival_time)
        stats.num_prompt_tokens += len(shared.prompt_token_ids)
        stats.num_cached_tokens += completion.num_cached_tokens
        if completion.num_promoted_tokens:
            before = stats.promoted_tokens.get(self._second_tier, 0)
            promoted = before + completion.num_promoted_tokens
            stats.promoted_tokens = {self._second_tier: promoted}

    def _append_logprobs(self, completion: _Completion, new: list[TokenLogprobs]) -> None:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        named = len(completion.core_request.sampling_params.logprob_token_ids or ())
        for position in new:
            completion.logprobs.append(candidates(position, self._spell, named))
            completion.cumulative_logprob += position.logprobs[0]

    def _end(
        self, completion: _Completion, reason: str, stop_reason: int | str | None, now: float
    ) -> None:
        # The order matters: an end that an exception interrupts can be made again. For the same
        # reason there is no counter of open completions, which could be decremented twice.
        self._latest.ended.append(completion)
        self._completions.pop(completion.internal_id, None)
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        request = completion.request
        if not request.is_open:
            request.metrics.finished_ts = now
        self._stats.finished.append(_finished_stats(completion, now))

    def _forget_if_ended(self, external_id: str) -> None:
        if not self._requests[external_id].is_open:
            del self._requests[external_id]

    def _part(self, ended: Iterable[_Completion]) -> None:
        """Separate requests that have ended from their completions, now that no `rewind` can bring
        them back. Both point to each other, and every request waits while the garbage collector
        looks for such circles."""
        for completion in ended:
            request = completion.request
            if self._requests.get(request.first.external_id) is not request:
                request.completions = []

    def _deliver(self, request: _Request, news: list[_Completion]) -> RequestOutput | None:
        """The request's next output, if its kind wants one now."""
        kind = request.processed.params.output_kind
        ended = not request.is_open
        if kind is RequestOutputKind.FINAL_ONLY and not ended:
            return None
        delta = kind is RequestOutputKind.DELTA
        scores = request.prompt_logprobs
        fresh_scores = scores is not None and not request.prompt_logprobs_delivered
        shown = [c for c in news if _has_news(c)]
        if not (ended or fresh_scores or shown):
            return None
        if not delta:
            shown = request.completions
        elif len(shown) > 1:
            shown.sort(key=lambda c: c.index)
        if delta and not fresh_scores:
            scores = None
        request.prompt_logprobs_delivered |= fresh_scores
        scored = None if delta and request.scored_delivered else request.scored
        request.scored_delivered |= scored is not None
        outputs = [_completion_output(c, delta, self._latest) for c in shown]
        if delta and len(request.completions) == 1 and shown:
            shown[0].flows = shown[0].interval == 1 and shown[0].logprobs is None
        return _request_output(request, outputs, ended, scores, scored)


def _is_tokens(output: EngineCoreOutput) -> bool:
    """Whether it holds tokens and nothing else that its reader or the statistics should know."""
    return (
        output.finish_reason is None
        and not output.num_preemptions
        and output.error is None
        and output.pooled is None
        and output.new_prompt_logprobs is None
        and output.scored is None
        and bool(output.new_token_ids)
    )


def _request_output(
    request: _Request,
    outputs: list[CompletionOutput],
    finished: bool = False,
    scores: Sequence[PositionLogprobs | None] | None = None,
    scored: Pooled | None = None,
) -> RequestOutput:
    first = request.first
    return RequestOutput(
        request_id=first.external_id,
        prompt=request.processed.prompt_text,
        prompt_token_ids=first.prompt_token_ids,
        outputs=outputs,
        finished=finished,
        prompt_logprobs=scores,
        scored=scored,
        metrics=_snapshot(request),
        num_cached_tokens=request.num_cached_tokens or 0,
        seed=request.processed.seed,
        error=request.error,
        pooled=request.pooled,
    )


def _last_words(request: _Request) -> RequestOutput:
    """The end of a request of which no proper output can be made: what is known without computing
    anything. Its tokens so far have been delivered, or the caller wanted them with the end only."""
    return RequestOutput(
        request_id=request.first.external_id,
        prompt=request.processed.prompt_text,
        prompt_token_ids=request.first.prompt_token_ids,
        outputs=[
            CompletionOutput(
                index=c.index,
                text="",
                token_ids=[],
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=str(FinishReason.ERROR),
            )
            for c in request.completions
        ],
        finished=True,
        seed=request.processed.seed,
        error=UNPROCESSED,
    )


def _rewind_request(request: _Request) -> None:
    """What its completions have in common follows from them again."""
    request.error = request.pooled = None
    metrics = request.metrics
    metrics.finished_ts = 0.0
    metrics.num_generation_tokens = sum(c.num_tokens for c in request.completions)
    if not metrics.num_generation_tokens:
        request.prompt_logprobs, request.prompt_logprobs_delivered = None, False
        request.scored, request.scored_delivered = None, False
        request.num_cached_tokens = None
        metrics.first_token_ts = metrics.last_token_ts = 0.0


def _join_pieces(
    completion: _Completion, new: list[bytes | None], start: int | None
) -> list[bytes | None] | None:
    """The prompt log-probabilities that an output brings or completes; `None` if there are more to
    come. A core that replaces another sends all of them again, from the first."""
    if start is None:
        return new
    pieces = completion.prompt_pieces = [*(completion.prompt_pieces or [])[:start], *new]
    assert len(pieces) == start + len(new), "a piece of the prompt's log-probabilities is missing"
    if len(pieces) < len(completion.core_request.prompt_token_ids):
        return None
    completion.prompt_pieces = None
    return pieces


def _has_news(completion: _Completion) -> bool:
    """Whether an output is due: for the first token, each interval, and the end."""
    undelivered = completion.num_tokens - completion.delivered
    if undelivered < completion.interval and completion.delivered:
        return completion.finish_reason is not None
    return undelivered > 0 or completion.finish_reason is not None


def _completion_output(completion: _Completion, delta: bool, batch: _Batch) -> CompletionOutput:
    """The completion as its caller sees it: all of it, or what no earlier delta contained."""
    detokenizer = completion.detokenizer
    start = completion.delivered if delta else 0
    if completion.interval > 1:
        completion.last_delivery = batch, completion.delivered
    completion.delivered = completion.num_tokens
    logprobs = completion.logprobs
    return CompletionOutput(
        index=completion.index,
        text=detokenizer.take(finished=completion.finish_reason is not None, delta=delta),
        token_ids=detokenizer.token_ids[start:],
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if logprobs is None else logprobs[start:],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def _finished_stats(completion: _Completion, now: float) -> FinishedRequestStats:
    """Times of phases that were never reached are zero."""
    request, params = completion.request, completion.request.processed.params
    scheduled, first_token = completion.scheduled_ts, completion.first_token_ts
    return FinishedRequestStats(
        finish_reason=completion.finish_reason or "",
        e2e_time=_span(request.first.arrival_time, now),
        queue_time=_span(completion.queued_ts, scheduled) if scheduled else 0.0,
        prefill_time=_span(scheduled, first_token) if first_token else 0.0,
        decode_time=_span(first_token, completion.last_token_ts),
        inference_time=_span(scheduled, completion.last_token_ts) if first_token else 0.0,
        num_prompt_tokens=len(request.first.prompt_token_ids),
        num_generation_tokens=completion.num_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_preemptions=completion.num_preemptions,
        n=params.n,
        max_tokens=params.max_tokens,
        request_id=completion.internal_id,
        corrupted=request.error == NOT_A_NUMBER,
        longest=None if request.is_open else max(c.num_tokens for c in request.completions),
        finished_ts=now,
        first_token_ts=first_token,
    )


def _snapshot(request: _Request) -> RequestMetrics:
    """A copy for one output; field by field, as it is made for every one of them."""
    now = request.metrics
    if len(request.completions) == 1 and (num_tokens := request.completions[0].num_tokens):
        # Of tokens that flow, nobody notes this each time.
        now.num_generation_tokens = num_tokens
        now.last_token_ts = request.completions[0].last_token_ts
    return RequestMetrics(
        now.arrival_time,
        now.queued_ts,
        now.scheduled_ts,
        now.first_token_ts,
        now.last_token_ts,
        now.finished_ts,
        now.num_generation_tokens,
        now.num_preemptions,
    )


def _span(start: float, end: float) -> float:
    return max(0.0, end - start)
