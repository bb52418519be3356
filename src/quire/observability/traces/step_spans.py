"""One engine step as spans: `engine_step` with `schedule`, `execute_model` and
`update_from_output` under it.

All lengths are measured. What has a count but no measured time of its own (`allocate_slots`,
`preempt_requests`, `free_blocks`, `update_block_table`) is a span of length 0. `forward` and
`sample` are placed at the end of `execute_model`, because they come last in it. With detailed
traces, there are spans for `worker` and each `layer`, too, at their measured times. Knows
statistics of steps, no engine and no OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from quire.core.facts import Fact, Loss
from quire.core.stats import StepStats
from quire.observability.traces.spans import Attributes, Span, SpanId, child_of

MAX_LINKS: Final = 128
"""Largest number of links of one span: OpenTelemetry's usual limit."""


def step_spans(
    step: StepStats,
    identity: SpanId,
    links: Sequence[SpanId],
    preempted: Sequence[tuple[Fact, str]],
) -> Iterator[Span]:
    """The spans of a step.

    Args:
        step: What was measured.
        identity: Id of `engine_step`.
        links: Roots of the requests in its batch.
        preempted: The preemptions in it, with the id of the request that was preempted.
    """
    start, end = step.start, step.start + step.step_seconds
    yield Span("engine_step", identity, None, start, end, _about(step), list(links[:MAX_LINKS]))
    scheduled = start + step.schedule_seconds
    schedule = Span("schedule", child_of(identity), identity, start, scheduled)
    yield schedule
    yield from _schedule(step, schedule.id, scheduled, preempted)
    executed = max(scheduled, end - step.update_seconds)
    execute = Span("execute_model", child_of(identity), identity, scheduled, executed)
    yield execute
    yield from _execute(step, execute)
    yield Span("update_from_output", child_of(identity), identity, executed, end)


def _execute(step: StepStats, execute: Span) -> Iterator[Span]:
    scheduled, executed = execute.start, execute.end
    if step.worker_seconds:
        about: Attributes = {"quire.swap_seconds": step.swap_seconds}
        end = step.worker_start + step.worker_seconds
        yield Span("worker", child_of(execute.id), execute.id, step.worker_start, end, about)
    sampling = max(scheduled, executed - step.sample_seconds)
    start = max(scheduled, sampling - step.forward_seconds)
    if step.layer_times:  # then its place is known better
        start = min(start, step.layer_times[0][0])
    tokens: Attributes = {"quire.tokens": step.num_scheduled_tokens}
    end = min(sampling, start + step.forward_seconds)
    forward = Span("forward", child_of(execute.id), execute.id, start, end, tokens)
    yield forward
    for index, (began, total, attention, mlp) in enumerate(step.layer_times):
        layer: Attributes = {
            "quire.layer": index,
            "quire.attention_seconds": attention,
            "quire.mlp_seconds": mlp,
        }
        yield Span("layer", child_of(forward.id), forward.id, began, began + total, layer)
    sampled: Attributes = {"quire.tokens": step.num_generation_tokens}
    yield Span("sample", child_of(execute.id), execute.id, sampling, executed, sampled)


def _schedule(
    step: StepStats, parent: SpanId, end: float, preempted: Sequence[tuple[Fact, str]]
) -> Iterator[Span]:
    def moment(name: str, of: SpanId, at: float, about: Attributes) -> Span:
        return Span(name, child_of(of), of, at, at, about)

    yield moment(
        "allocate_slots",
        parent,
        end,
        {
            "quire.blocks.allocated": step.num_blocks_allocated,
            "quire.blocks.evicted": step.num_blocks_evicted,
            "quire.prefix.queried_tokens": step.prefix_queries,
            "quire.prefix.hit_tokens": step.prefix_hits,
        },
    )
    for fact, name in preempted:
        about: Attributes = {
            "quire.request": name,
            "quire.reason": Loss(fact.reason).name.lower(),
            "quire.tokens_lost": fact.a,
        }
        span = moment("preempt_requests", parent, fact.time, about)
        yield span
        yield moment("free_blocks", span.id, fact.time, {"quire.blocks.freed": fact.b})
    requests: Attributes = {"quire.batch.requests": step.num_scheduled_requests}
    yield moment("update_block_table", parent, end, requests)


def _about(step: StepStats) -> Attributes:
    return {
        "quire.step": step.step,
        "quire.requests.running": step.num_running,
        "quire.requests.waiting": step.num_waiting,
        "quire.batch.requests": step.num_scheduled_requests,
        "quire.batch.prefills": step.num_prefills,
        "quire.tokens": step.num_scheduled_tokens,
        "quire.tokens.prompt": step.num_prompt_tokens,
        "quire.tokens.generated": step.num_generation_tokens,
        "quire.preemptions": step.num_preempted,
        "quire.kv_cache_usage": step.kv_cache_usage,
        "quire.blocks.freed": step.num_blocks_freed,
        "quire.drafts": step.num_draft_tokens,
        "quire.drafts.accepted": step.num_accepted_tokens,
    }
