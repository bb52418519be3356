"""vLLM's `AsyncLLM` (formerly `AsyncLLMEngine`) on top of quire's.

vLLM's is created with a plain call, while quire's must be started in an event loop. So this one
starts its engine with the first request, in the event loop of that request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from quire.compat.engine_args import EngineArgs
from quire.config import EngineConfig
from quire.config.locate import located
from quire.engine.async_llm import AsyncLLM as Engine
from quire.engine.foreign import ABSENT_OF_ASYNC_LLM, check_request_options
from quire.engine.frontend.prompts import PromptType
from quire.errors import EngineDead, NotAvailable
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.params import PoolingParams, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.absent import absent


@absent(ABSENT_OF_ASYNC_LLM)
class AsyncLLM:
    """An engine in a process of its own, for callers on one event loop.

    Raises:
        StartupError: the configuration or the model folder is bad.
    """

    def __init__(self, config: EngineConfig) -> None:
        config = located(config)
        config.resolve(config.model.read_shape())
        self._config = config
        self._engine: Engine | None = None
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: object = None,
    ) -> AsyncLLM:
        """An engine with these options.

        Raises:
            StartupError: an option is bad.
            NotAvailable: `stat_loggers` are given.
        """
        return cls.from_vllm_config(engine_args.create_engine_config(), stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls, vllm_config: EngineConfig, *_: object, stat_loggers: object = None, **__: object
    ) -> AsyncLLM:
        """An engine with this configuration, as `create_engine_config()` gives it."""
        if stat_loggers:
            raise NotAvailable("stat_loggers are not available: read /metrics or the stat line.")
        return cls(vllm_config)

    async def _ready(self) -> Engine:
        """The engine; the first call starts it."""
        async with self._lock:
            if self._closing is not None:
                raise EngineDead("the engine was shut down")
            if self._engine is None:
                self._engine = await Engine.start(self._config)
            await self._engine.wait_ready()
            return self._engine

    # ---- requests ----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request; leaving the iteration early aborts the request.

        Raises:
            RequestError: it is invalid; nothing was queued.
        """
        check_request_options(
            prompt_text=prompt_text,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        engine = await self._ready()
        outputs = engine.generate(
            prompt, sampling_params, request_id, priority=priority, trace_headers=trace_headers
        )
        async with aclosing(outputs):  # whoever leaves this generator leaves that one as well
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: object = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The output of a pooling model for one prompt.

        Raises:
            RequestError: it is invalid; nothing was queued.
        """
        check_request_options(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            reasoning_ended=reasoning_ended,
        )
        engine = await self._ready()
        outputs = engine.encode(prompt, pooling_params, request_id, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their streams get a last output with `finish_reason` "abort"."""
        if self._engine is not None:
            for one in [request_id] if isinstance(request_id, str) else list(request_id):
                await self._engine.abort(one)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request is left.

        Raises:
            TimeoutError: some are, after that many seconds.
        """
        async with asyncio.timeout(drain_timeout):
            while self.get_num_unfinished_requests():
                await asyncio.sleep(0.05)

    # ---- facts and control -------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._engine is not None:
            return self._engine.tokenizer
        model = self._config.model
        return Tokenizer.from_folder(model.tokenizer_folder, model.chat_template)

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's section, with `max_model_len` settled."""
        return self._config.resolve(self._config.model.read_shape())[0].model

    @property
    def is_running(self) -> bool:
        """Whether it accepts requests."""
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether it was shut down or died."""
        return self._closing is not None or self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine died."""
        return self._engine is not None and self._engine.state == "dead"

    @property
    def dead_error(self) -> Exception:
        """The exception to raise to callers of a dead engine."""
        return EngineDead("the engine has stopped")

    async def check_health(self) -> None:
        """Raise if the engine has stopped or makes no progress.

        Raises:
            EngineDead: with the reason.
        """
        await (await self._ready()).check_health()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """`generate`, or what a pooling model is made for."""
        engine = await self._ready()
        return ("generate",) if engine.pooler is None else (engine.pooler.task, "encode")

    def get_num_unfinished_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return 0 if self._engine is None else self._engine.num_unfinished

    async def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise if the engine accepts no requests.

        Raises:
            EngineDead: it has stopped.
        """
        await self._ready()

    async def is_tracing_enabled(self) -> bool:
        """Whether traces are sent anywhere."""
        return self._config.observability.otlp_traces_endpoint is not None

    async def is_sleeping(self) -> bool:
        """Always false: the engine cannot sleep."""
        return False

    async def is_paused(self) -> bool:
        """Always false: generation cannot be paused."""
        return False

    async def list_loras(self) -> set[int]:
        """Always empty: adapters are merged into their models."""
        return set()

    async def do_log_stats(self) -> None:
        """Let the stat line check whether it is due."""
        if self._engine is not None:
            self._engine.frontend.sinks.tick()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False while requests run.

        Raises:
            NotAvailable: running requests are to be restarted.
        """
        if reset_running_requests:
            raise NotAvailable("reset_running_requests is not available: wait, or abort them.")
        return await (await self._ready()).reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        """Forget cached images: there are none."""

    async def reset_encoder_cache(self) -> None:
        """Forget cached images: there are none."""

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start the profiler in the core's process."""
        await (await self._ready()).start_profile()

    async def stop_profile(self) -> None:
        """Stop the profiler and write its trace."""
        await (await self._ready()).stop_profile()

    def shutdown(self, timeout: float | None = None) -> None:
        """End all streams and the engine's process. The object cannot be used afterwards."""
        if self._engine is None or self._closing is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # Its loop is gone, and the socket with it: the core ends by itself.
            self._engine = None
            return
        self._closing = loop.create_task(self._engine.shutdown())
