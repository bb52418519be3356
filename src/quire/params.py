"""The parameters of a request, for sampling or for pooling, as validated records.

Field names, defaults and rules are those of vLLM's classes of the same names. Values are validated
on construction; `InvalidRequest` names the limit and the given value. The limits of numbers are in
`quire.bounds`. What depends on a model (vocabulary size, context length) is checked later, at the
engine's input gate.

This module knows nothing of tensors, tokenizers or HTTP.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, NoReturn, Self, get_args

import msgspec

from quire import envs
from quire.bounds import INT64, read_field, show
from quire.errors import InvalidRequest
from quire.repetition import RepetitionDetectionParams
from quire.structured.params import Grammar, StructuredOutputsParams
from quire.thinking import Thinking, ThinkingMarks
from quire.utils.absent import absent

__all__ = [
    "Grammar",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

SAMPLING_EPS: Final = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE: Final = 1e-2
"""Temperatures between `SAMPLING_EPS` and this are raised to it, because float32 overflows below
it."""
MAX_STOP_STRINGS: Final = 64
MAX_STOP_LENGTH: Final = 1024
MAX_LOGIT_BIAS: Final = 4096
MAX_EXTRA_ARGS: Final = 65536
NO_PROCESSORS: Final = (
    "is for logits processors, and the engine was started without any (--logits-processors)"
)
"""What is said of `extra_args` where nobody would read them."""
MAX_LOGPROB_TOKEN_IDS: Final = 128
"""vLLM's limit."""
MAX_BAD_WORDS: Final = 1024
MAX_SEED: Final = INT64


_GATE: Final = "an engine checks and completes parameters when a request is given to it"
ABSENT_OF_SAMPLING_PARAMS: Final = {
    "for_sampler_warmup": "the sampler needs no warm-up",
    "update_from_generation_config": _GATE,
    "update_from_tokenizer": _GATE,
    "verify": _GATE,
}
"""Members of vLLM's `SamplingParams` that its engine calls, and why there are none here."""


class RequestOutputKind(enum.Enum):
    """How successive `RequestOutput`s of one request relate."""

    CUMULATIVE = 0
    """Each output holds everything so far."""
    DELTA = 1
    """Each output holds what is new."""
    FINAL_ONLY = 2
    """One output, at the end."""


class SamplingType(enum.IntEnum):
    """How the tokens of a request are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What sampling and pooling parameters have in common. A field that is set later is validated
    like one given on construction."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__struct_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        checked = self.replace(**{name: value})
        for field in self.__struct_fields__:
            msgspec.structs.force_setattr(self, field, getattr(checked, field))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)

    def clone(self) -> Self:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)


@absent(ABSENT_OF_SAMPLING_PARAMS)
class SamplingParams(Params, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it stops.

    `None` stands for the default of a field, unless its annotation gives it another meaning.
    numpy's numbers count as numbers, and lists may also be tuples or sets.

    Raises:
        InvalidRequest: a field is out of range; the message names the limit and the value.
    """

    n: int = 1
    """Number of completions, at least 1 and at most `QUIRE_MAX_N_SEQUENCES` (16384). Completion `i`
    samples with `seed + i`."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per earlier occurrence in the output; [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1e-30 to
    100."""
    temperature: float = 1.0
    """[0, 2]; below 1e-5 decoding is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose total probability reaches this; (0, 1]."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the most likely token's; [0, 1]."""
    seed: int | None = None
    """Key of the request's random numbers: 63 bits of it count. Without one, or with -1, admission
    chooses and reports one."""
    stop: str | list[str] | None = None
    """Strings that end the output; they are cut off unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] = []
    """Token ids that end the output; the stop token stays in `token_ids`."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Largest number of tokens to generate; `None` means up to the model's context."""
    min_tokens: int = 0
    """Until this many tokens, end-of-sequence and stop ids are masked, and stop strings are not
    searched."""
    logprobs: int | None = None
    """Return the log-probabilities of this many most likely tokens at each output position; -1:
    all."""
    prompt_logprobs: int | None = None
    """The same for prompt positions. The request then does not read the prefix cache."""
    logprob_token_ids: list[int] | None = None
    """Return the log-probabilities of these tokens (at most 128) at each output position, beside
    that of the sampled one. They take the place of the likeliest if `logprobs` is `None` or their
    number, as in vLLM; any other `logprobs` adds that many of the likeliest."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    """Tokens per output of a stream. The first token and the end come at once. Values below
    `--stream-interval` are raised to it."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; values in [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these ids can be sampled."""
    bad_words: list[str] | None = None
    """Words that must not appear: the last token of a matching sequence is banned."""
    skip_reading_prefix_cache: bool | None = None
    """`None`: false, unless `prompt_logprobs` needs every prompt position computed."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have; may be given as a dictionary of its fields."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End the output once it repeats itself; may be given as a dictionary of its fields."""
    extra_args: dict[str, Any] | None = None
    """For logits processors of one's own: what JSON can hold, 64 KiB as text."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning: then the mark that ends the reasoning is forced. 0: no reasoning;
    -1: no limit. Needs a model whose reasoning has known marks."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Score these tokens at positions of the prompt: row `i` has the candidates for prompt token
    `prompt_logprob_start + i + 1`, at most `--max-logprobs` of them, and there is a row for each
    token from there to the prompt's end. -1 pads a row. May be an integer array of numpy,
    `[rows, candidates]`. The scores are `RequestOutput.prompt_token_id_logprobs`."""
    prompt_logprob_start: int | None = None
    """The position after which `prompt_logprob_token_ids` begin; `None`: the first. What comes
    before it may be read from the prefix cache."""
    # vLLM's parameters for what quire does not do: values that ask for nothing (`NOT_DONE`).
    flat_logprobs: Any = False
    skip_clone: Any = False
    output_text_buffer_length: Any = 0
    routed_experts_prompt_start: Any = 0
    trace_decode_token_ids: Any = None
    watermarking: Any = None
    bad_words_token_ids: list[list[int]] | None = None
    """Filled in by the engine from `bad_words`; not meant to be set by hand."""
    eos_token_ids: list[int] = []
    """Filled in by the engine from the model's files; not meant to be set by hand."""
    shown_special_ids: list[int] | None = None
    """Filled in by the server: special tokens that are in the text despite `skip_special_tokens`,
    because a parser looks for them."""
    grammar: Grammar | None = None
    """Filled in by the engine from `structured_outputs`; not meant to be set by hand."""
    thinking_marks: ThinkingMarks | None = None
    """Filled in by the server, from its reasoning parser."""
    thinking: Thinking | None = None
    """Filled in by the engine from `thinking_token_budget`; not meant to be set by hand."""

    def __post_init__(self) -> None:
        _check(self)
        _check_not_done(self, NOT_DONE)
        _normalise(self)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Parameters from values of which some may be `None`, which stands for the default. For
        `max_tokens`, `None` means up to the model's context."""
        kept = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        return cls(**kept)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < SAMPLING_EPS

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, or random with or without a seed of its own."""
        if self.greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """How many candidates there are at each output position, beside the sampled token; `None`:
        log-probabilities are not wanted."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @property
    def num_likeliest(self) -> int:
        """How many of the likeliest tokens are among them; -1: all."""
        chosen = self.logprob_token_ids
        if self.logprobs is None or (chosen and self.logprobs == len(chosen)):
            return 0
        return self.logprobs

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-sequence id, once the engine has filled them in."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may start from cached blocks."""
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None

    @property
    def first_scored(self) -> int | None:
        """The first position of the prompt whose state is needed for scores, whatever the prefix
        cache has; `None`: none is."""
        if self.prompt_logprob_token_ids is None:
            return None
        return self.prompt_logprob_start or 0

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """Ids masked until `min_tokens`: end-of-sequence (unless ignored) and stop ids."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return frozenset(self.stop_token_ids) | frozenset(eos)


POOLING_TASKS: Final = ("embed", "classify", "score", "token_embed")


class PoolingParams(Params, kw_only=True, omit_defaults=True):
    """What a request asks of a pooling model.

    Raises:
        InvalidRequest: a field is out of range; the message names the limit and the value.
    """

    task: str | None = None
    """`embed`, `classify`, `score` or `token_embed` (a vector for each token); `None`: what the
    model is made for."""
    use_activation: bool | None = None
    """Scale embeddings to length 1; turn logits into probabilities. `None`: as the model says."""
    dimensions: int | None = None
    """Cut embeddings to this many numbers (models trained for it only)."""
    truncate_prompt_tokens: int | None = None
    """Cut longer prompts to this many tokens, special tokens included; -1: what fits the model.
    `None`: refuse them."""
    truncation_side: str = "right"
    """Where prompts are cut: `right` keeps their beginning."""
    skip_reading_prefix_cache: bool | None = None
    # vLLM's parameters for what quire does not do: values that ask for nothing.
    step_tag_id: Any = None
    returned_token_ids: Any = None
    requires_token_ids: Any = False
    late_interaction_params: Any = None
    extra_kwargs: Any = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    token_type_split: int | None = None
    """Filled in by the engine: where the second text of a pair begins."""

    def __post_init__(self) -> None:
        _check_not_done(self, _NOT_DONE_POOLING)
        if self.task is not None and self.task not in POOLING_TASKS:
            _fail("task", f"one of {', '.join(POOLING_TASKS)}", self.task)
        _read_numbers(self, ("dimensions", "truncate_prompt_tokens"))
        if self.truncation_side is None:
            _set(self, "truncation_side", "right")
        if self.truncation_side not in ("left", "right"):
            _fail("truncation_side", "left or right", self.truncation_side)
        _check_switches(self, ("use_activation", "skip_reading_prefix_cache"))


NOT_DONE: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    # field: what asks for nothing, the default first; what to say of other values
    "flat_logprobs": ((False, None), "logprobs are one mapping per position"),
    "skip_clone": ((False, True, None), "parameters are copied if need be"),
    "output_text_buffer_length": ((0, None), "the length follows from the stop strings"),
    "routed_experts_prompt_start": ((0, None), "outputs carry tokens, text and logprobs"),
    "trace_decode_token_ids": ((None,), "outputs follow from the prompt and the seed"),
    "watermarking": ((None, False), "the output is not marked"),
}
_NOT_DONE_POOLING: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "step_tag_id": ((None,), "no reward model is served"),
    "returned_token_ids": ((None,), "no reward model is served"),
    "requires_token_ids": ((False, None), "outputs carry the prompt's token ids anyway"),
    "late_interaction_params": ((None,), "late interaction is not done; use token_embed"),
    "extra_kwargs": ((None, {}), "there are no custom poolers"),
    "output_kind": (
        (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE, None),
        "a prompt is pooled when it ends",
    ),
}


def _check_not_done(p: Params, table: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    """Replace harmless values by the default, so that they are not sent along, and refuse all
    others."""
    for name, (neutral, instead) in table.items():
        value = getattr(p, name)
        if value is neutral[0]:
            continue
        if value not in neutral:
            raise InvalidRequest(
                f"{name} is not supported yet: {instead}; got {show(value)}.", param=name
            )
        msgspec.structs.force_setattr(p, name, neutral[0])


def _fail(param: str, rule: str, given: object) -> NoReturn:
    raise InvalidRequest(f"{param} must be {rule}, got {show(given)}.", param=param)


_set: Final = msgspec.structs.force_setattr
_NUMBERS: Final = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_start", "thinking_token_budget",
    "stream_interval",
)  # fmt: skip
"""Fields with a row in `quire.bounds`, in the order a reader would check them."""
_SWITCHES: Final = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "skip_reading_prefix_cache",
)  # fmt: skip
_ID_LISTS: Final = (
    "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "eos_token_ids",
    "shown_special_ids",
)  # fmt: skip
_DEFAULTS: Final = {
    f.name: f.default_factory if f.default is msgspec.NODEFAULT else f.default
    for f in msgspec.structs.fields(SamplingParams)
    if type(None) not in get_args(f.type)
}
"""What `None` stands for in fields where it is not a value of its own; lists are made by a
factory."""


def _check(p: SamplingParams) -> None:
    """Check each field on its own, and convert its value to the plain type of its annotation."""
    for name, default in _DEFAULTS.items():
        if getattr(p, name) is None:
            _set(p, name, default() if callable(default) else default)
    _read_numbers(p, _NUMBERS)
    _check_switches(p, _SWITCHES)
    if not isinstance(p.output_kind, RequestOutputKind):
        _fail("output_kind", "a RequestOutputKind", p.output_kind)
    _check_pairs(p)
    _check_stops(p)
    _set(p, "structured_outputs", StructuredOutputsParams.read(p.structured_outputs))
    _set(p, "repetition_detection", RepetitionDetectionParams.read(p.repetition_detection))
    _set(p, "extra_args", read_extra_args("extra_args", p.extra_args))
    for name in _ID_LISTS:
        if (ids := getattr(p, name)) is not None:
            _set(p, name, _token_ids(name, ids))
    _check_token_sets(p)
    _check_scored(p)


def _read_numbers(p: SamplingParams | PoolingParams, names: Sequence[str]) -> None:
    for name in names:
        if (value := getattr(p, name)) is not None:
            found = read_field(name, value)
            if found is not value:
                _set(p, name, found)


def _check_switches(p: SamplingParams | PoolingParams, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(p, name)
        if not (value is True or value is False or value is None):
            _fail(name, "true or false", value)


def _check_pairs(p: SamplingParams) -> None:
    """Rules between two numbers, or a number and its limit from the environment."""
    if p.n > 1 and p.n > (most := envs.MAX_N_SEQUENCES):
        _fail("n", f"at most {most} (QUIRE_MAX_N_SEQUENCES)", p.n)
    if p.greedy and p.n > 1:
        raise InvalidRequest(
            f"n must be 1 when temperature is 0 (greedy gives equal completions), got {p.n}.",
            param="n",
        )
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _fail("min_tokens", f"at most max_tokens ({p.max_tokens})", p.min_tokens)


def _check_stops(p: SamplingParams) -> None:
    if p.stop is None:
        return
    if not isinstance(p.stop, str):
        _set(p, "stop", _texts("stop", p.stop, MAX_STOP_STRINGS))
    stops = p.stop_strings
    for stop in stops:
        if not stop:
            _fail("stop", "made of non-empty strings", stop)
        if len(stop) > MAX_STOP_LENGTH:
            _fail("stop", f"made of strings of at most {MAX_STOP_LENGTH} characters", len(stop))
    if stops and not p.detokenize:
        raise InvalidRequest("stop strings need detokenize=True, got False.", param="stop")


def _texts(name: str, given: object, most: int) -> list[str]:
    """A collection of strings as a list; a set gives a fixed order."""
    if not isinstance(given, (list, tuple, set, frozenset)):
        one = "a string or " if name == "stop" else ""
        _fail(name, f"{one}a list of strings", given)
    if len(given) > most:
        _fail(name, f"at most {most} strings", len(given))
    for text in given:
        if not isinstance(text, str):
            _fail(name, "made of strings", text)
    if isinstance(given, (set, frozenset)):
        return sorted(given)
    return given if isinstance(given, list) else list(given)


def _token_ids(name: str, given: object) -> list[int]:
    """A collection of token ids as a list of plain integers; a set gives ascending order."""
    if not isinstance(given, (list, tuple, set, frozenset)):
        _fail(name, "a list of token ids (integers of at least 0)", given)
    ids = given if isinstance(given, list) else list(given)
    if not set(map(type, ids)) <= {int}:
        ids = [_token_id(name, "a list of token ids (integers of at least 0)", i) for i in ids]
    if ids and min(ids) < 0:
        _fail(name, "a list of token ids (integers of at least 0)", min(ids))
    return sorted(ids) if isinstance(given, (set, frozenset)) else ids


def _token_id(name: str, rule: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        _fail(name, rule, value)
    return int(value)


def _check_token_sets(p: SamplingParams) -> None:
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        _fail("allowed_token_ids", "a non-empty list", p.allowed_token_ids)
    if p.logprob_token_ids is not None:
        if len(p.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            rule = f"a list of at most {MAX_LOGPROB_TOKEN_IDS} token ids"
            _fail("logprob_token_ids", rule, len(p.logprob_token_ids))
        _set(p, "logprob_token_ids", list(dict.fromkeys(p.logprob_token_ids)) or None)
    if p.logit_bias is not None:
        _set(p, "logit_bias", _read_logit_bias(p.logit_bias))
    if p.bad_words is not None:
        _set(p, "bad_words", _texts("bad_words", p.bad_words, MAX_BAD_WORDS))
        for word in p.bad_words:
            if not word:
                _fail("bad_words", "made of non-empty strings", word)


def _check_scored(p: SamplingParams) -> None:
    """The candidates to score in the prompt, as a list of rows."""
    given = p.prompt_logprob_token_ids
    if given is None:
        return
    name, rule = "prompt_logprob_token_ids", "a non-empty list of lists of token ids (-1 pads)"
    if not isinstance(given, (list, tuple)):
        if not hasattr(given, "tolist"):
            _fail(name, rule, given)
        given = given.tolist()
    rows = []
    for row in given if isinstance(given, (list, tuple)) else ():
        if not isinstance(row, (list, tuple)):
            _fail(name, rule, row)
        ids = row if isinstance(row, list) else list(row)
        if not set(map(type, ids)) <= {int}:
            ids = [_token_id(name, rule, value) for value in ids]
        if min(ids, default=0) < -1:
            _fail(name, rule, min(ids))
        rows.append(ids)
    if not any(rows):
        _fail(name, rule, given)
    _set(p, name, rows)


def read_extra_args(name: str, given: object) -> dict[str, Any] | None:
    """What a request says to logits processors; `None` if that is nothing.

    Raises:
        InvalidRequest: it is no object, too large, or JSON cannot hold it.
    """
    if given is None or given == {}:
        return None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        _fail(name, "an object with names as keys", given)
    try:
        text = msgspec.json.encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError):
        _fail(name, "made of what JSON can hold", given)
    if len(text) > MAX_EXTRA_ARGS:
        _fail(name, f"at most {MAX_EXTRA_ARGS} bytes as JSON", len(text))
    read: dict[str, Any] = msgspec.json.decode(text)
    return read


def _read_logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        _fail("logit_bias", "an object of token id to number", bias)
    if len(bias) > MAX_LOGIT_BIAS:
        _fail("logit_bias", f"at most {MAX_LOGIT_BIAS} entries", len(bias))
    rule = "keyed by token ids (integers of at least 0)"
    found = {_token_id("logit_bias", rule, i): read_field("logit_bias", v) for i, v in bias.items()}
    if found and min(found) < 0:
        _fail("logit_bias", rule, min(found))
    return found


def _normalise(p: SamplingParams) -> None:
    """Give values of equal meaning one spelling, so that later code has one case."""
    if p.seed == -1:
        _set(p, "seed", None)
    if p.thinking_token_budget == -1:
        _set(p, "thinking_token_budget", None)
    if p.top_k == -1:
        _set(p, "top_k", 0)
    if p.greedy:
        for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            _set(p, name, neutral)
    elif p.temperature < MIN_TEMPERATURE:
        _set(p, "temperature", MIN_TEMPERATURE)
