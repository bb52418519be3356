"""`LLM`: the offline engine. Runs in the caller's process, so a profiler around
`llm.generate` sees the work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from quire.bounds import show
from quire.config import EngineConfig
from quire.config.model import EMBEDDED_MODEL
from quire.config.neutral import beyond_defaults, taken
from quire.engine.foreign import ABSENT_OF_LLM, check_request_options
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.input_gate import text_gate
from quire.engine.frontend.prompts import PromptType
from quire.engine.llm_beams import BeamVerb
from quire.engine.llm_engine import LLMEngine
from quire.engine.llm_part import as_prompts, one_for_each
from quire.engine.llm_pooling import PoolingVerbs
from quire.engine.progress import GenerateProgress
from quire.errors import InvalidRequest
from quire.logger import get_logger
from quire.outputs import RequestOutput
from quire.params import PoolingParams, RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.absent import absent

if TYPE_CHECKING:
    from quire.observability.explain.explanation import Explanation

logger = get_logger(__name__)

Message = dict[str, Any]
"""A chat message: `{"role": ..., "content": ...}`."""

_OFFLINE_DEFAULTS = {"max_num_batched_tokens": 4096, "max_num_seqs": 256, "disable_log_stats": True}
"""Offline work wants throughput and quiet; the sections' own defaults are a server's."""


@absent(ABSENT_OF_LLM)
class LLM(BeamVerb, PoolingVerbs):
    """Generates text for lists of prompts, or embeddings, classes and scores.

    Args:
        model: Folder of a model in Hugging Face format; the embedded model unless given.
        **options: Any engine option, named like its flag with underscores, e.g.
            `max_num_batched_tokens=1024`.

    Raises:
        StartupError: an option is unknown or bad, or the model cannot be loaded.
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **options: Any) -> None:
        options = {name: value for name, value in options.items() if value is not None}
        if line := taken(beyond_defaults(options)):
            logger.info(line)
        options = {**_OFFLINE_DEFAULTS, **options}
        self.llm_engine = LLMEngine(EngineConfig.from_options(model=model, **options))
        self._counter = itertools.count()
        self._awaited: set[str] = set()
        self._ended: dict[str, RequestOutput] = {}
        # ids of the requests that callers wait for, and the outputs of those that have ended
        self._abandoned: list[str] = []
        # requests whose caller was interrupted

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """From vLLM's `EngineArgs`, as scripts under `quire run` have them.

        Raises:
            StartupError: as the constructor.
        """
        return cls(**vars(engine_args))

    # ---- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: One prompt or a list: text, token ids, `{"prompt": ...}` or
                `{"prompt_token_ids": ...}`.
            sampling_params: For all prompts, or one for each; the model's defaults unless given.
            use_tqdm: Show progress with tokens per second; or what makes a bar, like `tqdm`.
            priority: For all prompts, or one for each, for the `priority` policy; lower is more
                urgent. Other policies do not read it, which the log tells once.
            lora_request, tokenization_kwargs, mm_processor_kwargs: Only `None`, for scripts that
                pass it.

        Returns:
            One output per prompt, in the order given.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing is generated for any.
        """
        check_request_options(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        items = as_prompts(prompts)
        params = self._params_for(len(items), sampling_params)
        if isinstance(priority, int):
            priority = [priority] * len(items)
        if priority is not None and not isinstance(priority, Sequence):
            raise InvalidRequest(
                f"priority must be an integer or a list of them, got {show(priority)}",
                param="priority",
            )
        if priority is not None and len(priority) != len(items):
            raise InvalidRequest(
                f"priority has {len(priority)} entries for {len(items)} prompts", param="priority"
            )
        if any(isinstance(value, int) and value for value in priority or ()):
            self._tell_unread_priority()
        return self._submit_all(items, params, use_tqdm, priority)

    def _tell_unread_priority(self) -> None:
        policy = self.llm_engine.frontend.live.now.scheduler.scheduling_policy
        if policy != "priority":
            logger.warning_once(
                "generate(priority=) has no effect under the scheduling policy %s; give "
                "LLM(scheduling_policy='priority')",
                policy,
            )

    def _submit_all(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[CheckedParams | PoolingParams],
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run requests to their end, in the order given."""
        ids: list[str] = []
        self._drop_abandoned()
        try:
            for index, prompt in enumerate(prompts):
                ids.append(request_id := str(next(self._counter)))
                self._awaited.add(request_id)
                self.llm_engine.add_request(
                    request_id, prompt, params[index], priority=priority[index] if priority else 0
                )
            return self._run_engine(ids, use_tqdm)
        except BaseException:
            # A bad prompt in the list or a Ctrl-C: leave nothing behind in the engine.
            self._abandoned += ids
            self._drop_abandoned()
            raise

    def _drop_abandoned(self) -> None:
        """End requests that nobody waits for. If this is interrupted, the next call goes on."""
        with self.llm_engine.lock:
            while self._abandoned:
                request_id = self._abandoned[-1]
                self._awaited.discard(request_id)
                self._ended.pop(request_id, None)
                self.llm_engine.abort_request([request_id])
                self._abandoned.pop()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template.

        What has the same name in `generate` means the same.

        Raises:
            RequestError: the model has no chat template, or a conversation is invalid.
        """
        check_request_options(chat_template_content_format=chat_template_content_format)
        conversations = _as_conversations(messages)
        tokenizer = self.get_tokenizer()
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                list(conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(cast(PromptType, {"prompt_token_ids": ids, "prompt": text}))
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[CheckedParams]:
        """Checked parameters for each prompt: once for all that share a record."""
        if given is None:
            given = self.get_default_sampling_params()
        params = one_for_each("sampling_params", SamplingParams, given, count)
        distinct = {id(p): p for p in params}
        check = text_gate(self.llm_engine.frontend.input).check
        # Only the end matters here: text is decoded once.
        final = {"output_kind": RequestOutputKind.FINAL_ONLY}
        checked = {key: check(p.replace(**final)) for key, p in distinct.items()}
        return [checked[id(p)] for p in params]

    def _run_engine(
        self, ids: list[str], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Step until these requests have ended. Threads that call at the same time take turns, and
        each step works for all of them, so their requests share the batches."""
        missing = set(ids)
        with GenerateProgress(len(ids), use_tqdm) as progress:
            while missing:
                with self.llm_engine.lock:
                    # Another thread's step may have brought the rest.
                    if not self._ended.keys() & missing:
                        self._step()
                    ended = self._ended.keys() & missing
                missing -= ended
                for request_id in ended:
                    progress.finish(self._ended[request_id])
        self._awaited.difference_update(ids)
        self._settle()
        return [self._ended.pop(request_id) for request_id in ids]

    def _settle(self) -> None:
        """When all requests have ended, run one more step: it tells the worker, which then keeps
        nothing of them."""
        with self.llm_engine.lock:
            if not self._awaited and self.llm_engine.has_unfinished_requests:
                self._step()

    def _step(self) -> None:
        assert self.llm_engine.has_unfinished_requests, "somebody waits for nothing"
        for output in self.llm_engine.step():
            if output.finished and output.request_id in self._awaited:
                self._ended[output.request_id] = output

    # ---- around it ---------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters from the model's generation_config.json."""
        return self.llm_engine.frontend.input.default_params()

    def get_metrics(self) -> list[Any]:
        """Current values of all metrics, as Counter, Gauge and Histogram records.

        Raises:
            ConfigError: statistics are off (`disable_log_stats=True`, the default here).
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; False while another thread's requests run.

        Raises:
            NotAvailable: they do, and are to be restarted.
        """
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def explain_prefix(
        self, prompt: str | list[int], cache_salt: str | None = None
    ) -> dict[str, Any]:
        """Why a prompt would, or would not, find its prefix in the cache.

        Returns:
            `num_tokens`, `num_cached_tokens`, `block_index` (the first block not found whole),
            and, if something nearly matches there, `first_difference` (a position) with
            `cached_token_id` and `given_token_id`.

        Raises:
            InvalidRequest: the prompt is empty, not of this model or too long, or the salt is bad.
        """
        ids = self.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        args = {"prompt_token_ids": ids, "cache_salt": cache_salt}
        return dict(self.llm_engine.call("explain_prefix", args))

    def explain(self, request_id: str) -> list[Explanation]:
        """Where the time of a request went, as causes that add up to its latency; `print()` shows
        them as text.

        Args:
            request_id: `RequestOutput.request_id`, or as much of its beginning as no other has.

        Returns:
            One for each of the request's `n` completions.

        Raises:
            NotFound: the id is not in the records (`record_steps` keeps more).
            InvalidRequest: several ids begin so, or `record_steps` is 0.
        """
        return self.llm_engine.explain(request_id)

    def timeline(self, steps: int = 1000) -> dict[str, Any]:
        """The last steps as a Chrome trace: `json.dump` it and open it in ui.perfetto.dev.

        Raises:
            InvalidRequest: `steps` is not positive, or `record_steps` is 0.
        """
        return self.llm_engine.question().timeline(steps)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start a torch profiler over the engine's work.

        Raises:
            ConfigError: `QUIRE_TORCH_PROFILER_DIR` is not set.
            InvalidRequest: a name or a part of the steps is asked for.
        """
        self.llm_engine.start_profile(
            profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
        )

    def stop_profile(self) -> None:
        """Stop the profiler and write its trace into `QUIRE_TORCH_PROFILER_DIR`."""
        self.llm_engine.stop_profile()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Processes that run the model: one."""
        return 1

    def reset_mm_cache(self) -> None:
        """Forget cached images: there are none."""

    def shutdown(self) -> None:
        """Let go of the model. The object cannot be used afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.shutdown()


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    given: Any = messages
    if isinstance(given, (list, tuple)):
        found = [given] if given and isinstance(given[0], dict) else list(given)
        if all(isinstance(conversation, (list, tuple)) for conversation in found):
            return found
    raise InvalidRequest(
        "messages must be a conversation (a list of messages) or a list of conversations, got "
        f"{show(given)}",
        param="messages",
    )
