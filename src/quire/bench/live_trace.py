"""Plays a trace on an engine of this process, in real time: each request is sent when the trace
says, and gets as many tokens. Without HTTP, so that nothing but the engine is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.bench.result import RequestRecord
from quire.engine.async_llm import AsyncLLM
from quire.errors import QuireError
from quire.params import RequestOutputKind, SamplingParams
from quire.sim.sequences import Sequences
from quire.utils.timing import RealClock
from quire.workload.trace import TraceRequest

LEAD = 0.2
"""Seconds before the first request, in which the others are got ready."""


async def play(
    llm: AsyncLLM, requests: Sequence[TraceRequest], sequences: Sequences, name: str
) -> list[RequestRecord]:
    """Play requests.

    Args:
        llm: Ready.
        requests: Of the trace.
        sequences: Their tokens, within the model's vocabulary.
        name: How the ids of the requests begin.

    Returns:
        One record per request, in their order. Time 0 is that of the trace.
    """
    clock = RealClock()
    prompts = [sequences.make(traced)[0] for traced in requests]
    begin = clock.now() + LEAD

    async def one(index: int) -> RequestRecord:
        traced = requests[index]
        await asyncio.sleep(max(0.0, begin + traced.arrival - clock.now()))
        return await timed(llm, traced, prompts[index], f"{name}-{index}", begin)

    return list(await asyncio.gather(*(one(index) for index in range(len(requests)))))


async def timed(
    llm: AsyncLLM, traced: TraceRequest, prompt: list[int], request_id: str, begin: float
) -> RequestRecord:
    """Send one request now and wait for its end.

    Args:
        llm: Ready.
        traced: Which request of a trace it is.
        prompt: Its token ids.
        request_id: Unlike others.
        begin: Time 0 of the record, by `RealClock`.
    """
    clock = RealClock()
    params = SamplingParams(
        max_tokens=max(1, traced.output_len),
        ignore_eos=True,
        detokenize=True,
        output_kind=RequestOutputKind.DELTA,
    )
    record = RequestRecord(clock.now() - begin, traced.prompt_len)
    try:
        last = 0.0
        async for output in llm.generate(prompt, params, request_id, priority=traced.priority):
            now = clock.now() - begin
            if record.first_token is None:
                record.first_token = now
            else:
                record.itls.append(now - last)
            last = now
            record.output_len += len(output.outputs[0].token_ids)
        record.end = last
    except QuireError as error:
        record.error = error.message
    return record
