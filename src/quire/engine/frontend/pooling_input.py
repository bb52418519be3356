"""The gate of pooling models: a prompt and what is wanted of it become one core request.

Prompts are read as for text (`prompts.py`); no token is generated, so a prompt may fill the whole
context, and it may be cut to fit. Knows nothing of HTTP or scheduling.
"""

from __future__ import annotations

from typing import Any

from quire.bounds import read_field
from quire.config import ModelConfig, ModelShape, PoolerSpec
from quire.engine.frontend.checked import CheckedParams
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.prompts import Cut, PromptReader, PromptType
from quire.engine.frontend.refusal import refuse
from quire.engine.frontend.request_ids import check_request_id, internal_id
from quire.engine.frontend.sampling_checks import default_sampling_params
from quire.engine.messages import EngineCoreRequest
from quire.errors import ContextLengthExceeded, UnsupportedTask
from quire.params import PoolingParams, RequestOutputKind, SamplingParams
from quire.tokenizer import Tokenizer

SERVED = {"embed": ("embed", "token_embed"), "classify": ("classify", "score")}
"""What a request may ask, by what the model is made for."""


class PoolingInputProcessor:
    """Validates and completes requests for one pooling model.

    Args:
        model: Its name.
        shape: Its sizes.
        tokenizer: None: prompts must be token ids.
        pooler: How it pools.
        max_model_len: Tokens that a prompt may have.
        kv_capacity_tokens: What the KV cache can hold for one request; None: not checked.
        block_size: Tokens per block of the KV cache.
        generation_defaults: The model's `generation_config.json` with its overrides.
    """

    def __init__(
        self,
        model: ModelConfig,
        shape: ModelShape,
        tokenizer: Tokenizer | None,
        *,
        pooler: PoolerSpec,
        max_model_len: int,
        kv_capacity_tokens: int | None = None,
        block_size: int = 16,
        generation_defaults: dict[str, Any] | None = None,
    ) -> None:
        self.pooler = pooler
        self._name = model.names[0]
        self._max_model_len = max_model_len
        self._defaults = dict(generation_defaults or {})
        self._admitted = 0
        self._prompts = PromptReader(
            shape.vocab_size, tokenizer, max_model_len, kv_capacity_tokens, block_size
        )

    def default_params(self) -> SamplingParams:
        """See `default_sampling_params`: the file may be there, though nothing is sampled.

        Raises:
            ConfigError: a value of the model's `generation_config.json` is out of range.
        """
        return default_sampling_params(self._defaults)

    def check_prefix(self, ids: list[int], cache_salt: str | None) -> None:
        """See `PromptReader.check_prefix`.

        Raises:
            InvalidRequest: an id is outside the vocabulary, there is none, or the salt is bad.
            ContextLengthExceeded: no prompt is that long.
        """
        self._prompts.check_prefix(ids, cache_salt)

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
            raise self.no_text()
        if not isinstance(params, PoolingParams):
            refuse("pooling_params", f"must be PoolingParams, got {type(params).__name__}.")
        priority = read_field("priority", priority)
        self._check_task(params)
        read = self._prompts.read(
            prompt,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            cut=self._cut(params),
        )
        self._check_length(len(read.ids))
        neutral = self._neutral(params)
        request = EngineCoreRequest(
            request_id=internal_id(request_id, self._admitted),
            external_id=request_id,
            index=0,
            prompt_token_ids=read.ids,
            sampling_params=neutral,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=read.salt,
            client=client,
            pooling_params=params,
        )
        self._admitted += 1
        return ProcessedInput([request], read.text, neutral, 0, CheckedParams(neutral))

    @property
    def _does(self) -> str:
        return "gives embeddings" if self.pooler.task == "embed" else "classifies"

    def no_text(self) -> UnsupportedTask:
        """The answer to whoever wants text of this model."""
        return UnsupportedTask(f"{self._name} {self._does}; it generates no text.")

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
            refuse("dimensions", f"must be {rule}, got {wanted}.")

    def _cut(self, params: PoolingParams) -> Cut | None:
        """Where `truncate_prompt_tokens` ends a prompt; -1 is what the model takes."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return None
        return Cut(self._max_model_len if keep == -1 else keep, params.truncation_side)

    def _check_length(self, count: int) -> None:
        """The prompt alone must fit the model, and the KV cache."""
        if count > self._max_model_len:
            raise ContextLengthExceeded(
                f"this model takes at most {self._max_model_len} tokens, but the prompt has "
                f"{count}. Shorten it, or let it be cut with truncate_prompt_tokens.",
                param="prompt",
            )
        self._prompts.check_room(count, count)

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
