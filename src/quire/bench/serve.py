"""A run against a server, from options to the result: what `quire bench serve` does.

Steps: find the server's model and its tokenizer, make the requests and their arrivals, wait until
the server is ready and takes them, warm up, load it, compute the result. Prints nothing; a
`RunListener` hears what happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.bench.backends import Asking, Backend, backend_named
from quire.bench.client import QUICK_SECONDS, BenchClient, base_url_of, check_header
from quire.bench.load import NOT_SENT, LoadOutcome, OpenLoopLoad, Patience, ServerWatch
from quire.bench.options import ServeOptions, pairs_of
from quire.bench.result import (
    RequestRecord,
    RunSettings,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summary,
)
from quire.bench.speculation import SpeculationCounters, read_speculation
from quire.bench.target_tokenizer import find_tokenizer_of
from quire.errors import ConfigError, StartupError
from quire.spelling import did_you_mean
from quire.tokenizer.tokenizer import Tokenizer
from quire.workload.arrivals import arrival_times
from quire.workload.datasets import make_requests
from quire.workload.options import DatasetOptions
from quire.workload.request import WorkloadRequest

SELF_TIMED: Final = ("timed_trace",)
TEMPLATED: Final = ("custom", "spec_bench")
RETRY_SECONDS: Final = 0.5
INTERRUPTED: Final = "interrupted"
"""Verdict of a load that was cancelled, by Ctrl-C say."""
_MOST_LISTED: Final = 8
_PASSING: Final = (408, 425, 429)
"""Statuses with which a server refuses now what it may take later."""


@dataclass
class ServeRun:
    """What a run gave."""

    result: dict[str, Any]
    """The JSON, without the lists of every request."""
    outcome: LoadOutcome
    requests: list[WorkloadRequest]
    metrics: list[str]
    percentiles: list[float]
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures should know."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the load was cancelled: then it has only what was answered before."""
        return self.outcome.verdict == INTERRUPTED

    @property
    def exit_code(self) -> int:
        """0 if every request was answered, 130 if the load was interrupted, else 1."""
        if self.is_interrupted:
            return 130
        return int(bool(self.outcome.verdict) or self.result["failed"] > 0)


@dataclass
class _Plan:
    """Everything that is checked before the server is asked."""

    backend: Backend
    metrics: list[str]
    percentiles: list[float]
    slos: dict[str, float]
    headers: dict[str, str]
    metadata: dict[str, str]


class RunListener:
    """Hears what a run does. The methods do nothing here."""

    def note(self, text: str) -> None:
        """Something a reader should know."""

    def begin(self, num_requests: int) -> None:
        """The load begins."""

    def done(self, record: RequestRecord) -> None:
        """A request ended."""

    def end(self) -> None:
        """The load ended."""

    def interrupted(self, run: ServeRun) -> None:
        """The load was cancelled, after some requests had ended. `run_serve` gives nothing then:
        it is cancelled as well, and this is what there is."""


async def run_serve(
    options: ServeOptions,
    dataset: DatasetOptions,
    told: RunListener | None = None,
    requests: list[WorkloadRequest] | None = None,
) -> ServeRun:
    """Run the benchmark, with the dataset's requests or with these.

    Raises:
        ConfigError: an option is wrong, the dataset cannot be used, or the server refuses the test
            request.
        StartupError: the server cannot be reached, or does not serve the model.
        CancelledError: it was cancelled; what was answered until then is told first.
    """
    told = told or RunListener()
    plan = _plan(options)
    client = BenchClient(
        base_url_of(options.url), plan.backend, endpoint=options.endpoint, headers=plan.headers,
        verify=not options.insecure, request_timeout=options.request_timeout,
    )  # fmt: skip
    async with client:
        asking, tokenizer, settings = await _target(client, options, dataset, told)
        if requests is None:
            requests = make_requests(_for_backend(dataset, options), tokenizer)
        _check_bodies(plan.backend, requests, asking)
        if _wants_template(options, dataset):
            apply_template(requests, tokenizer, told)
        if len(requests) != settings.num_prompts:
            settings = dataclasses.replace(settings, num_prompts=len(requests))
        times = _times(options, dataset, requests)
        await _get_ready(client, options, requests[0], asking, told)
        await _warm_up(client, options, requests[0], asking)
        before = await read_speculation(client)
        async with _profiled(client, options), _probed(client, options, asking) as probes:
            outcome = await _load(client, options, requests, times, asking, told)
        after = None if outcome.verdict else await read_speculation(client)
    counted = _count(outcome.records, tokenizer)
    result = _result(plan, settings, outcome, before, after, probes, options)
    notes = [*_notes(tokenizer, counted), *_failures(outcome)]
    run = ServeRun(result, outcome, requests, plan.metrics, plan.percentiles, notes)
    if run.is_interrupted:
        if any(not _is_cut(record) for record in outcome.records):
            told.interrupted(run)
        raise asyncio.CancelledError
    return run


# ---- before the load -----------------------------------------------------------------------------


def _plan(options: ServeOptions) -> _Plan:
    backend = backend_named(options.backend)
    default = "ttft,tpot,itl" if backend.streams else "e2el"
    metrics = parse_metrics(options.percentile_metrics or default)
    slos = parse_goodput(options.goodput)
    if not backend.streams and set(slos) - {"e2el"}:
        raise ConfigError(f"--backend {options.backend} does not stream: --goodput takes e2el only")
    headers = pairs_of("--header", options.header)
    key = options.api_key or _key_of_environment()
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        check_header("--api-key" if value == f"Bearer {key}" else "--header", name, value)
    check_header("--request-id-prefix", "x-request-id", options.request_id_prefix)
    metadata = pairs_of("--metadata", options.metadata)
    percentiles = parse_percentiles(options.metric_percentiles)
    return _Plan(backend, metrics, percentiles, slos, headers, metadata)


def _key_of_environment() -> str | None:
    from quire import envs

    return envs.API_KEY or os.environ.get("OPENAI_API_KEY") or None


async def _target(
    client: BenchClient, options: ServeOptions, dataset: DatasetOptions, told: RunListener
) -> tuple[Asking, Tokenizer | None, RunSettings]:
    """Who is asked for, and with which tokenizer lengths are counted."""
    model, root = await _model(client, options, told)
    found = find_tokenizer_of([options.tokenizer] if options.tokenizer else [options.model, root])
    if options.tokenizer and found is None:
        raise ConfigError(
            f"--tokenizer: there is no tokenizer of {options.tokenizer!r} on this machine: give a "
            "folder with tokenizer.json, or leave it out to count tokens from the server's usage"
        )
    tokenizer, name = found or (None, None)
    ignore_eos = options.ignore_eos
    if ignore_eos is None:
        # Random text ends at random: only so do outputs have the lengths that were asked for.
        ignore_eos = dataset.dataset_name == "random" and client.backend.streams
    extra = dict(options.extra_body)
    if options.chat_template_kwargs:
        extra["chat_template_kwargs"] = options.chat_template_kwargs
    asking = Asking(model, ignore_eos, options.logprobs, options.sampling, extra)
    settings = RunSettings(
        options.model or model, options.backend, options.label, name, dataset.num_prompts,
        options.request_rate, options.burstiness, options.max_concurrency,
    )  # fmt: skip
    return asking, tokenizer, settings


async def _model(
    client: BenchClient, options: ServeOptions, told: RunListener
) -> tuple[str, str | None]:
    """The model's name at the server, and its `root`: what it was loaded from."""
    wanted = options.served_model_name or options.model
    listed = await _listed(client, options.ready_check_timeout_sec)
    if listed is None:
        if wanted is None:
            raise StartupError(
                f"{client.base_url} does not list its models at /v1/models: give --model"
            )
        told.note(f"{client.base_url} does not list its models: {wanted!r} is taken on trust")
        return wanted, None
    if not listed:
        raise StartupError(f"{client.base_url} answers, but lists no model at /v1/models")
    wanted = wanted or next(iter(listed))
    for name in (wanted, *options.lora_modules):
        if name not in listed:
            shown = ", ".join(list(listed)[:_MOST_LISTED])
            hint = did_you_mean(name, listed)
            raise StartupError(
                f"{client.base_url} does not serve {name!r}{hint or '.'} It serves: {shown}"
            )
    return wanted, listed[wanted]


async def _listed(client: BenchClient, patience: float) -> dict[str, str | None] | None:
    """Models by name with their roots; None if the server does not tell."""
    deadline = time.perf_counter() + patience
    while True:
        try:
            left = max(deadline - time.perf_counter(), RETRY_SECONDS)
            within = min(left, QUICK_SECONDS) if patience else QUICK_SECONDS
            status, body = await client.get("/v1/models", within)
            # A server that still loads its model may say so with 503.
            if status < 500 or time.perf_counter() > deadline:
                break
        except StartupError:
            if time.perf_counter() > deadline:
                raise
        await asyncio.sleep(RETRY_SECONDS)
    if status in (401, 403):
        raise StartupError(f"{client.base_url} answers {status} at /v1/models: give --api-key")
    try:
        return {str(entry["id"]): entry.get("root") for entry in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _for_backend(dataset: DatasetOptions, options: ServeOptions) -> DatasetOptions:
    """The dataset that suits the backend where the default does not."""
    if options.backend == "vllm-rerank" and dataset.dataset_name == "random":
        return dataclasses.replace(dataset, dataset_name="random-rerank")
    if dataset.random_batch_size > 1 and backend_named(options.backend).streams:
        raise ConfigError(
            "--random-batch-size is for pooling backends (openai-embeddings, vllm-pooling, "
            f"vllm-rerank), not for {options.backend}"
        )
    return dataset


def _check_bodies(backend: Backend, requests: list[WorkloadRequest], asking: Asking) -> None:
    """Refuse a dataset that the backend cannot ask for, before anything is sent."""
    # A request that is asked several times is one object.
    for request in {id(request): request for request in requests}.values():
        backend.body(request, asking)


def _wants_template(options: ServeOptions, dataset: DatasetOptions) -> bool:
    """Whether prompts are what people wrote, and the route takes them as the model sees them."""
    is_plain = backend_named(options.backend).path == "/v1/completions"
    return is_plain and dataset.dataset_name in TEMPLATED and not dataset.skip_chat_template


def apply_template(
    requests: list[WorkloadRequest], tokenizer: Tokenizer | None, told: RunListener
) -> None:
    """Put prompts into the model's chat template, as `vllm bench serve` does."""
    if tokenizer is None or tokenizer.chat_template is None:
        what = "tokenizer on this machine" if tokenizer is None else "chat template"
        told.note(f"The model has no {what}: prompts are sent as they stand in the file.")
        return
    # A request that is asked several times is one object.
    for request in {id(request): request for request in requests}.values():
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        request.prompt = tokenizer.apply_chat_template(messages)
        request.prompt_len = len(tokenizer.encode(request.prompt))


def _times(
    options: ServeOptions, dataset: DatasetOptions, requests: list[WorkloadRequest]
) -> NDArray[np.float64]:
    """When each request is due. Those of a dataset are sorted by it."""
    self_timed = options.self_timed
    if self_timed is None:
        self_timed = dataset.dataset_name in SELF_TIMED and math.isinf(options.request_rate)
    if not self_timed:
        rng = np.random.default_rng([dataset.seed, 1])  # not the numbers of the dataset again
        return arrival_times(
            len(requests), options.request_rate, rng,
            burstiness=options.burstiness, ramp=options.ramp,
        )  # fmt: skip
    if not math.isinf(options.request_rate) or options.ramp:
        raise ConfigError("--self-timed takes arrivals from the dataset: give no rate and no ramp")
    if any(request.arrival is None for request in requests):
        raise ConfigError(
            f"--self-timed: --dataset-name {dataset.dataset_name} does not tell when requests come"
        )
    requests.sort(key=lambda request: request.arrival or 0.0)
    return np.array([request.arrival for request in requests], dtype=np.float64)


async def _get_ready(
    client: BenchClient,
    options: ServeOptions,
    request: WorkloadRequest,
    asking: Asking,
    told: RunListener,
) -> None:
    patience = options.ready_check_timeout_sec
    if not patience:
        if options.use_beam_search:
            await _try_beams(client, options, request, asking)
        return
    why = "it took a request, and did not end its reply"
    try:
        async with asyncio.timeout(patience):
            while (record := await client.ask(request, asking)).error:
                _check_taken(client, record)
                why = record.error
                await asyncio.sleep(RETRY_SECONDS)
    except TimeoutError:
        raise StartupError(
            f"no answer within {patience:g} s (--ready-check-timeout-sec): {why}"
        ) from None
    told.note("The server is ready.")


async def _try_beams(
    client: BenchClient, options: ServeOptions, request: WorkloadRequest, asking: Asking
) -> None:
    """One request alone: many servers stream no beams, and would refuse each of the load's."""
    # A server that is silent ends the load as well, which says more.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.stall_timeout):
            _check_taken(client, await client.ask(request, asking))


def _check_taken(client: BenchClient, record: RequestRecord) -> None:
    """End the run if the server refuses such a request whenever it comes.

    Raises:
        ConfigError: with what it said.
    """
    if 400 <= record.status < 500 and record.status not in _PASSING:
        raise ConfigError(f"{client.base_url} refuses the test request with {record.error}")


async def _warm_up(
    client: BenchClient, options: ServeOptions, request: WorkloadRequest, asking: Asking
) -> None:
    if not options.num_warmups:
        return
    watch = ServerWatch(_patience(options))
    client.heard = watch.heard

    async def ask(_: int, same: WorkloadRequest) -> RequestRecord:
        return await client.ask(same, asking)

    copies = [request] * options.num_warmups
    due = np.zeros(len(copies))
    run = OpenLoopLoad(copies, due, ask, watch, max_concurrency=options.max_concurrency)
    outcome = await run.run()
    failed = [record.error for record in outcome.records if not record.ok]
    if failed:
        raise StartupError(f"{len(failed)} of {len(copies)} warm-ups failed: {failed[0]}")


# ---- the load ------------------------------------------------------------------------------------


def _patience(options: ServeOptions) -> Patience:
    return Patience(options.stall_timeout, options.unreachable_timeout)


async def _load(
    client: BenchClient,
    options: ServeOptions,
    requests: list[WorkloadRequest],
    times: NDArray[np.float64],
    asking: Asking,
    told: RunListener,
) -> LoadOutcome:
    watch = ServerWatch(_patience(options))
    client.heard = watch.heard
    rng = np.random.default_rng(len(requests))
    models = _adapters(options, len(requests), rng)

    sent: dict[int, RequestRecord] = {}

    async def ask(index: int, request: WorkloadRequest) -> RequestRecord:
        what = dataclasses.replace(asking, model=models[index]) if models else asking
        sent[index] = _cut(time.perf_counter())
        sent[index] = await client.ask(request, what, f"{options.request_id_prefix}{index}")
        return sent[index]

    load = OpenLoopLoad(
        requests, times, ask, watch, max_concurrency=options.max_concurrency, done=told.done
    )
    told.begin(len(requests))
    gc.collect()
    gc.freeze()  # a collection in the middle would look like a slow server
    begin = time.perf_counter()
    try:
        return await load.run()
    except asyncio.CancelledError:
        now = time.perf_counter()
        unsent = (_cut(now, NOT_SENT) for _ in requests)
        records = [sent.get(i, record) for i, record in enumerate(unsent)]
        return LoadOutcome(records, now - begin, INTERRUPTED)
    finally:
        gc.unfreeze()
        told.end()


def _cut(start: float, how: str = "") -> RequestRecord:
    """Of a request that the interruption found without its end."""
    return RequestRecord(start, 0, error=how + INTERRUPTED)


def _is_cut(record: RequestRecord) -> bool:
    return record.error in (INTERRUPTED, NOT_SENT + INTERRUPTED)


def _adapters(options: ServeOptions, num: int, rng: np.random.Generator) -> list[str]:
    names = options.lora_modules
    if not names:
        return []
    if options.lora_assignment == "round-robin":
        return [names[i % len(names)] for i in range(num)]
    return [names[i] for i in rng.integers(0, len(names), num)]


@contextlib.asynccontextmanager
async def _profiled(client: BenchClient, options: ServeOptions) -> AsyncIterator[None]:
    if not options.profile:
        yield
        return
    status, body = await client.post("/start_profile")
    if status != 200:
        said = body.decode("utf-8", "replace")[:200]
        raise StartupError(f"--profile: {client.base_url} answers {status}: {said}")
    try:
        yield
    finally:
        with contextlib.suppress(StartupError):
            await client.post("/stop_profile")


@contextlib.asynccontextmanager
async def _probed(
    client: BenchClient, options: ServeOptions, asking: Asking
) -> AsyncIterator[list[RequestRecord]]:
    """Ask for one token now and then while the load runs; gives the records."""
    records: list[RequestRecord] = []
    if not options.probe_request_rate:
        yield records
        return

    async def probe() -> None:
        small = WorkloadRequest("Hi", 1, 1)
        while True:
            records.append(await client.ask(small, asking))
            await asyncio.sleep(1 / options.probe_request_rate)

    task = asyncio.create_task(probe())
    try:
        yield records
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# ---- after it ------------------------------------------------------------------------------------


def _count(records: list[RequestRecord], tokenizer: Tokenizer | None) -> int:
    """Count the output of requests of which the server did not tell; returns how many."""
    counted = 0
    for record in records:
        if record.ok and record.first_token is not None and not record.output_len:
            counted += 1
            if tokenizer is None:
                record.output_len = 1 + len(record.itls)
            else:
                record.output_len = len(tokenizer.encode(record.text, add_special_tokens=False))
    return counted


def _result(
    plan: _Plan,
    settings: RunSettings,
    outcome: LoadOutcome,
    before: SpeculationCounters | None,
    after: SpeculationCounters | None,
    probes: list[RequestRecord],
    options: ServeOptions,
) -> dict[str, Any]:
    settings = dataclasses.replace(settings, metadata=plan.metadata)
    metrics = [*plan.metrics, *(name for name in ("ttft", "tpot", "itl", "e2el")
                                if name not in plan.metrics)]  # fmt: skip
    figures = summary(
        outcome.records, outcome.duration, percentiles=plan.percentiles, goodput=plan.slos,
        metrics=metrics,
    )  # fmt: skip
    result = settings.to_json() | figures
    if options.ramp is not None:
        result["ramp_up_strategy"] = options.ramp_up_strategy
        result["ramp_up_start_rps"] = options.ramp_up_start_rps
        result["ramp_up_end_rps"] = options.ramp_up_end_rps
    if before is not None and after is not None:
        result["spec_decode"] = after.since(before)
    if probes:
        result["probe"] = _probe_figures(probes)
    if outcome.verdict:
        result["ended_early"] = outcome.verdict
    if outcome.verdict == INTERRUPTED:
        result["interrupted"] = True
    return result


def _probe_figures(probes: list[RequestRecord]) -> Mapping[str, float]:
    found = [record.latency * 1000 for record in probes if record.ok] or [0.0]
    return {
        "completed": sum(record.ok for record in probes),
        "failed": sum(not record.ok for record in probes),
        "median_e2el_ms": float(np.median(found)),
        "p99_e2el_ms": float(np.percentile(found, 99)),
        "max_e2el_ms": max(found),
    }


def _notes(tokenizer: Tokenizer | None, counted: int) -> list[str]:
    notes = []
    if tokenizer is None:
        notes.append(
            "The model's tokenizer is not on this machine: prompts were made of words, and tokens "
            "are those of the server's usage. --tokenizer FOLDER makes prompts of exact lengths."
        )
    if counted:
        how = "as outputs, each of which may hold several" if tokenizer is None else "from the text"
        notes.append(f"The server told no usage for {counted} requests: tokens were counted {how}.")
    return notes


def _failures(outcome: LoadOutcome) -> list[str]:
    kinds: dict[str, int] = {}
    for record in outcome.records:
        if not record.ok:
            kinds[record.error] = kinds.get(record.error, 0) + 1
    most = sorted(kinds.items(), key=lambda item: -item[1])[:_MOST_LISTED]
    told = [f"{count} failed: {error}" for error, count in most]
    if len(kinds) > len(most):
        told.append(f"... and {len(kinds) - len(most)} other errors")
    if outcome.verdict:
        told.append(f"Ended early: {outcome.verdict}.")
    return told
