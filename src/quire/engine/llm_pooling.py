"""The verbs of `LLM` for pooling models: `encode`, `embed`, `classify`, `score`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.config import PoolerSpec
from quire.engine.foreign import check_request_options, truncation
from quire.engine.frontend.pooling_input import PoolingInputProcessor
from quire.engine.frontend.prompts import PromptType
from quire.engine.llm_part import LLMPart, as_prompts, one_for_each
from quire.errors import InvalidRequest, StepFailed, UnsupportedTask
from quire.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
)
from quire.params import PoolingParams

Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingVerbs(LLMPart):
    """What `LLM` does with a pooling model."""

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model pools out of each prompt, as float32 arrays.

        Args:
            prompts: One prompt or a list, as for `generate`.
            pooling_params: For all prompts, or one for each.
            use_tqdm: Show progress: a switch, or what makes a bar, like `tqdm`.
            pooling_task: `embed`, `classify`, `score` or `token_embed`; the model's own unless
                given.
            truncate_prompt_tokens: Cut longer prompts; -1: to what fits the model.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing is computed for any.
            StepFailed: the engine failed on a prompt.
        """
        check_request_options(lora_request=lora_request)
        truncate_prompt_tokens = truncation(tokenization_kwargs, truncate_prompt_tokens)
        self._pooler()
        items = as_prompts(prompts)
        asked = PoolingParams() if pooling_params is None else pooling_params
        given = one_for_each("pooling_params", PoolingParams, asked, len(items))
        changes: dict[str, Any] = {}
        if pooling_task is not None:
            changes["task"] = pooling_task
        if truncate_prompt_tokens is not None:
            changes["truncate_prompt_tokens"] = truncate_prompt_tokens
        return self._pool(items, [p.replace(**changes) for p in given], use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: Params = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt.

        Raises:
            RequestError: as `encode`; or the model gives no embeddings.
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: Params = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities of each prompt, in the order of the model's labels.

        Raises:
            RequestError: as `encode`; or the model is no classifier.
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one against many, or pair by pair.

        A cross-encoder reads each pair; an embedding model compares two embeddings by cosine.

        Raises:
            RequestError: a text or parameter is invalid; nothing is computed for any.
        """
        check_request_options(lora_request=lora_request, chat_template=chat_template)
        truncate_prompt_tokens = truncation(tokenization_kwargs, truncate_prompt_tokens)
        pooler = self._pooler()
        params = pooling_params or PoolingParams()
        if truncate_prompt_tokens is not None:
            params = params.replace(truncate_prompt_tokens=truncate_prompt_tokens)
        first, second = _pairs(data_1, data_2)
        if pooler.task == "embed":
            return self._cosines(first, second, params, use_tqdm)
        params = params.replace(task="score")
        prompts, each = [], []
        keep = params.truncate_prompt_tokens
        limit = self.llm_engine.config.model.max_model_len if keep == -1 else keep
        for one, two in zip(first, second, strict=True):
            pair = self.llm_engine.tokenizer.encode_pair(one, two, limit)
            prompts.append(pair.ids)
            each.append(params.replace(token_type_split=pair.split))
        outputs = self._pool(prompts, each, use_tqdm)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _cosines(
        self,
        first: list[str],
        second: list[str],
        params: PoolingParams,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[ScoringRequestOutput]:
        """Each text is embedded once, however often it occurs."""
        texts: list[PromptType] = list(dict.fromkeys([*first, *second]))
        params = params.replace(task="embed")
        outputs = self._pool(texts, [params] * len(texts), use_tqdm)
        by_text = dict(zip(texts, outputs, strict=True))
        return [
            cosine_output(by_text[one], by_text[two])
            for one, two in zip(first, second, strict=True)
        ]

    def _pool(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[PoolingParams],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        outputs = self._submit_all(prompts, params, use_tqdm)
        for output in outputs:
            if output.pooled is None:
                raise StepFailed(f"prompt {output.request_id}: {output.error or 'aborted'}")
        return [PoolingRequestOutput.of(output) for output in outputs]

    def _pooler(self) -> PoolerSpec:
        gate = self.llm_engine.frontend.input
        if not isinstance(gate, PoolingInputProcessor):
            raise UnsupportedTask(
                f"{self.llm_engine.config.model.names[0]} generates text; embeddings, classes and "
                'scores need a pooling model, or LLM(..., runner="pooling")'
            )
        return gate.pooler


def cosine_output(
    one: PoolingRequestOutput[PoolingOutput], two: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    """The cosine of two embeddings, as the score of their pair."""
    return ScoringRequestOutput(
        f"{one.request_id}_{two.request_id}",
        ScoringOutput(cosine(one.outputs.data, two.outputs.data)),
        [*one.prompt_token_ids, *two.prompt_token_ids],
        one.num_cached_tokens + two.num_cached_tokens,
    )


def _pairs(data_1: object, data_2: object) -> tuple[list[str], list[str]]:
    """Both sides at equal length: one text goes with each of the other side."""
    sides = []
    for name, data in (("data_1", data_1), ("data_2", data_2)):
        texts = [data] if isinstance(data, str) else list(data)  # type: ignore[call-overload]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"{name} must be a text or a list of texts", param=name)
        sides.append(texts)
    first, second = sides
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"data_1 must hold one text or as many as data_2 ({len(second)}), got {len(first)}",
            param="data_1",
        )
    return first, second
