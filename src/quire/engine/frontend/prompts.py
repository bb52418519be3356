"""Reading a prompt: any accepted spelling becomes text, token ids and a cache salt, or is refused.

Ids are checked against the vocabulary that the model indexes, lengths against the KV cache. How
much of the context a prompt may fill depends on what is asked of the model: that is for the gates,
which share this reader. Knows no parameters of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from quire.engine.frontend.refusal import refuse, shown
from quire.errors import ContextLengthExceeded
from quire.spelling import did_you_mean
from quire.tokenizer import Tokenizer

MAX_CACHE_SALT_LENGTH: Final = 1024
TEXT_MARGIN: Final = 4
"""A text may have this many times the characters that the longest tokens could cover within the
context, because normalisers may shorten it; beyond, it is refused without tokenising it."""


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
_KEYS: Final = ("prompt", "prompt_token_ids", "cache_salt")
_MEDIA_KEYS: Final = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
"""Keys that vLLM's prompts may have; empty, they ask for nothing."""
_SPELLINGS: Final = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


@dataclass(frozen=True, slots=True)
class Cut:
    """A request's wish that a long prompt be cut to `tokens`, special tokens included."""

    tokens: int
    """At least 1."""
    side: str
    """`right` keeps the beginning, `left` the end."""

    def of(self, ids: list[Any]) -> list[Any]:
        """What is left of token ids."""
        return ids[: self.tokens] if self.side == "right" else ids[-self.tokens :]


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in its one internal spelling."""

    text: str | None
    """As the caller gave it, if it was text."""
    ids: list[int]
    """At least one, all within the vocabulary."""
    salt: str | None
    """Prefixes are shared only between prompts of the same salt."""


class PromptReader:
    """Reads prompts for one model.

    Args:
        vocab_size: Rows of the model's embedding and logits; ids are less.
        tokenizer: None: prompts must be token ids.
        max_model_len: The context in tokens.
        kv_capacity_tokens: What the KV cache can hold for one request; None: not known here.
        block_size: Tokens per block of the KV cache.
    """

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        kv_capacity_tokens: int | None = None,
        block_size: int = 16,
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._kv_capacity_tokens = kv_capacity_tokens
        self._block_size = block_size

    def read(
        self,
        prompt: object,
        *,
        cache_salt: object = None,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
    ) -> ReadPrompt:
        """A prompt of any accepted spelling.

        Args:
            prompt: A `PromptType`, if the caller keeps to the types.
            cache_salt: Given beside the prompt; the prompt may hold one, too.
            add_special_tokens: Off for text that a chat template rendered.
            cut: Where a prompt that is too long ends. None: it is not cut.

        Raises:
            InvalidRequest: it is no prompt, or has no tokens, a bad id or a bad salt.
            ContextLengthExceeded: the text is so long that it is not worth tokenising.
        """
        text, ids, salt = _spelled(prompt)
        if ids is None:
            assert text is not None, "_spelled() gives one of them"
            ids = self._encode(text, add_special_tokens, cut)
        elif cut is not None:
            ids = cut.of(ids)
        salt = _one_salt(salt, cache_salt)
        self._check_ids(ids)
        return ReadPrompt(text, ids, salt)

    def check_prefix(self, ids: object, cache_salt: object) -> None:
        """Check what `explain_prefix` is asked, as a request's prompt and salt are checked.

        Raises:
            InvalidRequest: an id is outside the vocabulary, there is none, or the salt is bad.
            ContextLengthExceeded: no prompt is that long.
        """
        if not isinstance(ids, (list, tuple)):
            refuse("prompt", f"must be {_SPELLINGS}, got {type(ids).__name__}.")
        self._check_ids(ids)
        if len(ids) > self._max_model_len:
            raise ContextLengthExceeded(
                f"prompt may have at most {self._max_model_len} tokens, the model's context, "
                f"got {len(ids)}.",
                param="prompt",
            )
        _one_salt(None, cache_salt)

    def check_room(self, count: int, slots: int) -> None:
        """A prompt of `count` tokens, which takes `slots` places, must fit the KV cache.

        Raises:
            ContextLengthExceeded: it needs more blocks than there are.
        """
        needed = -(-slots // self._block_size) * self._block_size
        available = self._kv_capacity_tokens
        if available is not None and needed > available:
            raise ContextLengthExceeded(
                f"the KV cache has room for {available} tokens, but this prompt of {count} needs "
                f"{needed}. Shorten the prompt, or start with more --kv-cache-memory-bytes.",
                param="prompt",
            )

    def _encode(self, text: str, add_special_tokens: bool, cut: Cut | None) -> list[int]:
        if self._tokenizer is None:
            refuse("prompt", "a text prompt needs a tokenizer, and none is loaded; send token ids.")
        if cut is not None:
            return self._tokenizer.encode_within(text, cut.tokens, cut.side, add_special_tokens)
        limit = TEXT_MARGIN * self._max_model_len * self._tokenizer.longest_token
        if len(text) > limit:
            raise ContextLengthExceeded(
                f"prompt has {len(text)} characters; more than {limit} cannot fit the model's "
                f"context of {self._max_model_len} tokens. Shorten it.",
                param="prompt",
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_ids(self, ids: Sequence[Any]) -> None:
        if not ids:
            refuse("prompt", "must hold at least one token, got none.")
        size = self._vocab_size
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size:
            return
        for position, value in enumerate(ids):
            if type(value) is not int or not 0 <= value < size:
                refuse(
                    "prompt",
                    f"token {position} must be an id from 0 to {size - 1}, got {shown(value)}.",
                )


def _spelled(prompt: object) -> tuple[str | None, list[Any] | None, object]:
    """Text, token ids and salt of a prompt, of which one of the first two is there."""
    salt = None
    ids: object = None
    if isinstance(prompt, dict):
        _check_keys(prompt)
        salt, ids = prompt.get("cache_salt"), prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt")
    elif isinstance(prompt, (list, tuple)):
        ids, prompt = prompt, None
    if prompt is not None and not isinstance(prompt, str):
        refuse("prompt", f"must be {_SPELLINGS}, got {type(prompt).__name__}.")
    if ids is None:
        if prompt is None:
            refuse("prompt", f"must be {_SPELLINGS}, got none of them.")
        return prompt, None, salt
    if not isinstance(ids, (list, tuple)):
        refuse("prompt", f"prompt_token_ids must be a list, got {type(ids).__name__}.")
    return prompt, list(ids), salt


def _check_keys(prompt: dict[Any, Any]) -> None:
    for key, value in prompt.items():
        if key in _MEDIA_KEYS:
            if value:
                refuse("prompt", f"{key} is not supported: prompts are text.")
        elif key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            refuse("prompt", f"unknown key {shown(key)}{hint}")


def _one_salt(in_prompt: object, given: object) -> str | None:
    """The cache salt, given beside the prompt or in it."""
    if in_prompt is not None and given is not None and in_prompt != given:
        refuse("cache_salt", "is given twice, in the prompt and beside it, and differs.")
    salt = given if in_prompt is None else in_prompt
    if salt is None:
        return None
    rule = f"must be a string of 1 to {MAX_CACHE_SALT_LENGTH} characters"
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH:
        refuse("cache_salt", f"{rule}, got {shown(salt)}.")
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError:
        refuse("cache_salt", "must be valid Unicode, but holds lone surrogates.")
    return salt
