"""Sampling parameters against the model: what it cannot do is refused, what it knows is filled in.

`SamplingParams` has checked its own ranges; here are the rules that need the vocabulary, the
tokenizer, the context or `--max-logprobs`, and the ids that end a sequence. Knows no prompt but its
length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from msgspec import structs

from quire.config import ModelShape
from quire.engine.frontend.checked import CheckedParams, filled, unique
from quire.engine.frontend.refusal import refuse, shown
from quire.errors import ConfigError, InvalidRequest
from quire.params import NO_PROCESSORS, SamplingParams
from quire.structured.gate import GrammarGate
from quire.structured.params import StructuredOutputsParams
from quire.structured.settle import unforced
from quire.thinking import PROMPT_END, Thinking
from quire.tokenizer import Tokenizer
from quire.tokenizer.thinking import marks_of

MAX_BAD_WORDS_CHARS: Final = 65536
"""Characters of all `bad_words` together: they are tokenised when a request is admitted."""
FEW_CHARACTERS: Final = 1024
"""Characters of `bad_words` that are tokenised in a few milliseconds."""
MAX_READY: Final = 64
"""Lists of words whose tokens wait for a check; a caller may leave before that."""
FORM_SWITCHES: Final = ("disable_any_whitespace", "disable_additional_properties")
"""Entries of `--structured-outputs-config` that are fields of `StructuredOutputsParams`, too."""
_FILLED: Final = {
    "eos_token_ids": "stop_token_ids",
    "bad_words_token_ids": "bad_words",
    "grammar": "structured_outputs",
    "thinking": "thinking_token_budget",
}
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


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a model's `generation_config.json` and its overrides.

    `do_sample: false` means greedy, as in Hugging Face. Keys that are not about sampling are
    left alone: the file is theirs, too.

    Raises:
        ConfigError: a value is out of range.
    """
    found = {
        field: generation_config[key]
        for key, field in GENERATION_DEFAULTS.items()
        if generation_config.get(key) is not None
    }
    if generation_config.get("do_sample") is False:
        found.setdefault("temperature", 0.0)
    try:
        return SamplingParams(**found)
    except InvalidRequest as error:
        raise _wrong_default(error.message) from None


def _wrong_default(what: str) -> ConfigError:
    return ConfigError(
        f"generation_config: {what} Correct it with --override-generation-config, or start with "
        "--generation-config vllm."
    )


def find_eos_token_ids(
    shape: ModelShape, tokenizer: Tokenizer | None, generation_config: Mapping[str, Any]
) -> list[int]:
    """All ids that end a sequence: the tokenizer's first, then those of the configuration files.

    Each once, and only ids of the vocabulary.

    Raises:
        ConfigError: what `generation_config` has is no token id.
    """
    own = tokenizer.eos_token_id if tokenizer else None
    more = generation_config.get("eos_token_id")
    listed = more if isinstance(more, (list, tuple)) else [more]
    if any(i is not None and type(i) is not int for i in listed):
        raise _wrong_default(
            f"eos_token_id must be a token id or a list of them, got {more!r:.60}."
        )
    found = dict.fromkeys([own, *shape.eos_token_ids, *listed])
    return [i for i in found if i is not None and 0 <= i < shape.vocab_size]


class SamplingChecks:
    """Checks and completes sampling parameters for one model.

    Args:
        vocab_size: Width of the logits.
        tokenizer: None: nothing that is given as text can be used.
        max_model_len: The context in tokens.
        max_logprobs: `--max-logprobs`; -1: no limit.
        eos_token_ids: What ends a sequence.
        grammars: Settles what requests ask of the form of their output; None without a tokenizer.
        has_processors: Whether there are logits processors, which read `extra_args`.
        forms: `--structured-outputs-config`.
    """

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        max_logprobs: int,
        eos_token_ids: Sequence[int],
        grammars: GrammarGate | None = None,
        has_processors: bool = False,
        forms: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._form_switches = {name: True for name in FORM_SWITCHES if forms.get(name)}
        self._has_processors = has_processors
        self._grammars = grammars
        self._bans: dict[tuple[str, ...], list[list[int]]] = {}
        # tokens of banned words, ready for the next check
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._eos_token_ids = list(eos_token_ids)
        template = tokenizer.chat_template if tokenizer is not None else None
        self._marks = None if template is None else marks_of(list(template.templates.values()))

    def check(self, params: SamplingParams) -> CheckedParams:
        """Check all that depends on the model and not on a prompt, and fill in what it says.

        Raises:
            InvalidRequest: a field is wrong; `param` names it.
        """
        for name in _FILLED:
            if getattr(params, name):
                refuse(name, f"is filled in by the engine; use {_FILLED[name]}.")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            self._check_vocabulary(name, getattr(params, name) or ())
        self._check_scored(params.prompt_logprob_token_ids, params.prompt_logprob_start)
        if params.extra_args and not self._has_processors:
            refuse("extra_args", f"{NO_PROCESSORS}, got {shown(params.extra_args)}.")
        if self._tokenizer is None and params.stop_strings:
            refuse("stop", "stop strings need a tokenizer, and none is loaded.")
        changes: dict[str, Any] = {
            name: unique(value)
            for name in ("allowed_token_ids", "stop_token_ids", "bad_words", "stop")
            if isinstance(value := getattr(params, name), (list, tuple))
        }
        words = changes.get("bad_words")
        changes["bad_words_token_ids"] = self._bans.pop(tuple(words or ()), None)
        if words and changes["bad_words_token_ids"] is None:
            changes["bad_words_token_ids"] = self._bad_words_token_ids(words)
        changes["eos_token_ids"] = list(self._eos_token_ids)
        if params.thinking_token_budget is not None:
            changes["thinking"] = self._thinking(params)
        if params.structured_outputs is not None:
            bans = bool(params.allowed_token_ids or params.bad_words)
            changes |= self._settle(params.structured_outputs, bans)
        return CheckedParams(filled(params, **changes))

    def needs_time(self, params: SamplingParams) -> bool:
        """Whether `tokenise_words` should be called, on a thread, before `check`."""
        words = params.bad_words
        return bool(words) and sum(map(len, words or ())) > FEW_CHARACTERS

    def tokenise_words(self, params: SamplingParams) -> None:
        """Have the tokens of long lists of `bad_words` ready for the next `check`, which says what
        is wrong with them."""
        words = unique(params.bad_words or ())
        try:
            found = self._bad_words_token_ids(words)
        except InvalidRequest:
            return
        if found is not None:
            while len(self._bans) >= MAX_READY:
                self._bans.pop(next(iter(self._bans)))
            self._bans[tuple(words)] = found

    def _thinking(self, params: SamplingParams) -> Thinking:
        """The tokens of the marks around the reasoning."""
        marks, given = params.thinking_marks or self._marks, params.thinking_token_budget
        if marks is None or self._tokenizer is None:
            refuse(
                "thinking_token_budget",
                "needs a model whose reasoning has known marks, and the chat template of this one "
                f"shows none, got {given}.",
            )
        opening, closing = (
            self._tokenizer.encode(mark, add_special_tokens=False)
            for mark in (marks.opening, marks.closing)
        )
        for mark, text in ((opening, marks.opening), (closing, marks.closing)):
            # Plain text has many spellings, and whatever comes before it may change its tokens.
            if not mark or mark[0] not in self._tokenizer.added_ids:
                refuse(
                    "thinking_token_budget",
                    f"needs a model with a token of its own for {text!r}, got {given}.",
                )
            self._check_vocabulary("thinking_token_budget", mark)
        return Thinking(opening, closing)

    def _opened(self, params: SamplingParams, prompt: Sequence[int]) -> Thinking | None:
        """The marks of a request with this prompt, which may end within the reasoning."""
        marks, thinking = params.thinking_marks or self._marks, params.thinking
        if thinking is None or marks is None or self._tokenizer is None:
            return thinking
        # As text, as the parsers read it; its last tokens are enough.
        end = self._tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        return Thinking(thinking.opening, thinking.closing, marks.is_open_after(end))

    def _settle(self, wanted: StructuredOutputsParams, bans: bool) -> dict[str, Any]:
        """The grammar that a request asks for. Only the grammar says where such an output may end,
        so `ignore_eos` has no meaning for it. Where the request bans tokens, text that the grammar
        forces may be spelled with those that are left."""
        if self._grammars is None:
            refuse("structured_outputs", "grammars need a tokenizer, and none is loaded.")
        if self._form_switches:
            wanted = structs.replace(wanted, **self._form_switches)
        grammar = self._grammars.settle(wanted)
        if bans:
            grammar = unforced(grammar)
        return {"grammar": grammar, "structured_outputs": None, "ignore_eos": False}

    def complete(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """Checked parameters with what a prompt settles.

        Raises:
            InvalidRequest: `min_tokens` is more than the context leaves, or there is not a row of
                `prompt_logprob_token_ids` for each token to score.
        """
        prompt_length = len(prompt)
        rows = params.prompt_logprob_token_ids
        if rows is not None:
            wanted = max(0, prompt_length - 1 - (params.prompt_logprob_start or 0))
            if len(rows) != wanted:
                refuse(
                    "prompt_logprob_token_ids",
                    f"must have {wanted} rows, one for each token after the first "
                    f"{1 + (params.prompt_logprob_start or 0)} of the prompt's {prompt_length}, "
                    f"got {len(rows)}.",
                )
        room = self._max_model_len - prompt_length
        if params.min_tokens > room:
            refuse(
                "min_tokens",
                f"must be at most {room}, what the context of {self._max_model_len} tokens leaves "
                f"after a prompt of {prompt_length}, got {params.min_tokens}.",
            )
        changes: dict[str, Any] = {"max_tokens": room} if params.max_tokens is None else {}
        if params.thinking is not None:
            changes["thinking"] = self._opened(params, prompt)
        return filled(params, **changes) if changes else params

    def _check_logprobs(self, name: str, asked: int | None) -> None:
        limit = self._max_logprobs
        if asked is None or limit == -1 and asked <= self._vocab_size:
            return
        if limit == -1:
            refuse(name, f"must be at most the vocabulary's {self._vocab_size}, got {asked}.")
        if asked == -1:
            refuse(name, f"-1 (whole vocabulary) is more than the limit --max-logprobs {limit}.")
        if asked > limit:
            refuse(name, f"must be at most {limit} (--max-logprobs), got {asked}.")

    def _check_scored(self, rows: Sequence[Sequence[int]] | None, start: int | None) -> None:
        name, limit = "prompt_logprob_token_ids", self._max_logprobs
        if rows is None:
            if start is not None:
                refuse("prompt_logprob_start", f"needs {name}, got {start} without them.")
            return
        width = max(map(len, rows), default=0)
        if limit != -1 and width > limit:
            refuse(name, f"must have rows of at most {limit} (--max-logprobs), got {width}.")
        if len(rows) >= self._max_model_len:
            most = self._max_model_len - 1
            refuse(name, f"must have at most {most} rows (the context), got {len(rows)}.")
        self._check_vocabulary(name, [max(row) for row in rows if row])

    def _check_vocabulary(self, name: str, ids: Iterable[int]) -> None:
        """Ids index rows of logits: check against those, not against the tokenizer."""
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            limit = self._vocab_size - 1
            refuse(name, f"token ids must be at most {limit}, got {shown(largest)}.")

    def _bad_words_token_ids(self, words: Sequence[str] | None) -> list[list[int]] | None:
        """Token sequences of banned words: as the text starts with them, and after a space.

        vLLM's rule: the second form counts only if it is another token sequence of equal length.
        """
        if not words:
            return None
        if self._tokenizer is None:
            refuse("bad_words", "bad words need a tokenizer, and none is loaded.")
        length = sum(map(len, words))
        if length > MAX_BAD_WORDS_CHARS:
            limit = MAX_BAD_WORDS_CHARS
            refuse("bad_words", f"must have at most {limit} characters in all, got {length}.")
        banned: list[list[int]] = []
        for word in words:
            stem = word.lstrip(" ") or word
            plain = self._tokenizer.encode(stem, add_special_tokens=False)
            if not plain:
                refuse("bad_words", f"the word {shown(word)} is no token of this model.")
            spaced = self._tokenizer.encode(" " + stem, add_special_tokens=False)
            banned.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                banned.append(spaced)
        for sequence in banned:
            self._check_vocabulary("bad_words", sequence)
        return banned
