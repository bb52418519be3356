"""Beam search against plain searches: one that keeps every sequence, and one that tries them all.

The models are tables: log-probabilities drawn from the whole sequence so far, with ties.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from quire.engine.frontend.beams import CANDIDATES, BeamSearch, check_width, step_params
from quire.errors import InvalidRequest
from quire.outputs import Logprob
from quire.params import SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer

PROMPT = [3, 1, 4]


@dataclass(frozen=True)
class Words:
    """A tokenizer of a letter per token."""

    leading_spaces: int = 0
    all_special_ids: frozenset[int] = frozenset()
    added_ids: frozenset[int] = frozenset()

    def token_text(self, token_id: int) -> str | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()


@lru_cache(maxsize=100_000)
def logprobs_of(seed: int, vocab: int, sequence: tuple[int, ...]) -> tuple[float, ...]:
    """Coarse, so that there are ties."""
    rng = np.random.default_rng([seed, len(sequence), *sequence])
    logits = np.round(rng.normal(size=vocab) * 2) / 2
    return tuple(float(x) for x in logits - np.log(np.exp(logits).sum()))


def answer(seed: int, vocab: int, sequence: list[int], count: int) -> dict[int, Logprob]:
    """As an engine answers: the likeliest, in no order that counts."""
    scores = logprobs_of(seed, vocab, tuple(sequence))
    best = sorted(range(vocab), key=lambda i: (-scores[i], i))[:count]
    random.Random(len(sequence)).shuffle(best)
    return {i: Logprob(scores[i]) for i in best}


@dataclass
class Case:
    """A search to make."""

    seed: int
    vocab: int
    width: int
    max_tokens: int
    penalty: float = 1.0
    eos: tuple[int, ...] = (0,)
    ignore_eos: bool = False
    stops: tuple[int, ...] = ()
    strings: list[str] = field(default_factory=list)

    def found(self, max_model_len: int = 1000) -> list[tuple[Any, ...]]:
        params = SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stops), stop=self.strings or None,
        )  # fmt: skip
        search = BeamSearch(PROMPT, params, self.width, self.penalty, max_model_len, Words())
        search.set_ends(self.eos)
        self.num_rounds = 0
        while asked := search.prompts:
            self.num_rounds += 1
            count = CANDIDATES * self.width
            search.advance([answer(self.seed, self.vocab, one, count) for one in asked])
        return [
            (one.token_ids, one.cumulative_logprob, one.finish_reason, one.stop_reason)
            for one in search.outputs()
        ]

    def expected(self) -> list[tuple[Any, ...]]:
        """The plain way: nothing is thrown away before the end, and nothing ends early."""
        ends = set(self.stops) | (set() if self.ignore_eos else set(self.eos))
        live: list[tuple[list[int], float]] = [([], 0.0)]
        done: list[tuple[float, list[int], float, str, Any]] = []

        def keep(tokens: list[int], total: float, length: int, why: str, by: Any) -> None:
            score = total / (len(PROMPT) + length) ** self.penalty
            done.append((score, tokens, total, why, by))

        for _ in range(self.max_tokens):
            pool = []
            for place, (tokens, total) in enumerate(live):
                scores = logprobs_of(self.seed, self.vocab, tuple(PROMPT + tokens))
                best = sorted(range(self.vocab), key=lambda i: (-scores[i], i))
                for token in best[: 2 * self.width]:
                    if token in ends:
                        by = None if token in self.eos and not self.ignore_eos else token
                        keep([*tokens, token], total + scores[token], len(tokens), "stop", by)
                    else:
                        pool.append((-(total + scores[token]), place, token))
            before, live = live, []
            for cost, place, token in sorted(pool):
                tokens = [*before[place][0], token]
                text = Words().decode(tokens)
                hit = [s for s in self.strings if text.endswith(s)]
                if len(live) == self.width:
                    break
                if hit:
                    keep(tokens, -cost, len(tokens), "stop", max(hit, key=len))
                else:
                    live.append((tokens, -cost))
        for tokens, total in live:
            keep(tokens, total, len(tokens), "length", None)
        done.sort(key=lambda one: -one[0])
        return [one[1:] for one in done[: self.width]]


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    vocab = rng.randint(2, 12)
    return Case(
        seed=seed, vocab=vocab, width=rng.randint(1, 5), max_tokens=rng.randint(1, 9),
        penalty=rng.choice([1.0, 0.0, 2.5, -1.0, 0.3]),
        eos=tuple(rng.sample(range(vocab), rng.randint(0, 1))),
        ignore_eos=rng.random() < 0.25,
        stops=tuple(rng.sample(range(vocab), rng.randint(0, 1))) if rng.random() < 0.4 else (),
        strings=rng.choice([[], [], ["ab"], ["b", "ca"], ["aba", "ba"]]),
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_it_finds_what_a_plain_search_finds(first: int) -> None:
    early = 0
    for seed in range(first, first + 100):
        case = random_case(seed)
        assert case.found() == case.expected(), case
        early += case.num_rounds < case.max_tokens
    assert early, "no search ended early, so nothing shows that it may"


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0])
def test_wide_enough_it_finds_the_best_of_all(penalty: float) -> None:
    vocab, length = 4, 3
    for seed in range(20):
        case = Case(seed, vocab, vocab**length, length, penalty)
        everything = []
        for size in range(1, length + 1):
            for tokens in itertools.product(range(vocab), repeat=size):
                if 0 in tokens[:-1] or (size < length and tokens[-1] != 0):
                    continue
                total = 0.0
                for i, token in enumerate(tokens):
                    total += logprobs_of(seed, vocab, (*PROMPT, *tokens[:i]))[token]
                counted = size - (tokens[-1] == 0)
                everything.append((total / (len(PROMPT) + counted) ** penalty, list(tokens)))
        best = max(score for score, _ in everything)
        tokens, total, reason, _ = case.found()[0]
        assert (best, tokens) in everything
        assert reason == ("stop" if tokens[-1] == 0 else "length")
        assert total == pytest.approx(
            best * (len(PROMPT) + len(tokens) - (tokens[-1] == 0)) ** penalty
        )


def test_of_width_one_it_is_greedy() -> None:
    for seed in range(50):
        (found,) = Case(seed, 10, 1, 8, ignore_eos=True).found()
        tokens: list[int] = []
        for _ in range(8):
            scores = logprobs_of(seed, 10, (*PROMPT, *tokens))
            tokens.append(scores.index(max(scores)))
        assert found[0] == tokens


def test_a_penalty_prefers_long_or_short_outputs() -> None:
    lengths = {
        penalty: sum(len(Case(s, 6, 3, 8, penalty).found()[0][0]) for s in range(60))
        for penalty in (-2.0, 1.0, 6.0)
    }
    assert lengths[-2.0] < lengths[1.0] < lengths[6.0]


def test_the_context_bounds_the_output() -> None:
    found = Case(1, 9, 2, 50, ignore_eos=True).found(max_model_len=len(PROMPT) + 4)
    assert [(len(one[0]), one[2]) for one in found] == [(4, "length")] * 2


def test_what_is_shown_of_a_position() -> None:
    params = SamplingParams(max_tokens=1, logprobs=1)
    search = BeamSearch(PROMPT, params, 2, 1.0, 100, None)
    assert step_params(params, 2).logprobs == 4
    search.advance([{5: Logprob(-2.0), 6: Logprob(-1.0), 7: Logprob(-3.0)}])
    shown = [list(one.logprobs[0]) for one in search.outputs() if one.logprobs]
    assert shown == [[6], [5, 6]], "the chosen token first, then as many as were asked for"


def test_impossible_tokens_are_no_candidates() -> None:
    search = BeamSearch(PROMPT, SamplingParams(max_tokens=1), 2, 1.0, 100, None)
    search.advance([{5: Logprob(-0.0), 6: Logprob(-float("inf"))}])
    assert [one.token_ids for one in search.outputs()] == [[5]]


def test_widths() -> None:
    assert check_width(10, 20, "n") == 10 and check_width(128, -1, "n") == 128
    with pytest.raises(InvalidRequest, match=r"at most 10 .*--max-logprobs 20\), got 11") as caught:
        check_width(11, 20, "n")
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequest, match="n must be at most 128 for beam search, got 129"):
        check_width(129, -1, "n")
    with pytest.raises(InvalidRequest, match="from 1 to 128, got 129"):
        check_width(129, -1, "beam_width")


class Pieces(Words):
    """A tokenizer of a byte per token, whose text may go on in several ways within a character."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Window(Words):
    """The same for a tokenizer whose tokens are no byte strings."""

    def token_bytes(self, token_id: int) -> bytes:
        return None  # type: ignore[return-value]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", [Pieces, Window])
def test_text_goes_on_in_two_ways(kind: type[Words]) -> None:
    params = SamplingParams(max_tokens=9, stop="zz")
    for text, other in (("zügig", "zähzzx"), ("a€b", "a∞zz"), ("zz", "zyz"), ("日本", "日々zz")):
        for cut in range(len(text.encode())):
            head = list(text.encode()[:cut])
            if not other.encode().startswith(bytes(head)):
                continue
            first = IncrementalDetokenizer(kind(), params, [65])
            first.update(head)
            second = first.fork()
            for made, whole in ((first, text), (second, other)):
                alone = IncrementalDetokenizer(kind(), params, [65])
                made.update(list(whole.encode())[cut:])
                alone.update(list(whole.encode()))
                assert made.token_ids == alone.token_ids
                assert made.take(True, False) == alone.take(True, False)
                assert made.stop_string == alone.stop_string
