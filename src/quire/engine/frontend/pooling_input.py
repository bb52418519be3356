"""The gate of pooling models: a prompt and what is wanted of it become one core request.

The rules of `InputProcessor` for prompts hold here, too; no token is generated, so a prompt may
fill the whole context. Knows nothing of HTTP or scheduling.
"""

from __future__ import annotations

from typing import Any

from quire.bounds import read_field
from quire.config import PoolerSpec
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.input_processor import (
    InputProcessor,
    ProcessedInput,
    PromptType,
    _one_salt,
    _refuse,
    check_request_id,
)
from quire.engine.messages import EngineCoreRequest
from quire.errors import ContextLengthExceeded, UnsupportedTask
from quire.params import PoolingParams, RequestOutputKind, SamplingParams

SERVED = {"embed": ("embed", "token_embed"), "classify": ("classify", "score")}
"""What a request may ask, by what the model is made for."""


class PoolingInputProcessor(InputProcessor):
    """Validates and completes requests for one pooling model.

    `pooler` says how it pools; the other arguments are `InputProcessor`'s.
    """

    def __init__(self, *args: Any, pooler: PoolerSpec, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pooler = pooler

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | CheckedParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        client: str = "",
    ) -> ProcessedInput:
        """Admit a request.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
            ContextLengthExceeded: the prompt does not fit the model.
            UnsupportedTask: the model is not made for what is asked.
        """
        check_request_id(request_id)
        if isinstance(params, (SamplingParams, CheckedParams)):
            raise UnsupportedTask(f"{self._name} {self._does}; it generates no text.")
        if not isinstance(params, PoolingParams):
            _refuse("pooling_params", f"must be PoolingParams, got {type(params).__name__}.")
        priority = read_field("priority", priority)
        self._check_task(params)
        text, ids, salt = self._read_pooling_prompt(prompt, params, add_special_tokens)
        salt = _one_salt(salt, cache_salt)
        self._check_prompt_ids(ids)
        self._check_fits(len(ids))
        neutral = self._neutral(params)
        request = EngineCoreRequest(
            request_id=f"{request_id}-{self._next_number() % 2**32:08x}",
            external_id=request_id,
            index=0,
            prompt_token_ids=ids,
            sampling_params=neutral,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=salt,
            client=client,
            pooling_params=params,
        )
        return ProcessedInput([request], text, neutral, 0, CheckedParams(neutral))

    @property
    def _name(self) -> str:
        return self._model.names[0]

    @property
    def _does(self) -> str:
        return "gives embeddings" if self.pooler.task == "embed" else "classifies"

    def _next_number(self) -> int:
        self._admitted += 1
        return self._admitted - 1

    def _check_task(self, params: PoolingParams) -> None:
        served = SERVED[self.pooler.task]
        if params.task is not None and params.task not in served:
            raise UnsupportedTask(
                f"{self._name} {self._does}; task must be one of {', '.join(served)}, got "
                f"{params.task!r}.",
                param="task",
            )
        if params.task == "score" and not self.pooler.is_cross_encoder:
            raise UnsupportedTask(
                f"{self._name} has {self.pooler.size} classes; scoring a pair needs a model with "
                "one.",
                param="task",
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)

    def _check_dimensions(self, wanted: int) -> None:
        pooler = self.pooler
        allowed = pooler.matryoshka_dimensions
        if pooler.task != "embed":
            raise UnsupportedTask("dimensions is for embeddings only.", param="dimensions")
        if wanted == pooler.size:
            return
        if not pooler.matryoshka:
            raise UnsupportedTask(
                f"{self._name} was not made for shorter embeddings: dimensions must be left out "
                f"or {pooler.size}, got {wanted}. If it was, start with --pooler-config "
                "'{\"is_matryoshka\": true}'.",
                param="dimensions",
            )
        if wanted > pooler.size or (allowed and wanted not in allowed):
            rule = f"one of {', '.join(map(str, allowed))}" if allowed else f"1 to {pooler.size}"
            _refuse("dimensions", f"must be {rule}, got {wanted}.")

    def _read_pooling_prompt(
        self, prompt: PromptType, params: PoolingParams, special: bool
    ) -> tuple[str | None, list[int], str | None]:
        """Text, ids and salt, cut as the request wants."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return self._read_prompt(prompt, special)
        keep = self._max_model_len if keep == -1 else keep
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, dict) and "prompt_token_ids" not in prompt:
            text = prompt.get("prompt")
        if isinstance(text, str) and self._tokenizer is not None:
            ids = self._tokenizer.encode_within(text, keep, params.truncation_side, special)
            prompt = {**(prompt if isinstance(prompt, dict) else {}), "prompt_token_ids": ids}
            return self._read_prompt(prompt, special)
        text, ids, salt = self._read_prompt(prompt, special)
        return text, ids[:keep] if params.truncation_side == "right" else ids[-keep:], salt

    def _check_fits(self, count: int) -> None:
        if count > self._max_model_len:
            raise ContextLengthExceeded(
                f"this model takes at most {self._max_model_len} tokens, but the prompt has "
                f"{count}. Shorten it, or let it be cut with truncate_prompt_tokens.",
                param="prompt",
            )
        self._check_room(count, count)

    def _neutral(self, params: PoolingParams) -> SamplingParams:
        """What the scheduler reads of a request's parameters: nothing is sampled."""
        skip = params.skip_reading_prefix_cache
        if not self.pooler.keeps_prefixes or params.task == "token_embed":
            skip = True  # hidden states of cached tokens are not kept
        return SamplingParams(
            max_tokens=1,
            seed=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=skip,
        )
