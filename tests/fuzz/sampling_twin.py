"""Sampling once more, from what is published about it: plain numpy, nothing of quire.

A `Twin` is one completion: it knows the parameters as a caller gave them, the prompt, the seed
and the ids that end a sequence. Given the model's logits and the output so far it says which
tokens may come next, and given the logits alone what their log-probabilities are.

Logits change in float32, one operation after the other, so ties and the greedy token are exact.
Probabilities are float64 here and whole numbers of float32 weights there: a token within `EPS` of
a filter's boundary, or of the first to arrive, may fall on either side. Everything else has one
answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EPS = 1e-6
"""Share that float32 exponentials, and of the whole their sums, may be wrong by."""
WEIGHT_UNIT = 2.0**-43
"""Weights are multiples of this, cut off; the likeliest token's is 1."""
LOGPROB_ERROR = 3e-5

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 1e-2


def philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Any]:
    """Philox4x32-10 as in Salmon et al. (2011), figure 2 and table 2: words lowest first, each a
    whole number or an array of uint64."""
    r0, l0, r1, l1 = counter
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        product0, product1 = r0 * 0xD2511F53, r1 * 0xCD9E8D57
        r0, l0 = (product1 >> 32) ^ l0 ^ k0, product1 & 0xFFFFFFFF
        r1, l1 = (product0 >> 32) ^ l1 ^ k1, product0 & 0xFFFFFFFF
    return [r0, l0, r1, l1]


def exponentials(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """The exponential numbers of tokens at an output position: -ln(u), u from the middles of
    2**52 equal parts of the unit interval.

    A token's part is the upper 52 bits of two words, the higher one first. They are its id's
    remainder by four among the words of counter (position, id / 4, 0 and 1) and the seed as key.
    """
    halves, ids = np.meshgrid(np.arange(2, dtype=np.uint64), tokens.astype(np.uint64))
    words = philox(
        [np.full_like(ids, position % 2**32), np.full_like(ids, position >> 32), ids >> 2, halves],
        [seed % 2**32, (seed >> 32) % 2**32],
    )
    high, low = np.choose((ids & 3).astype(int), words).T
    part = (high << 32 | low) >> 12
    return np.asarray(-np.log((part.astype(np.float64) + 0.5) / 2.0**52))


@dataclass
class Twin:
    """One completion.

    `params` are fields of `SamplingParams` as the caller gave them, `banned` the token sequences
    that its `bad_words` stand for.
    """

    params: dict[str, Any]
    prompt: list[int]
    seed: int
    eos: frozenset[int]
    vocab: int
    banned: list[list[int]] = field(default_factory=list)

    def get(self, name: str, default: Any) -> Any:
        """A parameter, or what holds without it."""
        value = self.params.get(name)
        return default if value is None else value

    @property
    def stops(self) -> list[int]:
        """Ids that end the output."""
        eos = frozenset() if self.get("ignore_eos", False) else self.eos
        return sorted(eos | set(self.get("stop_token_ids", ())))

    # ---- which tokens may come next ----------------------------------------------------------

    def may_follow(self, raw: np.ndarray, output: list[int]) -> Callable[[int | None], bool]:
        """Whether a token (`None`: the request fails) may follow, given the model's logits."""
        if not np.isfinite(raw).all():
            return lambda token: token is None
        logits = self._penalised(self._masked(raw.astype(np.float32), output), output)
        best = logits.max()
        if not np.isfinite(best):
            return lambda token: token is None
        temperature = self.get("temperature", 1.0)
        if temperature < GREEDY_BELOW:
            likeliest = int(np.flatnonzero(logits == best)[0])
            return lambda token: token == likeliest
        scaled = (logits - best) / np.float32(max(temperature, LEAST_TEMPERATURE))
        return self._drawn(scaled, len(output))

    def _masked(self, logits: np.ndarray, output: list[int]) -> np.ndarray:
        if "allowed_token_ids" in self.params:
            forbidden = np.ones(self.vocab, bool)
            forbidden[[i for i in self.params["allowed_token_ids"] if i < self.vocab]] = False
            logits[forbidden] = -np.inf
        for *start, last in self.banned:
            if len(start) <= len(output) and output[len(output) - len(start) :] == start:
                logits[last] = -np.inf
        if len(output) < self.get("min_tokens", 0):
            masked = logits.copy()
            masked[[i for i in self.stops if i < self.vocab]] = -np.inf
            if masked.max() > -np.inf:
                logits = masked
        for token, bias in self.get("logit_bias", {}).items():
            if token < self.vocab:
                logits[token] += np.float32(bias)
        return logits

    def _penalised(self, logits: np.ndarray, output: list[int]) -> np.ndarray:
        counts = np.bincount(output, minlength=self.vocab)
        repetition = np.float32(self.get("repetition_penalty", 1.0))
        if repetition != 1:
            seen = counts > 0
            seen[self.prompt] = True
            logits = np.where(
                seen, np.where(logits > 0, logits / repetition, logits * repetition), logits
            )
        frequency = np.float32(self.get("frequency_penalty", 0.0))
        logits = logits - frequency * counts.astype(np.float32)
        presence = np.float32(self.get("presence_penalty", 0.0))
        return np.asarray(logits - presence * (counts > 0).astype(np.float32), np.float32)

    def _drawn(self, scaled: np.ndarray, position: int) -> Callable[[int | None], bool]:
        """min-p, top-k, top-p, then the token that arrives first at E / weight."""
        alive, unclear = scaled > -np.inf, np.zeros(self.vocab, bool)
        if (min_p := self.get("min_p", 0.0)) > 0:
            least = np.float32(math.log(min_p))
            unclear = np.abs(scaled - least) <= 1e-6 * max(1.0, abs(least))
            alive &= (scaled >= least) | unclear
        top_k, top_p = self.get("top_k", 0), self.get("top_p", 1.0)
        if 0 < top_k < self.vocab or top_p < 1:  # by falling logit, equal ones by rising id
            rank = np.argsort(np.where(alive, -scaled, np.inf), kind="stable")
        if 0 < top_k < self.vocab:
            alive[rank[top_k:]] = False
        weights = np.where(alive, np.exp(scaled.astype(np.float64)), 0.0)
        if top_p < 1:
            ranked = weights[rank]
            before, total = np.cumsum(ranked) - ranked, ranked.sum()
            doubt = (EPS + weights[unclear].sum() / total) * total
            alive[rank[before > top_p * total + doubt]] = False
            unclear[rank[np.abs(before - top_p * total) <= doubt]] = True
        ids = np.flatnonzero(alive)
        weights = weights[ids]
        numbers = exponentials(self.seed, position, ids)
        with np.errstate(divide="ignore", over="ignore"):
            earliest = numbers / (weights * (1 + EPS))
            latest = numbers / np.maximum(weights * (1 - EPS) - WEIGHT_UNIT, 0.0)
        latest[unclear[ids]] = np.inf  # if it is left at all
        winners = set(ids[earliest <= latest.min()].tolist())
        return lambda token: token in winners

    # ---- log-probabilities -------------------------------------------------------------------

    def wrong_logprobs(
        self,
        raw: np.ndarray,
        token: int,
        asked: int,
        ids: list[int],
        values: list[float],
        rank: int,
    ) -> str | None:
        """What is wrong with log-probabilities of one position; `None`: nothing.

        Args:
            raw: The model's logits.
            token: The sampled (or prompt) token.
            asked: How many of the likeliest; -1: all.
            ids, values: The token itself, then the likeliest in order.
            rank: Of the token, from 1.
        """
        x = raw.astype(np.float64) - raw.max()
        logprobs = x - math.log(np.exp(x).sum())
        count = self.vocab if asked < 0 else min(asked, self.vocab)
        if ids[0] != token or len(ids) != 1 + count or len(values) != 1 + count:
            return f"{len(ids) - 1} candidates beside {ids[:1]}, asked {asked} of {token}"
        off = np.abs(np.array(values) - logprobs[ids]).max()
        if off > LOGPROB_ERROR:
            return f"values are off by {off}"
        order = [(-value, i) for i, value in zip(ids[1:], values[1:], strict=True)]
        if order != sorted(order) or len(set(ids[1:])) != count:
            return "the likeliest are not in order of falling value and rising id"
        rest = np.delete(logprobs, ids[1:])
        if count and len(rest) and rest.max() > values[-1] + LOGPROB_ERROR:
            return "a likelier token is missing"
        low = 1 + int((logprobs > logprobs[token] + LOGPROB_ERROR).sum())
        high = 1 + int((logprobs >= logprobs[token] - LOGPROB_ERROR).sum())
        if not low <= rank <= high:
            return f"rank {rank}, must be from {low} to {high}"
        return None
