"""The gate: a prompt and its parameters become core requests, or one clear refusal.

Everything that depends on the model (vocabulary, context, KV capacity, tokenizer) is checked
here, against the arrays that will be indexed, so that the core may assume it. Seeds, internal
ids, stop ids and banned token sequences are filled in here, too.

Knows nothing of HTTP, scheduling or how outputs are delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypedDict

from quire.bounds import read_field
from quire.config import ModelConfig, ModelShape
from quire.engine.frontend.checked import CheckedParams, child_params, filled, unique
from quire.engine.frontend.seeds import draw_seed
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedTask
from quire.params import PoolingParams, SamplingParams
from quire.registry import did_you_mean
from quire.tokenizer import Tokenizer

MAX_REQUEST_ID_LENGTH: Final = 256
MAX_CACHE_SALT_LENGTH: Final = 1024
MAX_BAD_WORDS_CHARS: Final = 65536
"""Characters of all `bad_words` together: they are tokenised at admission."""
TEXT_MARGIN: Final = 4
"""A text may have this many times the characters that the longest tokens could cover within the
context, because normalisers may shorten it; beyond, it is refused without tokenising it."""

GENERATION_DEFAULTS: Final = {
    # key of generation_config.json: field of SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is then only what is shown as its text."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt
_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt")
_MEDIA_KEYS: Final = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys that vLLM's prompts may have; empty, they ask for nothing."""
_PROMPT_SHAPES: Final = (
    "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
)


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """An admitted request."""

    requests: list[EngineCoreRequest]
    """One per completion."""
    prompt_text: str | None
    """The prompt as the caller gave it, if it was text."""
    params: SamplingParams
    """The whole request's parameters with everything filled in."""
    seed: int
    """Seed in force; completion `i` uses `seed + i`."""
    checked: CheckedParams
    """The same parameters before anything of this prompt came in, for further prompts."""


class InputProcessor:
    """Validates and completes requests for one model.

    `kv_capacity_tokens` is what the KV cache can hold for one request; `entropy` makes the seeds
    that requests without one get differ between processes (without it they are reproducible from
    the configured seed and the order of admission).
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
    ) -> None:
        self._model = model
        self._vocab_size = shape.vocab_size
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._kv_capacity_tokens = kv_capacity_tokens
        self._block_size = block_size
        self._defaults = dict(generation_defaults or {})
        self._entropy = entropy
        self._admitted = 0
        self._eos_token_ids = self._find_eos_token_ids(shape)

    @property
    def eos_token_ids(self) -> list[int]:
        """All ids that end a sequence, from the model's, generation's and tokenizer's files."""
        return list(self._eos_token_ids)

    def default_params(self) -> SamplingParams:
        """Sampling parameters of the model's `generation_config.json` and its overrides.

        `do_sample: false` means greedy, as in Hugging Face. Keys that are not about sampling are
        left alone: the file is theirs.

        Raises:
            ConfigError: a value is out of range.
        """
        found = {
            field: self._defaults[key]
            for key, field in GENERATION_DEFAULTS.items()
            if self._defaults.get(key) is not None
        }
        if self._defaults.get("do_sample") is False:
            found.setdefault("temperature", 0.0)
        try:
            return SamplingParams(**found)
        except InvalidRequest as error:
            raise ConfigError(
                f"generation_config: {error.message} Correct it with "
                "--override-generation-config, or start with --generation-config vllm."
            ) from None

    def tokenize(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text that may fit the context.

        Raises:
            InvalidRequest: there is no tokenizer, or the text is no valid Unicode.
            ContextLengthExceeded: the text is so long that it is not worth tokenising.
        """
        if self._tokenizer is None:
            _refuse(param, "a text prompt needs a tokenizer, and none is loaded; send token ids.")
        limit = TEXT_MARGIN * self._max_model_len * self._tokenizer.longest_token
        if len(text) > limit:
            raise ContextLengthExceeded(
                f"{param} has {len(text)} characters; more than {limit} cannot fit the model's "
                f"context of {self._max_model_len} tokens. Shorten it.",
                param=param,
            )
        return self._tokenizer.encode(text, add_special_tokens)

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
            _refuse("sampling_params", f"must be SamplingParams, got {type(params).__name__}.")
        priority = read_field("priority", priority)
        text, ids, salt = self._read_prompt(prompt, add_special_tokens)
        salt = _one_salt(salt, cache_salt)
        self._check_prompt_ids(ids)
        self._check_length(len(ids))
        checked = params if isinstance(params, CheckedParams) else self.check(params)
        final = self._complete(checked.params, len(ids))
        return self._admit(
            request_id, ids, text, checked, final, arrival_time, priority, salt, client
        )

    def check_prefix(self, ids: list[int], cache_salt: str | None) -> None:
        """Check what `explain_prefix` is asked, as a request's prompt and salt are checked.

        Raises:
            InvalidRequest: an id is outside the vocabulary, there is none, or the salt is bad.
            ContextLengthExceeded: no prompt is that long.
        """
        if not isinstance(ids, (list, tuple)):
            _refuse("prompt", f"must be {_PROMPT_SHAPES}, got {type(ids).__name__}.")
        self._check_prompt_ids(list(ids))
        if len(ids) > self._max_model_len:
            raise ContextLengthExceeded(
                f"prompt may have at most {self._max_model_len} tokens, the model's context, "
                f"got {len(ids)}.",
                param="prompt",
            )
        _one_salt(None, cache_salt)

    def _read_prompt(
        self, prompt: object, add_special_tokens: bool
    ) -> tuple[str | None, list[int], str | None]:
        """Text (if given), token ids and cache salt of any accepted spelling of a prompt."""
        salt = None
        ids: object = None
        if isinstance(prompt, dict):
            _check_prompt_keys(prompt)
            salt, ids = prompt.get("cache_salt"), prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt")
        elif isinstance(prompt, (list, tuple)):
            ids, prompt = prompt, None
        if prompt is not None and not isinstance(prompt, str):
            _refuse("prompt", f"must be {_PROMPT_SHAPES}, got {type(prompt).__name__}.")
        if ids is None:
            if prompt is None:
                _refuse("prompt", f"must be {_PROMPT_SHAPES}, got none of them.")
            return prompt, self.tokenize(prompt, add_special_tokens), salt
        if not isinstance(ids, (list, tuple)):
            _refuse("prompt", f"prompt_token_ids must be a list, got {type(ids).__name__}.")
        return prompt, list(ids), salt

    def _check_prompt_ids(self, ids: list[Any]) -> None:
        if not ids:
            _refuse("prompt", "must hold at least one token, got none.")
        size = self._vocab_size
        if all(type(i) is int for i in ids) and min(ids) >= 0 and max(ids) < size:
            return
        for position, value in enumerate(ids):
            if type(value) is not int or not 0 <= value < size:
                _refuse(
                    "prompt",
                    f"token {position} must be an id from 0 to {size - 1}, got {_show(value)}.",
                )

    def _check_length(self, count: int) -> None:
        """The prompt and one generated token must fit the context, and the KV cache."""
        if count >= self._max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self._max_model_len} tokens, prompt and "
                f"output together, but the prompt alone has {count}. Shorten the prompt.",
                param="prompt",
            )
        self._check_room(count, count + 1)

    def _check_room(self, count: int, slots: int) -> None:
        """A prompt of `count` tokens, which takes so many slots, must fit the KV cache."""
        needed = -(-slots // self._block_size) * self._block_size
        available = self._kv_capacity_tokens
        if available is not None and needed > available:
            raise ContextLengthExceeded(
                f"the KV cache has room for {available} tokens, but this prompt of {count} needs "
                f"{needed}. Shorten the prompt, or start with more --kv-cache-memory-bytes.",
                param="prompt",
            )

    def check(self, params: SamplingParams) -> CheckedParams:
        """Check all that depends on the model and not on a prompt, and fill in what it says.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
        """
        for name in ("eos_token_ids", "bad_words_token_ids"):
            if getattr(params, name):
                _refuse(name, "is filled in by the engine; use stop_token_ids or bad_words.")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_vocabulary(name, getattr(params, name) or ())
        if self._tokenizer is None and params.stop_strings:
            _refuse("stop", "stop strings need a tokenizer, and none is loaded.")
        changes: dict[str, Any] = {
            name: unique(value)
            for name in ("allowed_token_ids", "stop_token_ids", "bad_words", "stop")
            if isinstance(value := getattr(params, name), (list, tuple))
        }
        words = changes.get("bad_words")
        changes["bad_words_token_ids"] = self._bad_words_token_ids(words)
        changes["eos_token_ids"] = list(self._eos_token_ids)
        return CheckedParams(filled(params, **changes))

    def _complete(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Checked parameters with what a prompt of this length settles."""
        room = self._max_model_len - prompt_length
        if params.min_tokens > room:
            _refuse(
                "min_tokens",
                f"must be at most {room}, what the context of {self._max_model_len} tokens leaves "
                f"after a prompt of {prompt_length}, got {params.min_tokens}.",
            )
        return filled(params, max_tokens=room) if params.max_tokens is None else params

    def _check_logprobs(self, name: str, asked: int | None) -> None:
        limit = self._model.max_logprobs
        if asked is None or limit == -1 and asked <= self._vocab_size:
            return
        if limit == -1:
            _refuse(name, f"must be at most the vocabulary's {self._vocab_size}, got {asked}.")
        if asked == -1:
            _refuse(name, f"-1 (whole vocabulary) is more than the limit --max-logprobs {limit}.")
        if asked > limit:
            _refuse(name, f"must be at most {limit} (--max-logprobs), got {asked}.")

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        """Ids index rows of logits: check against those, not against the tokenizer."""
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            limit = self._vocab_size - 1
            _refuse(name, f"token ids must be at most {limit}, got {_show(largest)}.")

    def _bad_words_token_ids(self, words: Sequence[str] | None) -> list[list[int]] | None:
        """Token sequences of banned words: as the text starts with them, and after a space.

        vLLM's rule: the second form counts only if it is another token sequence of equal length.
        """
        if not words:
            return None
        if self._tokenizer is None:
            _refuse("bad_words", "bad words need a tokenizer, and none is loaded.")
        length = sum(map(len, words))
        if length > MAX_BAD_WORDS_CHARS:
            limit = MAX_BAD_WORDS_CHARS
            _refuse("bad_words", f"must have at most {limit} characters in all, got {length}.")
        banned: list[list[int]] = []
        for word in words:
            stem = word.lstrip(" ") or word
            plain = self._tokenizer.encode(stem, add_special_tokens=False)
            if not plain:
                _refuse("bad_words", f"the word {_show(word)} is no token of this model.")
            spaced = self._tokenizer.encode(" " + stem, add_special_tokens=False)
            banned.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                banned.append(spaced)
        for sequence in banned:
            self._check_vocabulary("bad_words", sequence)
        return banned

    def _find_eos_token_ids(self, shape: ModelShape) -> list[int]:
        """The tokenizer's first, then the configuration files'; each once, and real ids only."""
        own = self._tokenizer.eos_token_id if self._tokenizer else None
        more = self._defaults.get("eos_token_id")
        listed = more if isinstance(more, (list, tuple)) else [more]
        found = dict.fromkeys([own, *shape.eos_token_ids, *listed])
        return [i for i in found if type(i) is int and 0 <= i < self._vocab_size]

    def _admit(
        self,
        request_id: str,
        ids: list[int],
        text: str | None,
        checked: CheckedParams,
        params: SamplingParams,
        arrival_time: float,
        priority: int,
        salt: str | None,
        client: str,
    ) -> ProcessedInput:
        number = self._admitted
        self._admitted += 1
        seed = params.seed
        if seed is None:
            seed = draw_seed(self._model.seed, number, self._entropy)
            params = filled(params, seed=seed)
        internal = f"{request_id}-{number % 2**32:08x}"
        requests = [
            EngineCoreRequest(
                request_id=internal if params.n == 1 else f"{i}_{internal}",
                external_id=request_id,
                index=i,
                prompt_token_ids=ids,
                sampling_params=child_params(params, i),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=salt,
                client=client,
            )
            for i in range(params.n)
        ]
        return ProcessedInput(requests, text, params, seed, checked)


def check_request_id(request_id: object) -> None:
    """Refuse an id that is no string of sane length and content.

    Raises:
        InvalidRequest: it is empty, too long, or holds control characters or half characters.
    """
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
        rule = f"must be a string of 1 to {MAX_REQUEST_ID_LENGTH} characters"
        _refuse("request_id", f"{rule}, got {_show(request_id)}.")
    if not request_id.isprintable():
        _refuse("request_id", f"must hold printable characters only, got {_show(request_id)}.")


def _check_prompt_keys(prompt: dict[Any, Any]) -> None:
    for key, value in prompt.items():
        if key in _MEDIA_KEYS:
            if value:
                _refuse("prompt", f"{key} is not supported: prompts are text.")
        elif key not in _PROMPT_KEYS:
            hint = did_you_mean(str(key), _PROMPT_KEYS)
            _refuse("prompt", f"unknown key {_show(key)}{hint}")


def _one_salt(in_prompt: object, given: object) -> str | None:
    """The cache salt, given beside the prompt or in it."""
    if in_prompt is not None and given is not None and in_prompt != given:
        _refuse("cache_salt", "is given twice, in the prompt and beside it, and differs.")
    salt = given if in_prompt is None else in_prompt
    if salt is None:
        return None
    rule = f"must be a string of 1 to {MAX_CACHE_SALT_LENGTH} characters"
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH:
        _refuse("cache_salt", f"{rule}, got {_show(salt)}.")
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError:
        _refuse("cache_salt", "must be valid Unicode, but holds lone surrogates.")
    return salt


def _show(value: object) -> str:
    """A value for an error message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 40:
        return f"a string of {len(value)} characters"
    if isinstance(value, (str, int, float, type(None))):
        return ascii(value)
    return type(value).__name__


def _refuse(param: str, text: str) -> NoReturn:
    """Raise `InvalidRequest` about `param`; the text goes on from its name."""
    glue = " " if text.startswith(("must", "is ")) else ": "
    raise InvalidRequest(f"{param}{glue}{text}", param=param)
