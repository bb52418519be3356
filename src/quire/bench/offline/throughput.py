"""How many requests and tokens per second the engine does when it has everything at once: `quire
bench throughput`.

Text and JSON are those of `vllm bench throughput`. The engine runs in this process, or, with
`async_engine`, as a server has it, in a process of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.bench.offline.drive import Drive, Job
from quire.bench.offline.options import ThroughputOptions
from quire.bench.result import RequestRecord, summary
from quire.params import SamplingParams
from quire.workload.request import WorkloadRequest

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.llm import LLM

Seen = Callable[[int, int], None]


def jobs_of(
    requests: Sequence[WorkloadRequest],
    options: ThroughputOptions,
    render: Callable[[str], list[int]] | None = None,
) -> list[Job]:
    """Requests of a dataset, for the engine.

    Args:
        requests: Of a dataset.
        options: How to run them.
        render: Makes the ids of a chat with one message; without it, prompts go as they are.
    """
    jobs = []
    for request in requests:
        params = SamplingParams(
            n=options.n, temperature=1.0, top_p=1.0, ignore_eos=True,
            max_tokens=request.output_len, detokenize=not options.disable_detokenize,
        )  # fmt: skip
        prompt: Any = request.prompt
        if render is not None:
            prompt = render(prompt)
        jobs.append(Job(prompt, params, request.priority, prompt_len=request.prompt_len))
    return jobs


def run_inline(
    llm: LLM, jobs: Sequence[Job], options: ThroughputOptions, seen: Seen
) -> tuple[list[RequestRecord], float]:
    """All jobs on an engine of this process.

    Returns:
        Records, and seconds from the first hand-over (or, prequeued, the first step) to the end.

    Raises:
        RequestError: a job is invalid.
    """
    if options.profile:
        llm.start_profile()
    driven = Drive(llm.llm_engine, jobs, seen=seen, prequeue=options.prequeue_requests).run()
    if options.profile:
        llm.stop_profile()
    return driven.records, driven.duration


def run_async(
    config: EngineConfig, jobs: Sequence[Job], options: ThroughputOptions, seen: Seen
) -> tuple[list[RequestRecord], float]:
    """All jobs on an engine with a process of its own, each with its own stream.

    Raises:
        QuireError: the engine cannot start, or dies.
    """
    return asyncio.run(_run_async(config, jobs, options, seen))


async def _run_async(
    config: EngineConfig, jobs: Sequence[Job], options: ThroughputOptions, seen: Seen
) -> tuple[list[RequestRecord], float]:
    from quire.engine.async_llm import AsyncLLM

    async with await AsyncLLM.start(config) as engine:
        await engine.wait_ready()
        if options.profile:
            await engine.start_profile()
        start = time.perf_counter()
        done = 0
        seen(done, len(jobs))

        async def one(number: int, job: Job) -> RequestRecord:
            nonlocal done
            record = await _stream(engine, str(number), job)
            done += 1
            seen(done, len(jobs))
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, job)) for i, job in enumerate(jobs)]
        duration = time.perf_counter() - start
        if options.profile:
            await engine.stop_profile()
    return [task.result() for task in tasks], duration


async def _stream(engine: Any, request_id: str, job: Job) -> RequestRecord:
    record = RequestRecord(time.perf_counter(), job.prompt_len)
    prompt = job.prompt if isinstance(job.prompt, str) else {"prompt_token_ids": job.prompt}
    counts: dict[int, int] = {}
    latest = record.start
    async for output in engine.generate(prompt, job.params, request_id, priority=job.priority):
        now = time.perf_counter()
        record.input_len = len(output.prompt_token_ids)
        counts |= {one.index: len(one.token_ids) for one in output.outputs}
        if record.first_token is None:
            record.first_token = now
        else:
            record.itls.append(now - latest)
        latest = now
    record.output_len, record.end = sum(counts.values()), latest
    return record


def throughput_result(records: Sequence[RequestRecord], duration: float) -> dict[str, Any]:
    """The JSON: vLLM's five keys, and the figures of `bench serve` beside them."""
    figures = summary(records, duration)
    total = figures["total_input_tokens"] + figures["total_output_tokens"]
    return {
        "elapsed_time": duration,
        "num_requests": len(records),
        "total_num_tokens": total,
        "requests_per_second": figures["request_throughput"],
        "tokens_per_second": figures["total_token_throughput"],
        **figures,
    }


def throughput_text(result: dict[str, Any]) -> str:
    """The lines of `vllm bench throughput`, and one more if requests failed."""
    lines = [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_throughput']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_input_tokens']}",
        f"Total num output tokens:  {result['total_output_tokens']}",
    ]
    if result["failed"]:
        lines.append(f"Failed requests: {result['failed']} of {result['num_requests']}")
    return "\n".join(lines)
