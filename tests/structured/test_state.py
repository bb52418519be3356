"""Which tokens may come next, against a slow automaton; and that it is a function of the output."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import GrammarFailed, InvalidRequest
from quire.params import StructuredOutputsParams
from quire.structured.compiler import Vocabulary
from quire.structured.state import AHEAD_ROWS, begin_masks, make_masks
from slow_regex import Slow, regexes
from vocabularies import DEMO, END, allowed_ids, demo, description, large, letters, state

WORDS = ["a", "b", "c", "ab", "ba", "abc", "cc", "aaa", "bcab"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["herbivorous", "carnivorous"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


BOMB = r"(\w{1,500}\s){1,500}(.*a){30}.{100}[bc]{1000}" + "(x|xy|xyz|[a-z]{1,900})*q{5,900}" * 3


def walk(found: Any, rng: random.Random, steps: int) -> list[int]:
    """A random output, with forced tokens appended as an engine does."""
    output: list[int] = []
    while len(output) < steps and END not in output:
        output.append(rng.choice(allowed_ids(found, output)))
        output += found.forced(output, steps - len(output))
    return output


@settings(max_examples=300, deadline=None)
@given(regexes(), st.integers(0, 2**16))
def test_masks_are_those_of_a_slow_automaton(tree: Any, seed: int) -> None:
    slow = Slow(tree)
    vocabulary = letters(WORDS)
    if not slow.live(slow.start):
        return
    found = state(vocabulary, forces=False, regex=slow.pattern)
    rng, output, at = random.Random(seed), [], slow.start
    for _ in range(12):
        wanted = [i for i, w in enumerate(WORDS, 1) if slow.live(slow.read(at, w))]
        if slow.accepts(at):
            wanted.insert(0, END)
        assert allowed_ids(found, output) == wanted, (slow.pattern, output)
        token = rng.choice(wanted)
        if token == END:
            break
        output.append(token)
        at = slow.read(at, WORDS[token - 1])


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_function_of_the_output(seed: int) -> None:
    rng = random.Random(seed)
    output = walk(state(demo(), json=SCHEMA), rng, 120)
    moved = state(demo(), json=SCHEMA)
    for _ in range(40):
        count = rng.randrange(len(output) + 1)
        fresh = state(demo(), json=SCHEMA)
        assert allowed_ids(moved, output[:count]) == allowed_ids(fresh, output[:count])
        assert moved.forced(output[:count], 99) == fresh.forced(output[:count], 99)


@pytest.mark.parametrize("seed", range(10))
def test_forced_tokens_are_the_same_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    output = walk(state(demo(), json=SCHEMA), rng, 150)
    single = state(demo(), json=SCHEMA)
    forced = 0
    for i, token in enumerate(output):
        ids = allowed_ids(single, output[:i])
        assert token in ids
        forced += len(ids) == 1
    assert forced > 10


def test_forced_tokens_have_a_limit_and_go_on() -> None:
    found = state(demo(), regex="(la){500}[xy]")
    first = found.forced([], 10_000)
    assert 0 < len(first) <= 256
    assert found.forced(first, 5) and len(found.forced(first, 5)) == 5
    assert found.forced(first[:7], 3) == first[7:10]


def test_text_without_end_is_refused() -> None:
    endless = StructuredOutputsParams(grammar='start: "la" start')
    with pytest.raises(InvalidRequest, match="Too many items"):
        demo().check(demo().settle(endless))


def test_the_end_is_forced_where_nothing_else_may_follow() -> None:
    found = state(demo(), choice=["extraordinary", "extravagant"])
    output = found.forced([], 99)
    while END not in output:
        output.append(allowed_ids(found, output)[0])
        output += found.forced(output, 99)
    assert output.count(END) == 1 and output[-1] == END
    assert demo().tokens.decode_str(output[:-1]) in ("extraordinary", "extravagant")
    assert found.forced(output, 99) == []


def test_without_forcing_any_spelling_is_allowed() -> None:
    free, held = state(demo(), forces=False, regex="hello"), state(demo(), regex="hello")
    assert len(allowed_ids(free, [])) > len(allowed_ids(held, [])) == 1
    assert free.forced([], 9) == []


ARITHMETIC = """
root ::= expr "=" num
expr ::= term ([-+*/] term)*
term ::= name | num | "(" expr ")"
name ::= [a-z] [a-z0-9_]*
num  ::= [0-9]+
"""
TAG = {
    "type": "triggered_tags",
    "triggers": ["<a"],
    "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA},
              "end": "</a>"}],
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA}, {"json_object": True}, {"regex": r"[a-zé]{3,20}( [ἀ-ἇ]|\d+)*"},
    {"choice": ["extraordinary", "extra", "ex 🙂"]}, {"grammar": ARITHMETIC},
    {"structural_tag": {"type": "structural_tag", "format": TAG}},
    {"regex": "(?s:.*)"},
    {"regex": "[a-z]{0,9}", "reasoning": {"opening": "<t>", "closing": "</t>"}},
]  # fmt: skip


def twice_spelled() -> Vocabulary:
    """Tokens of single bytes beside others of the same text, and one without any."""
    words = [*'abc{}[]":,é1', "ab", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {"<end>": END, **{word: i for i, word in enumerate(words, 1)}}
    made = description(vocab, [])
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    made["decoder"] = {"type": "Sequence", "decoders": decoders}
    made["pre_tokenizer"] = None
    made["model"]["byte_fallback"] = True
    return Vocabulary(json.dumps(made), len(vocab) + 3, [END])


def two_ends() -> Vocabulary:
    """Two tokens that may end an output."""
    return Vocabulary(DEMO.read_text("utf-8"), 2048, [END, 2])


@pytest.mark.parametrize("make", [demo, twice_spelled, two_ends])
@pytest.mark.parametrize("wanted", FORMS, ids=lambda form: next(iter(form)))
def test_what_is_permitted_is_what_the_mask_allows(make: Any, wanted: dict[str, Any]) -> None:
    vocabulary, rng = make(), random.Random(6)
    asked, output = state(vocabulary, **wanted), []
    for _ in range(25):
        allowed = set(allowed_ids(state(vocabulary, **wanted), output))
        array = np.array(output, np.int32)
        said = {t for t in range(vocabulary.vocab_size) if asked.permits(array, [t])}
        assert said == allowed
        assert set(allowed_ids(asked, output)) == allowed, "asking changes no mask"
        more = sorted(allowed.difference(vocabulary.eos_token_ids))
        if not more:
            break
        output.append(rng.choice(more))


def test_what_is_permitted_in_a_large_vocabulary() -> None:
    rng, vocabulary = random.Random(7), large()
    for wanted in ({"json": SCHEMA}, {"grammar": ARITHMETIC}):
        asked, output = state(vocabulary, **wanted), []
        for _ in range(12):
            allowed = allowed_ids(state(vocabulary, **wanted), output)
            array = np.array(output, np.int32)
            some = {*rng.sample(range(vocabulary.vocab_size), 2000), *allowed[:500]}
            said = {t for t in some if asked.permits(array, [t])}
            assert said == some.intersection(allowed)
            output.append(rng.choice(allowed))


def test_another_output_is_refused_and_forgotten() -> None:
    found = state(demo(), regex="[ab]+c")
    good = allowed_ids(found, [])
    with pytest.raises(GrammarFailed, match="does not follow"):
        found.allowed(np.array([demo().tokens.tokenize_str("x")[0]], np.int32))
    assert allowed_ids(found, []) == good


def test_partial_characters() -> None:
    """Tokens of single bytes spell characters that no token has as a whole."""
    text = "ἀ🙂é"
    found = state(demo(), regex=r"[ἀ-ἇ][\U0001F600-\U0001F64F]é")
    tokens = demo().tokens.tokenize_str(text)
    assert len(tokens) > len(text)
    for i, token in enumerate(tokens):
        assert token in allowed_ids(found, tokens[:i])
    assert allowed_ids(found, tokens) == [END]


def test_masks_made_together_are_those_made_alone() -> None:
    rng = random.Random(3)
    outputs = [walk(state(demo(), json=SCHEMA), rng, 9 + 7 * i) for i in range(12)]
    states = [state(demo(), json=SCHEMA) for _ in outputs]
    arrays = [np.array(output, np.int32) for output in outputs]
    make_masks(list(zip(states, arrays, strict=True)))
    for together, output in zip(states, outputs, strict=True):
        assert allowed_ids(together, output) == allowed_ids(state(demo(), json=SCHEMA), output)


def test_masks_made_ahead_are_those_made_alone() -> None:
    rng = random.Random(4)
    outputs = [walk(state(demo(), json=SCHEMA), rng, 5 + 3 * i) for i in range(2 * AHEAD_ROWS)]
    states = [state(demo(), json=SCHEMA) for _ in outputs]
    for one, output in zip(states, outputs, strict=True):
        one.follow(output[:-1])
    lacking = [one for one in states if one.wants_mask()]
    assert len(lacking) >= AHEAD_ROWS
    begin_masks(states)
    assert not any(one.wants_mask() for one in lacking), "another thread makes them"
    for i, (one, output) in enumerate(zip(states, outputs, strict=True)):
        asked = output[: (len(output) - 1, len(output), len(output) // 2)[i % 3]]  # on, after, back
        assert allowed_ids(one, asked) == allowed_ids(state(demo(), json=SCHEMA), asked)
        assert allowed_ids(one, output[:-1]) == allowed_ids(state(demo(), json=SCHEMA), output[:-1])


def test_a_limit_met_ahead_fails_one_request() -> None:
    rng, output, bomb = random.Random(0), [], state(demo(), regex=BOMB)
    with pytest.raises(GrammarFailed, match="more work"):
        while True:
            bomb.follow(output)
            others = [state(demo(), regex="[a-z]+") for _ in range(AHEAD_ROWS)]
            begin_masks([*others, bomb])
            output.append(rng.choice(allowed_ids(bomb, output)))
    fresh = allowed_ids(state(demo(), regex="[a-z]+"), [])
    assert all(allowed_ids(other, []) == fresh for other in others)


def test_a_large_vocabulary() -> None:
    rng = random.Random(5)
    found = state(large(), json=SCHEMA)
    text = large().tokens.decode_str([t for t in walk(found, rng, 400) if t != END])
    assert re.match(r'\{[ \n\r\t]{0,8}"name"', text)
    assert max(allowed_ids(state(large(), regex="[a-z]+"), [])) > 100_000


def test_limits_hold_while_masks_are_made() -> None:
    found = state(demo(), regex=BOMB)
    with pytest.raises(GrammarFailed, match="more work"):
        walk(found, random.Random(0), 3000)


def test_sets_of_tokens_that_are_taken_as_a_whole_change_no_mask() -> None:
    """Long tokens, and strings whose longest length comes near."""
    rng = random.Random(5)
    # Spelled as byte-level tokenizers do: space, newline, delete, and the two bytes of é.
    pieces = ["a", "Ġ", "\\", '"', "Ċ", "ġ", "Ã", "©", "Ã©", "ab", "1", ",", "[", "]", "{", "}"]
    words = ["a" * n for n in range(1, 160)] + ["Ã©" * n for n in (2, 9, 10, 11, 40, 41, 64)]
    words += ["".join(rng.choices(pieces, k=rng.choice([2, 3, 9, 30, 41, 60]))) for _ in range(900)]
    vocabulary = letters([*dict.fromkeys([*pieces, *words])])
    plain = vocabulary.tokens.with_slices([])
    string = {"type": "array", "items": {"type": "string", "maxLength": 150}}
    for asked in ({"json": string}, {"json": {"type": "string"}}, {"regex": '"[^"]{0,90}"'}):
        grammar = vocabulary.settle(StructuredOutputsParams(**asked))
        seen = 0
        for _ in range(6):
            ours = vocabulary.compile(grammar)
            theirs = llguidance.LLMatcher(plain, grammar.text, log_level=0)
            for _ in range(12):
                mask = ours.compute_bitmask()
                assert mask == theirs.compute_bitmask(), asked
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
                allowed = [int(i) for i in bits.nonzero()[0] if i != END]
                if not allowed:
                    break
                seen += len(allowed)
                token = rng.choice(allowed)
                assert ours.consume_token(token) and theirs.consume_token(token)
        assert seen > 2000, asked
