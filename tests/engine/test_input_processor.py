"""The gate: what passes, what is filled in, and every refusal with its field and its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.config import ModelConfig, ModelShape
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.processed_input import ProcessedInput
from quire.engine.frontend.request_ids import check_request_id
from quire.engine.frontend.sampling_checks import MAX_BAD_WORDS_CHARS
from quire.errors import ConfigError, ContextLengthExceeded, InvalidRequest, RequestError
from quire.params import MAX_SEED, SamplingParams
from quire.tokenizer import Tokenizer

VOCAB = 300
CONTEXT = 64
EOS = 257


def make_tokenizer() -> Tokenizer:
    """One token per byte, `Ġcat` and `cat`, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for piece in ("at", "cat", "Ġcat"):
        vocab[piece] = len(vocab) + 10  # leaves ids without an entry
    backend = Backend(models.BPE(vocab, [("a", "t"), ("c", "at"), ("Ġ", "cat")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"})


TOKENIZER = make_tokenizer()


def make_shape(**changes: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_ids": (EOS,),
    }
    return ModelShape(**sizes | changes)


def make(
    tokenizer: Tokenizer | None = TOKENIZER,
    *,
    shape: ModelShape | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> InputProcessor:
    options = {"max_model_len": CONTEXT, "generation_defaults": {}} | options
    return InputProcessor(ModelConfig(**model or {}), shape or make_shape(), tokenizer, **options)


def admit(
    prompt: Any = "a cat", gate: InputProcessor | None = None, **fields: Any
) -> ProcessedInput:
    outer = {k: fields.pop(k) for k in ("priority", "cache_salt") if k in fields}
    request_id = fields.pop("request_id", "r")
    params = SamplingParams(**fields)
    return (gate or make()).process(request_id, prompt, params, arrival_time=1.0, **outer)


def refusal(
    param: str, *words: str, error: type[RequestError] = InvalidRequest, **call: Any
) -> None:
    with pytest.raises(error) as caught:
        admit(**call)
    assert caught.value.param == param
    assert all(word in caught.value.message for word in words), caught.value.message
    assert len(caught.value.message) < 400


# --- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("ab", "ab", TOKENIZER.encode("ab")),
        ([1, 2, 3], None, [1, 2, 3]),
        ({"prompt": "ab"}, "ab", TOKENIZER.encode("ab")),
        ({"prompt_token_ids": [1, 2]}, None, [1, 2]),
        ({"prompt_token_ids": [1, 2], "prompt": "shown"}, "shown", [1, 2]),
    ],
)
def test_every_spelling_of_a_prompt(prompt: Any, text: str | None, ids: list[int]) -> None:
    done = admit(prompt)
    assert done.prompt_text == text
    assert [r.prompt_token_ids for r in done.requests] == [ids]


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {}, {"prompt": 5}, {"prompt_token_ids": "ab"}])
def test_other_types_are_no_prompt(prompt: Any) -> None:
    refusal("prompt", "must be", prompt=prompt)


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    refusal("prompt", "'promt'", "did you mean 'prompt'", prompt={"promt": "x"})
    media = {"prompt": "x", "multi_modal_data": {"image": "x"}}
    refusal("prompt", "multi_modal_data is not supported: prompts are text", prompt=media)


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    refusal("prompt", "at least one token", prompt=prompt)


BAD_IDS = [-1, VOCAB, VOCAB + 1, 2**31, 2**63, 10**4000, -(10**4000), 1.0, True, None, "1", [1]]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_a_bad_token_id_is_refused_with_its_position(bad: Any) -> None:
    refusal("prompt", "token 2", f"0 to {VOCAB - 1}", prompt=[0, VOCAB - 1, bad, -5])


def test_a_number_too_long_to_print_is_refused_too() -> None:
    huge = 10**5000  # Python raises ValueError when asked to print it
    refusal("prompt", "16610 bits", prompt=[huge])
    refusal("priority", "16610 bits", priority=huge)
    refusal("stop_token_ids", "16610 bits", stop_token_ids=[huge])


def test_a_tokenizer_larger_than_the_model_is_noticed() -> None:
    gate = make(shape=make_shape(vocab_size=100, eos_token_ids=()))
    refusal("prompt", "from 0 to 99", prompt="<eos>", gate=gate)


def test_text_without_a_tokenizer() -> None:
    refusal("prompt", "needs a tokenizer", gate=make(None))
    assert admit([1], make(None)).requests[0].prompt_token_ids == [1]


def test_surrogates_in_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        admit("a\ud800")


def test_special_tokens_around_text_are_the_callers_choice() -> None:
    asked: list[bool] = []

    class Spy(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            asked.append(add_special_tokens)
            return [1]

    gate = make(Spy(TOKENIZER._backend))
    gate.process("a", "x", SamplingParams(), arrival_time=0.0)
    gate.process("b", "x", SamplingParams(), arrival_time=0.0, add_special_tokens=False)
    assert asked == [True, False]


# --- lengths ------------------------------------------------------------------------------------


def test_the_prompt_must_leave_room_for_a_token() -> None:
    assert admit([1] * (CONTEXT - 1), max_tokens=None).params.max_tokens == 1
    for count in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        refusal("prompt", str(CONTEXT), str(count), error=ContextLengthExceeded, prompt=[1] * count)


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert admit([1] * 10, max_tokens=None).params.max_tokens == CONTEXT - 10
    assert admit([1] * 10, max_tokens=5).params.max_tokens == 5
    assert admit([1] * 10, max_tokens=10_000).params.max_tokens == 10_000  # the core caps it


def test_min_tokens_must_fit_the_context() -> None:
    assert admit([1] * 10, max_tokens=None, min_tokens=CONTEXT - 10).params.min_tokens == 54
    refusal("min_tokens", "54", "55", prompt=[1] * 10, max_tokens=None, min_tokens=55)
    refusal("min_tokens", "54", "90", prompt=[1] * 10, max_tokens=100, min_tokens=90)


def test_the_prompt_must_fit_the_kv_cache() -> None:
    gate = make(kv_capacity_tokens=32, block_size=16)
    admit([1] * 31, gate)
    call = {"prompt": [1] * 32, "gate": gate, "error": ContextLengthExceeded}
    refusal("prompt", "room for 32", "prompt of 32", "needs 48", **call)


def test_absurdly_long_text_is_refused_before_tokenising() -> None:
    class Exploding(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    gate = make(Exploding(TOKENIZER._backend))
    limit = 4 * CONTEXT * TOKENIZER.longest_token
    call = {"gate": gate, "error": ContextLengthExceeded}
    refusal("prompt", str(limit + 1), str(limit), str(CONTEXT), prompt="x" * (limit + 1), **call)
    with pytest.raises(AssertionError, match="tokenised"):
        admit("x" * limit, gate)


def test_text_that_fits_is_never_refused_unread() -> None:
    longest = "<bos>" * (CONTEXT - 1)
    assert len(admit(longest).requests[0].prompt_token_ids) == CONTEXT - 1


# --- parameters against the model ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_limits(name: str) -> None:
    admit(**{name: 20})
    refusal(name, "at most 20", "21", **{name: 21})
    refusal(name, "-1", "20", **{name: -1})
    unlimited = make(model={"max_logprobs": -1})
    admit(gate=unlimited, **{name: -1})
    admit(gate=unlimited, **{name: VOCAB})
    refusal(name, f"vocabulary's {VOCAB}", "301", gate=unlimited, **{name: VOCAB + 1})
    refusal(name, "at most 0", "1", gate=make(model={"max_logprobs": 0}), **{name: 1})


BAD_ROWS: list[tuple[Any, str]] = [
    ([], "non-empty"), ([[]], "non-empty"), ([[], []], "non-empty"), (5, "got 5"),
    ("ab", "got 'ab'"), ([5], "got 5"), ([[1.5]], "got 1.5"), ([["1"]], "got '1'"),
    ([[True]], "got True"), ([[-2]], "got -2"), (np.zeros(3, np.int64), "got 0"),
    (np.zeros((2, 2)), "got 0.0"), (np.zeros((2, 2, 2), np.int64), "got [0, 0]"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "told"), BAD_ROWS, ids=str)
def test_tokens_to_score_are_rows_of_ids(rows: Any, told: str) -> None:
    refusal("prompt_logprob_token_ids", told, prompt_logprob_token_ids=rows)


def test_tokens_to_score_fit_the_model_and_the_prompt() -> None:
    name, five = "prompt_logprob_token_ids", [1, 2, 3, 4, 5]
    refusal(name, "4 rows", "got 5", prompt=five, prompt_logprob_token_ids=[[1]] * 5)
    refusal(name, "2 rows", "first 3", "got 4", prompt=five, prompt_logprob_token_ids=[[1]] * 4,
            prompt_logprob_start=2)  # fmt: skip
    refusal(name, "0 rows", prompt=five, prompt_logprob_token_ids=[[1]], prompt_logprob_start=9)
    refusal(name, "at most 299", "300", prompt=five, prompt_logprob_token_ids=[[-1], [VOCAB]])
    refusal(name, "at most 20", "got 21", prompt=five, prompt_logprob_token_ids=[[1] * 21])
    refusal(name, "at most 63 rows", "got 64", prompt_logprob_token_ids=[[1]] * CONTEXT)
    refusal("prompt_logprob_start", "needs prompt_logprob_token_ids", prompt_logprob_start=0)
    for bad in (-1, 1.5, True, "1", 2**40):
        refusal("prompt_logprob_start", prompt=five, prompt_logprob_token_ids=[[1]] * 4,
                prompt_logprob_start=bad)  # fmt: skip
    ids = np.array([[1, 2], [3, -1]], dtype=np.int32)
    done = admit(five, n=2, prompt_logprob_token_ids=ids, prompt_logprob_start=np.int64(2))
    first, second = (request.sampling_params for request in done.requests)
    assert first.prompt_logprob_token_ids == [[1, 2], [3, -1]] and first.first_scored == 2
    assert first.reads_prefix_cache and second.first_scored is None, "a prompt is scored once"
    wide = admit(five, make(model={"max_logprobs": -1}), prompt_logprob_token_ids=[[1] * 50] * 4)
    assert wide.params.first_scored == 0


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 1, 2**31, 2**63, 10**4000])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_are_checked_against_the_logits(name: str, bad: int) -> None:
    value: Any = {VOCAB - 1: 1.0, bad: 1.0} if name == "logit_bias" else [VOCAB - 1, bad]
    refusal(name, f"at most {VOCAB - 1}", **{name: value})
    admit(**{name: {VOCAB - 1: 1.0} if name == "logit_bias" else [0, VOCAB - 1]})


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    assert admit(bad_words=["cat"]).params.bad_words_token_ids == [ids("cat"), ids(" cat")]
    assert admit(bad_words=[" cat"]).params.bad_words_token_ids == [ids("cat"), ids(" cat")]
    # a space that becomes a token of its own adds nothing: banning "dog" bans " dog"
    assert admit(bad_words=["dog"]).params.bad_words_token_ids == [ids("dog")]
    assert admit(bad_words=["\n", "  "]).params.bad_words_token_ids == [ids("\n"), ids("  ")]
    assert admit().params.bad_words_token_ids is None


def test_bad_words_that_cannot_be_banned() -> None:
    class Deaf(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] if add_special_tokens else []

    refusal(
        "bad_words", "'zzz'", "no token", gate=make(Deaf(TOKENIZER._backend)), bad_words=["zzz"]
    )
    refusal("bad_words", "need a tokenizer", prompt=[1], gate=make(None), bad_words=["a"])
    long = [f"{i:02}" + "x" * 998 for i in range(66)]
    refusal("bad_words", str(MAX_BAD_WORDS_CHARS), "66000", bad_words=long)
    small = make(shape=make_shape(vocab_size=100, eos_token_ids=()))
    refusal("bad_words", "at most 99", prompt=[1], gate=small, bad_words=["<eos>"])


def test_stop_strings_need_a_tokenizer() -> None:
    refusal("stop", "tokenizer", prompt=[1], gate=make(None), stop="x")


@pytest.mark.parametrize("field", [{"eos_token_ids": [1]}, {"bad_words_token_ids": [[1]]}])
def test_fields_of_the_engine_are_not_for_callers(field: dict[str, Any]) -> None:
    refusal(next(iter(field)), "filled in by the engine", **field)


def test_params_must_be_sampling_params() -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams, got dict"):
        make().process("r", "x", {}, arrival_time=0.0)  # type: ignore[arg-type]


def test_eos_ids_come_from_all_files_once_and_in_range() -> None:
    own = TOKENIZER.eos_token_id
    assert own is not None and own != EOS
    gate = make(shape=make_shape(eos_token_ids=(EOS, 299, VOCAB, -1)))
    assert admit(gate=gate).params.eos_token_ids == [own, EOS, 299]
    gate = make(generation_defaults={"eos_token_id": [EOS, 298, 10**9, None]})
    assert admit(gate=gate).params.eos_token_ids == [own, EOS, 298]
    gate = make(None, generation_defaults={"eos_token_id": 297})
    assert admit([1], gate, ignore_eos=True).params.eos_token_ids == [EOS, 297]


@pytest.mark.parametrize("wrong", [{"a": 1}, "</s>", [[2]], [2, "x"], True, 2.5])
def test_an_eos_id_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id must be a token id .* got .*override-gen"):
        make(generation_defaults={"eos_token_id": wrong})


# --- defaults -----------------------------------------------------------------------------------


def test_default_params_come_from_the_generation_config() -> None:
    defaults = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
        "min_p": None,
        "eos_token_id": [1],
        "transformers_version": "5.0",
    }
    params = make(generation_defaults=defaults).default_params()
    assert params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=99
    )
    assert make().default_params() == SamplingParams()
    assert make(generation_defaults={"do_sample": False}).default_params().greedy
    both = {"do_sample": False, "temperature": 0.5}
    assert make(generation_defaults=both).default_params().temperature == 0.5


def test_a_bad_default_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match=r"generation_config: temperature .* got 7"):
        make(generation_defaults={"temperature": 7}).default_params()


# --- ids, salts, priorities ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "x" * 257, "a\nb", "a\0", "a\ud800", 5, None, b"x"])
def test_request_ids_of_insane_shape(bad: Any) -> None:
    refusal("request_id", "must", request_id=bad)
    with pytest.raises(InvalidRequest):
        check_request_id(bad)
    admit(request_id="x" * 256)


@pytest.mark.parametrize("bad", ["", "x" * 1025, "\ud800", 5, b"x", ["x"]])
def test_cache_salts_of_insane_shape(bad: Any) -> None:
    refusal("cache_salt", cache_salt=bad)
    refusal("cache_salt", prompt={"prompt": "x", "cache_salt": bad})


def test_cache_salt_from_either_place() -> None:
    assert admit().requests[0].cache_salt is None
    assert admit(cache_salt="s\0ß").requests[0].cache_salt == "s\0ß"
    salted = {"prompt": "x", "cache_salt": "s"}
    assert admit(salted).requests[0].cache_salt == "s"
    assert admit(salted, cache_salt="s").requests[0].cache_salt == "s"
    refusal("cache_salt", "twice", prompt=salted, cache_salt="t")


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, 10**4000, 1.5, True, "1", None])
def test_priorities_out_of_range(bad: Any) -> None:
    refusal("priority", "64-bit", priority=bad)


@pytest.mark.parametrize("good", [0, -1, 2**63 - 1, -(2**63)])
def test_priorities_in_range(good: int) -> None:
    assert admit(priority=good).requests[0].priority == good


# --- seeds, children, internal ids --------------------------------------------------------------


def seeds(count: int = 20, **options: Any) -> list[int]:
    gate = make(**options)
    return [admit(gate=gate).seed for _ in range(count)]


def test_seeds_are_reproducible_from_configuration_and_order() -> None:
    assert seeds() == seeds()
    assert len(set(seeds())) == 20
    assert 2**51 < max(seeds(200)) < 2**53, "a double holds them, as JSON's readers need"
    assert not set(seeds()) & set(seeds(model={"seed": 1}))
    assert not set(seeds()) & set(seeds(entropy=b"server one"))
    assert seeds(entropy=b"x" * 1000) != seeds(entropy=b"x" * 1001)


def test_a_refused_request_uses_no_number() -> None:
    gate = make()
    refusal("prompt", prompt=[], gate=gate)
    assert admit(gate=gate).seed == seeds(1)[0]


def test_a_given_seed_stays() -> None:
    for seed in (0, 7, MAX_SEED, -2, -MAX_SEED - 1):
        done = admit(seed=seed)
        assert done.seed == done.params.seed == done.requests[0].sampling_params.seed == seed
    assert admit(seed=-1).seed == seeds(1)[0]


def test_one_completion() -> None:
    done = admit("a cat", request_id="chatcmpl-1", priority=3, max_tokens=9)
    (request,) = done.requests
    assert request.external_id == "chatcmpl-1"
    assert request.request_id == "chatcmpl-1-00000000"
    assert (request.index, request.priority, request.arrival_time) == (0, 3, 1.0)
    assert request.sampling_params == done.params
    assert request.output_token_ids == []


def test_children_of_n() -> None:
    done = admit(n=3, seed=MAX_SEED - 1, prompt_logprobs=2, logprobs=1)
    assert [r.request_id for r in done.requests] == [f"{i}_r-00000000" for i in range(3)]
    assert [r.index for r in done.requests] == [0, 1, 2]
    assert [r.sampling_params.seed for r in done.requests] == [MAX_SEED - 1, MAX_SEED, 0]
    assert [r.sampling_params.n for r in done.requests] == [1, 1, 1]
    assert [r.sampling_params.logprobs for r in done.requests] == [1, 1, 1]
    assert [r.sampling_params.prompt_logprobs for r in done.requests] == [2, None, None]
    assert done.params.n == 3 and done.params.prompt_logprobs == 2


def test_internal_ids_are_unique() -> None:
    gate = make()
    internal = [r.request_id for _ in range(50) for r in admit(gate=gate, n=2).requests]
    assert len(set(internal)) == 100


# --- anything at all ----------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
prompts = st.one_of(
    anything,
    st.fixed_dictionaries({}, optional={"prompt": anything, "prompt_token_ids": anything}),
    st.lists(st.integers(-2, VOCAB + 2), max_size=CONTEXT + 2),
)


@given(prompt=prompts, salt=anything, priority=anything, request_id=anything)
@settings(deadline=None, max_examples=300)
def test_whatever_comes_is_admitted_or_refused(
    prompt: Any, salt: Any, priority: Any, request_id: Any
) -> None:
    """Never another exception, and what passes is safe to index with."""
    try:
        done = make().process(
            request_id,
            prompt,
            SamplingParams(),
            arrival_time=0.0,
            priority=priority,
            cache_salt=salt,
        )
    except InvalidRequest:
        return
    (request,) = done.requests
    assert 1 <= len(request.prompt_token_ids) < CONTEXT
    assert all(type(i) is int and 0 <= i < VOCAB for i in request.prompt_token_ids)
    assert request.cache_salt is None or request.cache_salt.encode()
