"""The engine requests behind one HTTP request: submit them all, end them all.

Knows neither what is asked of the model nor what becomes of the outputs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.seeds import prompt_seed
from quire.errors import (
    GRAMMAR,
    POISON,
    PROCESSOR_FAILED,
    PROCESSOR_REFUSED,
    GrammarFailed,
    InvalidRequest,
    PoisonRequest,
    ProcessorFailed,
    ProcessorRefused,
    StepFailed,
)
from quire.logger import get_logger
from quire.outputs import RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.serving.auth import Tenant
from quire.serving.deadline import Deadline
from quire.serving.durable import Durable
from quire.serving.engine_protocol import EngineClient, OutputStream
from quire.serving.errors import CutShort
from quire.serving.field_names import AS_THE_ENGINE, FieldNames
from quire.serving.server_state import ServerState

logger = get_logger(__name__)

BREATHE_AFTER: Final = 0.005
"""Seconds of submitting prompts after which others get their turn on the event loop."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What one HTTP request asks of the engine."""

    request_ids: Sequence[str]
    """Made unique on submission if a request of the same id is active."""
    prompts: Sequence[list[int]]
    """Token ids, parallel to `request_ids`."""
    params: SamplingParams | Sequence[SamplingParams] | Sequence[PoolingParams]
    """One for all prompts, or one each. Each prompt but the first gets a seed of its own."""
    priority: int = 0
    cache_salt: str | None = None
    """As given."""
    client: Tenant = Tenant()
    trace_headers: dict[str, str] | None = None
    """The caller's trace context."""
    deadline: Deadline | None = None
    """When the reply must be complete."""
    names: FieldNames = AS_THE_ENGINE
    """What the caller calls the fields that errors name."""
    continues: bool = False
    """It is a further step of what was accepted before: the limits of the queue do not count."""


@asynccontextmanager
async def submitted(
    state: ServerState,
    engine: EngineClient,
    submission: Submission,
    durable: Durable | None = None,
) -> AsyncIterator[list[OutputStream]]:
    """The streams of all prompts; on exit, those that have not finished are aborted. If the reply
    is `durable`, the journal has them before this begins.

    Raises:
        RequestError: the engine refuses a prompt; those before it are aborted.
        DeadlineExceeded: the deadline passed meanwhile. Streams raise it as well.
        DeadlineUnreachable: it will pass before the turn of a prompt.
    """
    if state.closed:
        raise CutShort(state.seconds_until_restart())
    request_ids = [state.unused_id(wanted) for wanted in submission.request_ids]
    streams: list[OutputStream] = []
    timer: asyncio.TimerHandle | None = None
    state.in_flight += 1
    state.active_ids.update(request_ids)
    try:
        if durable is not None:
            durable.expect(request_ids)
        with submission.names.told():
            await _submit(engine, submission, request_ids, streams, durable)
        if durable is not None:
            # The client is told the stream's id next. From then on it must outlive this process.
            await durable.journal.written()
        if submission.deadline is None:
            yield streams
        else:
            timer, watched = submission.deadline.watch(engine, request_ids, streams)
            yield watched
    finally:
        if timer is not None:
            timer.cancel()
        state.in_flight -= 1
        state.active_ids.difference_update(request_ids)
        for stream in streams:
            await stream.aclose()


async def _submit(
    engine: EngineClient,
    submission: Submission,
    request_ids: Sequence[str],
    streams: list[OutputStream],
    durable: Durable | None,
) -> None:
    """Add a stream for every prompt."""
    entry, asked = submission.client.entry, submission.params
    accepted = durable is not None and durable.resumption(0) is not None
    if entry is not None and not submission.continues and not accepted:
        n = asked.n if isinstance(asked, SamplingParams) else 1
        engine.check_fits(entry.meter, n * len(request_ids))
    begun_at = time.monotonic()
    for request_id, prompt in zip(request_ids, submission.prompts, strict=True):
        params = _next_params(submission.params, streams)
        if durable is not None and (begun := durable.resumption(len(streams))) is not None:
            streams.append(
                await engine.resume(
                    params,
                    request_id,
                    begun,
                    priority=submission.priority,
                    cache_salt=submission.client.salt(submission.cache_salt),
                    client=submission.client.name,
                    entry=submission.client.entry,
                )
            )
            await asyncio.sleep(0)  # what it brings has been rendered in one go
            continue
        try:
            stream = await engine.submit(
                prompt,
                params,
                request_id,
                priority=submission.priority,
                cache_salt=submission.client.salt(submission.cache_salt),
                client=submission.client.name,
                trace_headers=submission.trace_headers,
                max_wait=None if submission.deadline is None else submission.deadline.left(),
                continues=submission.continues,
                entry=submission.client.entry,
            )
        except ProcessorRefused as error:
            error.param = "vllm_xargs"
            raise
        streams.append(stream)
        if time.monotonic() - begun_at > BREATHE_AFTER:
            await asyncio.sleep(0)
            begun_at = time.monotonic()


def _next_params(
    params: SamplingParams | Sequence[SamplingParams] | Sequence[PoolingParams],
    streams: Sequence[OutputStream],
) -> SamplingParams | PoolingParams | CheckedParams:
    """The parameters of the next prompt.

    Without a seed the engine chooses one for the first prompt. Each of the others gets its own,
    made of that and its place, so that one number in the reply is enough to repeat the whole
    request. Shared parameters are checked with the first prompt alone.
    """
    if isinstance(params, SamplingParams):
        if not streams:
            return params
        return streams[-1].checked.with_seed(prompt_seed(streams[0].seed, len(streams)))
    own = params[len(streams)]
    if not streams or isinstance(own, PoolingParams):
        return own
    return own.replace(seed=prompt_seed(streams[0].seed, len(streams)))


def request_failed(output: RequestOutput) -> StepFailed | InvalidRequest:
    """The error for the caller of a request that the engine failed on; the log gets the cause."""
    error_id = uuid.uuid4().hex[:12]
    logger.error("request %s failed (%s): %s", output.request_id, error_id, output.error)
    if output.error is not None and output.error.startswith(GRAMMAR):
        return GrammarFailed(output.error, param=GRAMMAR)
    told = output.error or ""
    if told.startswith(PROCESSOR_REFUSED):
        return ProcessorRefused(told, param="vllm_xargs")
    if told.startswith(PROCESSOR_FAILED):
        return ProcessorFailed(f"{told}. The log has more under {error_id}.")
    if output.error == POISON:
        return PoisonRequest(
            "The engine ended each time it worked on this request, which was therefore taken out; "
            f"others go on. Sent again, it may end the same way. The log has more under {error_id}."
        )
    return StepFailed(
        "The engine failed on this request; others were not disturbed. "
        f"The log has more under {error_id}."
    )
