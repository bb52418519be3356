"""The gate of models that generate text: a prompt and its parameters become core requests.

Everything that depends on the model (vocabulary, context, KV capacity, tokenizer) is checked before
a request goes to the core, which may then assume it. Reading prompts (`prompts.py`), checking
sampling parameters (`sampling_checks.py`), ids and seeds are parts that stand alone; here is their
order, and the fan-out of `n`.

Knows nothing of HTTP, scheduling or how outputs are delivered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quire.bounds import read_field
from quire.config import ModelConfig, ModelShape
from quire.engine.frontend.checked import CheckedParams, child_params, filled
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.prompts import PromptReader, PromptType, ReadPrompt
from quire.engine.frontend.refusal import refuse
from quire.engine.frontend.request_ids import check_request_id, internal_id
from quire.engine.frontend.sampling_checks import (
    SamplingChecks,
    default_sampling_params,
    find_eos_token_ids,
)
from quire.engine.frontend.seeds import draw_seed
from quire.engine.messages import EngineCoreRequest
from quire.errors import ContextLengthExceeded, UnsupportedTask
from quire.params import PoolingParams, SamplingParams
from quire.structured.gate import GrammarGate, LocalGate, MakeGate
from quire.tokenizer import Tokenizer


class InputProcessor:
    """Validates and completes requests for one model.

    Args:
        model: Its name, `--max-logprobs`, and the seed from which requests without one get theirs.
        shape: Its sizes.
        tokenizer: None: prompts must be token ids, and nothing else may be text.
        max_model_len: The context in tokens, prompt and output together.
        kv_capacity_tokens: What the KV cache can hold for one request; None: not checked.
        block_size: Tokens per block of the KV cache.
        generation_defaults: The model's `generation_config.json` with its overrides.
        entropy: Makes the seeds that requests without one get differ between processes. Without it
            they follow from the configured seed and the order of admission.
        make_grammars: Makes what settles the grammars of requests.
    """

    def __init__(
        self,
        model: ModelConfig,
        shape: ModelShape,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        kv_capacity_tokens: int | None = None,
        block_size: int = 16,
        generation_defaults: dict[str, Any] | None = None,
        entropy: bytes = b"",
        make_grammars: MakeGate = LocalGate,
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._defaults = dict(generation_defaults or {})
        self._entropy = entropy
        self._admitted = 0
        self._prompts = PromptReader(
            shape.vocab_size, tokenizer, max_model_len, kv_capacity_tokens, block_size
        )
        ends = find_eos_token_ids(shape, tokenizer, self._defaults)
        self.grammars: GrammarGate | None = None
        """Settles the grammars of requests; None without a tokenizer."""
        if tokenizer is not None:
            self.grammars = make_grammars(tokenizer.to_json, shape.vocab_size, ends)
        self._sampling = SamplingChecks(
            shape.vocab_size,
            tokenizer,
            max_model_len,
            model.max_logprobs,
            ends,
            self.grammars,
            bool(model.logits_processors),
            model.structured_outputs_config,
        )

    def default_params(self) -> SamplingParams:
        """See `default_sampling_params`.

        Raises:
            ConfigError: a value of the model's `generation_config.json` is out of range.
        """
        return default_sampling_params(self._defaults)

    def check(self, params: SamplingParams) -> CheckedParams:
        """Check all that depends on the model and not on a prompt, and fill in what it says.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
        """
        return self._sampling.check(params)

    async def prepare(self, params: SamplingParams) -> None:
        """Do on a thread what takes long in `check`."""
        if self._sampling.needs_time(params):
            await asyncio.to_thread(self._sampling.tokenise_words, params)

    def check_prefix(self, ids: list[int], cache_salt: str | None) -> None:
        """See `PromptReader.check_prefix`.

        Raises:
            InvalidRequest: an id is outside the vocabulary, there is none, or the salt is bad.
            ContextLengthExceeded: no prompt is that long.
        """
        self._prompts.check_prefix(ids, cache_salt)

    def read_prompt(self, prompt: PromptType) -> ReadPrompt:
        """The token ids of a prompt, for whoever makes several requests of it.

        Raises:
            InvalidRequest: it is no prompt.
            ContextLengthExceeded: it does not fit the context or the KV cache.
        """
        read = self._prompts.read(prompt)
        self._check_length(len(read.ids))
        return read

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
        """Admit a request. `add_special_tokens` is off for text a chat template rendered.

        Several prompts with the same parameters: give the later ones `ProcessedInput.checked` of
        the first, and the parameters are not checked again.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
            ContextLengthExceeded: the prompt does not fit the context or the KV cache.
            UnsupportedTask: the parameters are for a pooling model.
        """
        check_request_id(request_id)
        if isinstance(params, PoolingParams):
            raise UnsupportedTask(
                f"{self._model.names[0]} generates text; embeddings, classes and scores need a "
                "pooling model, or one started with --runner pooling."
            )
        if not isinstance(params, (SamplingParams, CheckedParams)):
            refuse("sampling_params", f"must be SamplingParams, got {type(params).__name__}.")
        priority = read_field("priority", priority)
        read = self._prompts.read(
            prompt, cache_salt=cache_salt, add_special_tokens=add_special_tokens
        )
        self._check_length(len(read.ids))
        checked = params if isinstance(params, CheckedParams) else self.check(params)
        final = self._sampling.complete(checked.params, read.ids)
        return self._admit(request_id, read, checked, final, arrival_time, priority, client)

    def _check_length(self, count: int) -> None:
        """The prompt and one generated token must fit the context, and the KV cache."""
        if count >= self._max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self._max_model_len} tokens, prompt and "
                f"output together, but the prompt alone has {count}. Shorten the prompt.",
                param="prompt",
            )
        self._prompts.check_room(count, count + 1)

    def _admit(
        self,
        request_id: str,
        prompt: ReadPrompt,
        checked: CheckedParams,
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        client: str,
    ) -> ProcessedInput:
        """Nothing can refuse the request any more: it gets a number, a seed and its children."""
        number = self._admitted
        self._admitted += 1
        seed = params.seed
        if seed is None:
            seed = draw_seed(self._model.seed, number, self._entropy)
            params = filled(params, seed=seed)
        internal = internal_id(request_id, number)
        requests = [
            EngineCoreRequest(
                request_id=internal if params.n == 1 else f"{i}_{internal}",
                external_id=request_id,
                index=i,
                prompt_token_ids=prompt.ids,
                sampling_params=child_params(params, i),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=prompt.salt,
                client=client,
            )
            for i in range(params.n)
        ]
        return ProcessedInput(requests, prompt.text, params, seed, checked)
