"""An engine of the shape the server needs: answers every request with the same letters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.core.admission import LIVE_LIMITS
from quire.core.kv.answer import PrefixAnswer
from quire.core.stats import StepStats
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.questions import Question
from quire.engine.frontend.stream import StreamBuffers
from quire.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    QuireError,
    TooManyRequests,
)
from quire.observability.recorder.ring import StepRecords
from quire.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from quire.params import RequestOutputKind, SamplingParams
from quire.tokenizer.pairs import EncodedPair

BOS, EOS = 256, 257
VOCAB_SIZE = 300


class FakeTokenizer:
    """One token per byte."""

    longest_token = 1
    chat_template = None
    special_tokens: Mapping[str, int] = {}
    leading_spaces = 0
    all_special_ids = frozenset({BOS})
    added_ids = frozenset({BOS})

    def token_text(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join(bytes([i]).decode("latin-1") if i < 256 else special for i in ids)

    def encode_pair(self, first: str, second: str, *limits: int | None) -> EncodedPair:
        ids = self.encode(first)
        return EncodedPair(ids + self.encode(second), len(ids))

    def id_to_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("latin-1") if token_id < 256 else "<s>"

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if any(message["content"] == "refuse me" for message in messages):
            raise InvalidRequest("the template refuses these messages.", param="messages")
        turns = [f"<{message['role']}>{message['content']}" for message in messages]
        names = [tool["function"]["name"] for tool in tools or ()]
        head = f"[tools:{','.join(names)}]" if names else ""
        extra = "".join(f"[{key}={value}]" for key, value in sorted(kwargs.items()))
        return head + extra + "".join(turns) + ("<assistant>" if add_generation_prompt else "")


class FakeStream:
    """Outputs of one request."""

    def __init__(
        self, engine: FakeEngine, request_id: str, seed: int, params: SamplingParams
    ) -> None:
        self.request_id, self.seed = request_id, seed
        self.checked = CheckedParams(params)
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self.done = False
        self._engine = engine

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.done:
            raise StopAsyncIteration
        item = await self.queue.get()
        if isinstance(item, Exception):
            self.done = True
            raise item
        self.done = item.finished
        return item

    async def aclose(self) -> None:
        if not self.done:
            self.done = True
            await self._engine.abort(self.request_id)


class FakeEngine:
    """Answers with `reply`, one letter per step."""

    def __init__(
        self,
        reply: str = "Hey",
        names: Sequence[str] = ("quire-demo", "org/small"),
        policy: str = "fcfs",
    ) -> None:
        model = ModelConfig(served_model_name=list(names), max_model_len=512)
        self.config = EngineConfig(model=model, scheduler=SchedulerConfig(scheduling_policy=policy))
        self.tokenizer = FakeTokenizer()
        self.templates = None
        self.max_model_len = 512
        self.vocab_size = VOCAB_SIZE
        self.pooler = None
        self.info: dict[str, Any] = {"num_blocks": 7, "device": "fake"}
        self.last_step: StepStats | None = None
        self.times: RequestMetrics | None = None
        """The timings of each request."""
        self.default_params = SamplingParams(temperature=0.7)
        self.num_slow_readers = 0
        self.buffers = StreamBuffers(None, self._count_slow_reader)
        self.state = "ready"
        self.progress = ("ready", 1, 1)
        self.error: QuireError | None = None
        self.reply = reply
        self.delay = 0.0
        self.is_stalled = False
        self.refuse: QuireError | None = None
        self.is_full = False
        """Raised by `submit`."""
        self.break_after: int | None = None
        """Step at which the request fails: with `death`, or else with finish reason "error"."""
        self.death: Exception | None = None
        self.hang = asyncio.Event()
        """Steps wait for this; set from the start."""
        self.hang.set()
        self.submitted: list[tuple[Any, SamplingParams, str, int, str | None]] = []
        self.clients: list[str] = []
        """Parallel to `submitted`."""
        self.aborted: list[str] = []
        self.max_waits: list[float | None] = []
        self.continued: list[bool] = []
        self.changes: list[tuple[Any, dict[str, Any]]] = []
        self.was_shut_down = False
        self.salts: list[str | None] = []
        """What prefixes were explained with."""
        self.records = StepRecords(64)
        self._tasks: dict[str, tuple[FakeStream, asyncio.Task[None], SamplingParams]] = {}

    def _count_slow_reader(self) -> None:
        self.num_slow_readers += 1

    def check_room(self, meter: object = None) -> None:
        if self.is_full:
            raise TooManyRequests("The queue is full.", retry_after=2.5)

    def check_fits(self, meter: object, count: int) -> None:
        pass

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        trace_headers: dict[str, str] | None = None,
        max_wait: float | None = None,
        continues: bool = False,
        entry: object = None,
    ) -> FakeStream:
        self.max_waits.append(max_wait)
        self.continued.append(continues)
        self.trace_headers = trace_headers
        params = params.params if isinstance(params, CheckedParams) else params
        if self.refuse is not None:
            raise self.refuse
        if request_id in self._tasks:
            raise InvalidRequest("request_id is in use.", param="request_id")
        if not prompt:
            raise InvalidRequest("prompt must not be empty.", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt)} tokens; the limit is {self.max_model_len - 1}."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, name)) is not None and not 0 <= value <= 20:
                raise InvalidRequest(f"{name} must be at most 20, got {value}.", param=name)
        self.clients.append(client)
        self.submitted.append((prompt, params, request_id, priority, cache_salt))
        seed = 1000 + len(self.submitted) if params.seed is None else params.seed
        stream = FakeStream(self, request_id, seed, params)
        task = asyncio.ensure_future(self._run(stream, prompt, params))
        self._tasks[request_id] = (stream, task, params)
        return stream

    async def _run(self, stream: FakeStream, prompt: list[int], params: SamplingParams) -> None:
        limit = min(params.max_tokens or 10**9, len(self.reply))
        reason = "length" if limit < len(self.reply) else "stop"
        delta = params.output_kind is RequestOutputKind.DELTA
        for step in range(limit):
            await self.hang.wait()
            await asyncio.sleep(self.delay)
            last = step == limit - 1
            if step == self.break_after:
                del self._tasks[stream.request_id]
                if self.death is not None:
                    stream.queue.put_nowait(self.death)
                else:
                    stream.queue.put_nowait(
                        self.output(stream, prompt, params, (0, 0), "error", "secret trace")
                    )
                return
            if delta or last:
                first = step if delta else 0
                ended = reason if last else None
                if last:
                    del self._tasks[stream.request_id]
                scored = step == 0 or not delta
                stream.queue.put_nowait(
                    self.output(stream, prompt, params, (first, step + 1), ended, scored=scored)
                )

    def output(
        self,
        stream: FakeStream,
        prompt: list[int],
        params: SamplingParams,
        span: tuple[int, int],
        reason: str | None,
        error: str | None = None,
        scored: bool = True,
    ) -> RequestOutput:
        text = self.reply[slice(*span)]
        ids = list(text.encode())
        top = params.num_logprobs
        logprobs = None if top is None else [_position(i, top) for i in ids]
        scores: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None and scored:
            # Every second prompt token is not the likeliest.
            positions = [
                _position(i, params.prompt_logprobs, likeliest=k % 2 == 1)
                for k, i in enumerate(prompt)
            ]
            scores = [None, *positions[1:]]
        outputs = [CompletionOutput(i, text, ids, None, logprobs, reason) for i in range(params.n)]
        return RequestOutput(
            stream.request_id,
            None,
            prompt,
            outputs,
            finished=reason is not None,
            prompt_logprobs=scores,
            metrics=self.times,
            num_cached_tokens=2,
            seed=stream.seed,
            error=error,
        )

    async def abort(self, request_id: str, error: QuireError | None = None) -> None:
        found = self._tasks.pop(request_id, None)
        if found is None:
            return
        stream, task, params = found
        task.cancel()
        self.aborted.append(request_id)
        last = self.output(stream, [1], params, (0, 0), "abort")
        stream.queue.put_nowait(error or last)

    async def call(self, verb: str, /, **args: Any) -> Any:
        return await getattr(self, verb)(**args)

    async def set_limits(
        self, priorities: Mapping[str, int] | None = None, **limits: Any
    ) -> dict[str, Any]:
        if self.refuse is not None:
            raise self.refuse
        self.changes.append((priorities, limits))
        scheduler = dataclasses.replace(self.config.scheduler, **limits)
        self.config = dataclasses.replace(self.config, scheduler=scheduler)
        return {name: getattr(scheduler, name) for name in LIVE_LIMITS}

    async def reset_prefix_cache(self) -> bool:
        return not self._tasks

    async def start_profile(self) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.profiling:
            raise Conflict("the profiler is already running; stop it first")
        self.profiling = True

    async def stop_profile(self) -> None:
        if not self.profiling:
            raise Conflict("the profiler is not running; start it first")
        self.profiling = False

    profiling = False

    async def explain_prefix(
        self, prompt_token_ids: list[int], cache_salt: str | None = None
    ) -> dict[str, Any]:
        self.salts.append(cache_salt)
        answer = PrefixAnswer(len(prompt_token_ids), 0, 0, 1, 7, prompt_token_ids[-1])
        return dataclasses.asdict(answer)

    def question(self) -> Question:
        return Question(self.records, [], 1000.0, self.config)

    async def explain(self, request_id: str) -> list[Any]:
        return self.question().explain(request_id)

    def metrics_text(self) -> bytes:
        return b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"

    async def wait_ready(self) -> None:
        self.state = "ready"

    async def shutdown(self) -> None:
        self.was_shut_down = True
        for stream, task, _ in self._tasks.values():
            task.cancel()
            stream.queue.put_nowait(EngineDead("the engine was shut down"))
        self._tasks.clear()
        self.state = "dead"


def _position(token_id: int, top: int, likeliest: bool = True) -> PositionLogprobs:
    """The token, then the `top` likeliest; ids next to it serve as the others."""
    own, other = (-0.1, -2.5) if likeliest else (-2.5, -0.1)
    position = {token_id: Logprob(own, 1 if likeliest else 2, _text(token_id))}
    if top and not likeliest:
        position[token_id + 1] = Logprob(other, 1, _text(token_id + 1))
    for k in range(1, top if likeliest else 0):
        position[token_id + k] = Logprob(other - k, k + 1, _text(token_id + k))
    return position


def _text(token_id: int) -> str:
    return FakeTokenizer().id_to_text(token_id)
