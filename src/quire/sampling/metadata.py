"""What the sampler knows of each row: parameters, output so far, and which steps apply.

`RequestSampling` is computed once per request; `SamplingMetadata` is put together for each batch
and lists, for every step, only the rows that need it. Token ids outside the vocabulary are left
out here, so that no later index can be out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire.kernels.decoder import Penalties, Pick
from quire.kernels.dispatch import Ops
from quire.params import MAX_SEED, SamplingParams
from quire.sampling.counts import TokenCounts
from quire.sampling.custom import RequestProcessors
from quire.sampling.logprobs import LogprobRow
from quire.sampling.masks import AskedMask, TokenMask
from quire.sampling.thinking import ThinkingBudget

ASKED_AFTER: Final = "mask_after_pick"
"""In the place of `token_mask`: the step of requests whose mask is asked about what was picked."""
_SEES_MASK: Final = frozenset(
    ("min_tokens", "thinking_budget", "early_processors", "late_processors")
)
"""Steps that go by what the mask has left. All others do the same to a token whatever a mask says
of the rest, so that the pick can name the tokens which decided it (`pick_tokens`)."""
_PICKED: Final = frozenset(
    ("repetition_penalty", "frequency_penalty", "presence_penalty")
    + ("temperature", "min_p", "top_k", "top_p")
)
"""Steps that a `Pick` says all about."""
_NO_PENALTIES: Final[Penalties] = (0, 0, 0, 1.0, 0.0, 0.0)
SLAB: Final = 2**18
"""Logits that a step after the greedy pick works on at once: 1 MiB of float32."""


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """The sampling side of one request, fixed at admission."""

    params: SamplingParams
    seed: int
    """Not negative: a seed of -2 is 2**63 - 2, as for `choice_seed`."""
    active: tuple[str, ...]
    """Names of the steps that this request needs, beyond those that every row goes through."""
    allowed_ids: np.ndarray
    bad_words: Mapping[int, Mapping[tuple[int, ...], np.ndarray]]
    """Last tokens of banned sequences, by the number of tokens before them and by these tokens: a
    step looks each number up once, however many words are banned."""
    stop_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    scored_ids: list[int]
    """`logprob_token_ids` of the vocabulary, in the order given."""
    numbers: tuple[float, float, float, float]
    """Temperature (0: greedy), top_k (0: off), top_p (1: off), logarithm of min_p (-inf: off)."""
    counts: TokenCounts
    """Tokens seen so far, for the penalties; knows the prompt only if repetition counts."""
    mask: TokenMask | None = None
    """Which tokens may come next; `None`: any."""
    processors: RequestProcessors | None = None
    """Logits processors that apply to it."""
    thinking: ThinkingBudget | None = None
    """Forces the end of the reasoning; `None`: it may last."""

    @property
    def is_picked(self) -> bool:
        """Whether `pick_after` says all about how logits become its tokens."""
        return _PICKED.issuperset(self.active)

    def pick_after(self, output: np.ndarray) -> Pick:
        """How its next token is picked. It holds addresses: use it before the next call."""
        return self.numbers, self.seed, len(output), self._penalties(output)

    def _penalties(self, output: np.ndarray) -> Penalties:
        p = self.params
        if p.repetition_penalty == 1.0 and p.frequency_penalty == p.presence_penalty == 0.0:
            return _NO_PENALTIES
        ids, counts = self.counts.follow(output)
        numbers = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        return ids.ctypes.data, counts.ctypes.data, len(ids), *numbers

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        mask: TokenMask | None = None,
        processors: RequestProcessors | None = None,
    ) -> RequestSampling:
        """Work out which steps a request needs, and the ids they touch.

        Args:
            params: What the user asked for.
            prompt_token_ids: The prompt.
            vocab_size: Size of a row of logits.
            mask: Says after each output which tokens may follow, as a grammar does.
            processors: Logits processors that apply to it.

        Raises:
            ValueError: `params.seed` is not set; admission chooses one for every request.
        """
        if params.seed is None:
            raise ValueError("a request must have a seed when it reaches the sampler")
        bias = {i: v for i, v in (params.logit_bias or {}).items() if i < vocab_size}
        words = [w for w in params.bad_words_token_ids or () if w and w[-1] < vocab_size]
        repeats = params.repetition_penalty != 1.0
        thinking = None
        if params.thinking is not None and params.thinking_token_budget is not None:
            thinking = ThinkingBudget(params.thinking, params.thinking_token_budget)
        active = (
            *_active(params, vocab_size),
            *(("thinking_budget",) if thinking is not None else ()),
        )
        if processors is not None:
            early = ("early_processors",) if processors.early else ()
            active += (*early, "late_processors") if processors.late else early
        if mask is not None:
            asked = isinstance(mask, AskedMask) and mask.asked_first
            active += (ASKED_AFTER if asked and _SEES_MASK.isdisjoint(active) else "token_mask",)
        return cls(
            params=params,
            seed=params.seed & MAX_SEED,
            active=active,
            numbers=_numbers(params, active),
            allowed_ids=_ids(params.allowed_token_ids or (), vocab_size),
            bad_words=_by_beginning(words),
            stop_ids=_ids(params.all_stop_token_ids, vocab_size),
            scored_ids=[i for i in params.logprob_token_ids or () if i < vocab_size],
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            counts=TokenCounts(_ids(prompt_token_ids if repeats else (), vocab_size), vocab_size),
            mask=mask,
            processors=processors,
            thinking=thinking,
        )


def _by_beginning(
    sequences: Iterable[Sequence[int]],
) -> dict[int, dict[tuple[int, ...], np.ndarray]]:
    """Distinct last tokens, by the number of tokens before them and by these tokens."""
    found: dict[int, dict[tuple[int, ...], set[int]]] = {}
    for *start, last in sequences:
        found.setdefault(len(start), {}).setdefault(tuple(start), set()).add(last)
    return {
        length: {start: np.array(sorted(last), np.int64) for start, last in by_start.items()}
        for length, by_start in found.items()
    }


def _ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Distinct ids of the vocabulary, ascending."""
    ids = np.array(sorted(set(token_ids)), dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _active(p: SamplingParams, vocab_size: int) -> Iterable[str]:
    """Names of the optional steps whose effect on this request is not nothing."""
    needs = (
        ("raw_logprobs", p.num_logprobs is not None),
        ("allowed_token_ids", p.allowed_token_ids is not None),
        ("bad_words", bool(p.bad_words_token_ids)),
        ("min_tokens", p.min_tokens > 0 and bool(p.all_stop_token_ids)),
        ("logit_bias", bool(p.logit_bias)),
        ("repetition_penalty", p.repetition_penalty != 1.0),
        ("frequency_penalty", p.frequency_penalty != 0.0),
        ("presence_penalty", p.presence_penalty != 0.0),
        ("temperature", not p.greedy),
        ("min_p", not p.greedy and p.min_p > 0.0),
        ("top_k", not p.greedy and 0 < p.top_k < vocab_size),
        ("top_p", not p.greedy and p.top_p < 1.0),
    )
    return (name for name, needed in needs if needed)


def _numbers(p: SamplingParams, active: Sequence[str]) -> tuple[float, float, float, float]:
    return (
        p.temperature if "temperature" in active else 0.0,
        float(p.top_k) if "top_k" in active else 0.0,
        p.top_p if "top_p" in active else 1.0,
        math.log(p.min_p) if "min_p" in active else -math.inf,
    )


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The rows of one batch."""

    requests: Sequence[RequestSampling]
    outputs: Sequence[np.ndarray]
    """Output token ids so far, for each row; their number is the row's output position."""
    rows: dict[str, list[int]]
    """By step name: the rows that need the step. Steps nobody needs are absent."""
    num_drafts: Sequence[int] = ()
    """For each row, how many of its last output tokens are drafts; empty: no row has any."""

    @classmethod
    def build(
        cls,
        requests: Sequence[RequestSampling],
        outputs: Sequence[np.ndarray],
        num_drafts: Sequence[int] = (),
    ) -> SamplingMetadata:
        """Collect the rows by step.

        Args:
            requests: Of each row. A request with drafts has several rows, in order: the first
                without a draft, each further one with one draft more.
            outputs: Output token ids so far of each row, its drafts at the end.
            num_drafts: See the field.
        """
        rows: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            for name in request.active:
                rows.setdefault(name, []).append(row)
        return cls(requests, outputs, rows, num_drafts)

    def count_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens of a row's prompt (if repetition counts) and output, with their numbers
        in the output; see `TokenCounts.follow`."""
        counts, output, drafts = self.requests[row].counts, self.outputs[row], self.drafts_of(row)
        return counts.follow_drafts(output, drafts) if drafts else counts.follow(output)

    def drafts_of(self, row: int) -> int:
        """How many of a row's last output tokens are drafts."""
        return self.num_drafts[row] if self.num_drafts else 0


def _index(rows: list[int]) -> slice | list[int]:
    """A slice, which copies nothing, if the rows follow one another."""
    adjacent = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if adjacent else rows


@dataclass(slots=True)
class SamplerState:
    """What the steps hand on: logits that change, and results that fill up."""

    logits: Tensor
    """`[rows, vocab]`; steps overwrite it."""
    meta: SamplingMetadata
    token_ids: Tensor
    """int64 `[rows]`."""
    ops: Ops
    """Of the model."""
    raw_logprobs: Tensor | None = None
    """float32 `[rows that asked, vocab]`, of the logits as the model gave them."""
    logprobs: dict[int, LogprobRow] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    """Reason by row."""
    best: Tensor | None = None
    """The largest logit that a mask has left, of each row that has one."""
    masks: tuple[np.ndarray, np.ndarray] | None = None
    """Rows with their masks, as `keep_allowed` takes them, if the pick is to apply them."""
    asks_after: bool = False
    """Whether the pick asks masks about its tokens, where requests allow it (`ASKED_AFTER`)."""

    def fail(self, row: int, reason: str) -> None:
        """Give up on a row; its logits become zeros so that later steps see plain numbers."""
        self.failed.setdefault(row, reason)
        self.logits[row] = 0.0

    def slabs(self, step: str) -> Iterator[tuple[list[int], Tensor]]:
        """Rows of a step and their logits `[n, vocab]`, a few at a time.

        A slab and what is computed from it stay in the processor's cache: for a large batch that
        is several times quicker than whole-batch temporaries.
        """
        rows = self.meta.rows.get(step, ())
        at_once = max(1, SLAB // self.logits.shape[1])
        for start in range(0, len(rows), at_once):
            some = list(rows[start : start + at_once])
            yield some, self.logits[_index(some)]

    def store(self, rows: list[int], logits: Tensor) -> None:
        """Put back the logits of a slab."""
        self.logits[_index(rows)] = logits

    def column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """One value per row as `[n, 1]` on the logits' device."""
        return torch.tensor(values, dtype=dtype, device=self.logits.device).unsqueeze(1)
