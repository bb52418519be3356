"""Beam search from one prompt: which token sequences to continue, given the likeliest next tokens.

The engine knows nothing of it: each step asks for one token after every open sequence, with the
log-probabilities of `2 * width` candidates, and the prefix cache holds what was computed before.
So a search is a function of log-probabilities alone. Those do not depend on load, and ties are
broken by place and token id: the same prompt gives the same sequences, whatever else runs.

The rules are vLLM's. A candidate that is an end of sequence or a stop token completes its sequence,
however many others are likelier. The likeliest of the rest go on. At the end, completed and open
sequences are ranked by `cumulative_logprob / length ** length_penalty`, where the length is that of
prompt and output without the token that ended it. Two things go beyond vLLM: stop strings complete
a sequence too, and the search ends as soon as no open sequence can come in among the best.

Knows no engine, no request and no HTTP.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.bounds import read_field
from quire.errors import InvalidRequest
from quire.outputs import CompletionOutput, FinishReason, PositionLogprobs
from quire.params import RequestOutputKind, SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer, Spelling

CANDIDATES: Final = 2
"""Candidates per beam: with twice the width, `width` are left if half of them end the sequence."""

WIDEST: Final = 128
"""Sequences of a search: each is a request of its own at every step."""


@dataclass(slots=True)
class Beam:
    """One sequence."""

    token_ids: list[int]
    """Of the output."""
    positions: list[PositionLogprobs]
    """What each token was chosen from."""
    cumulative_logprob: float
    score: float = 0.0
    """What it is ranked by, once it is complete."""
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | str | None = None
    text: IncrementalDetokenizer | None = None
    """Looks for stop strings, if there are some."""


def check_width(width: int, max_logprobs: int, param: str) -> int:
    """A width as a plain number.

    Args:
        width: As given.
        max_logprobs: `--max-logprobs`, which bounds the candidates of a step; -1: no limit.
        param: The field's name in the caller's API.

    Raises:
        InvalidRequest: it is not from 1 to 128, or its candidates are more than `max_logprobs`.
    """
    width = read_field(param, width)
    if width > WIDEST:
        raise InvalidRequest(
            f"{param} must be at most {WIDEST} for beam search, got {width}.", param=param
        )
    if CANDIDATES * width > max_logprobs >= 0:
        raise InvalidRequest(
            f"{param} must be at most {max_logprobs // CANDIDATES} for beam search, which looks at "
            f"{CANDIDATES} * {param} log-probabilities (--max-logprobs {max_logprobs}), got "
            f"{width}.",
            param=param,
        )
    return width


def step_params(params: SamplingParams, width: int) -> SamplingParams:
    """The parameters of the one-token requests of a search.

    Args:
        params: What the whole output must be like.
        width: Of the search.
    """
    asked = 0 if params.logprobs is None else params.logprobs
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=-1 if asked < 0 else max(CANDIDATES * width, asked),
        stop_token_ids=params.stop_token_ids,  # the gate checks that they exist
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class BeamSearch:
    """The search for the best continuations of one prompt.

    Args:
        prompt_token_ids: The prompt; not empty.
        params: `max_tokens`, what ends a sequence, and how its text is shown. Nothing is sampled.
        width: Sequences that are continued, and returned.
        length_penalty: Above 0, longer sequences are preferred; below 0, shorter ones.
        max_model_len: The context in tokens.
        tokenizer: None: outputs have no text.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        width: int,
        length_penalty: float,
        max_model_len: int,
        tokenizer: Spelling | None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        room = max_model_len - len(prompt_token_ids)
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._params = params
        self._width = width
        self._penalty = length_penalty
        self._tokenizer = tokenizer
        self._ends: frozenset[int] = frozenset()
        self._stops = frozenset(params.stop_token_ids)
        self._num_steps = 0
        self._completed: list[Beam] = []
        # the best so far, at most `width`
        text = None
        if params.stop_strings:
            text = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)
        self._open = [Beam([], [], 0.0, text=text)]

    def set_ends(self, eos_token_ids: Sequence[int]) -> None:
        """Say which tokens end a sequence; the gate of the first step knows."""
        if not self._params.ignore_eos:
            self._ends = frozenset(eos_token_ids)

    @property
    def num_open(self) -> int:
        """Sequences to continue; 0 once the search has ended."""
        return len(self._open)

    @property
    def prompts(self) -> list[list[int]]:
        """The sequences to continue by one token each; empty once the search has ended."""
        return [self.prompt_token_ids + beam.token_ids for beam in self._open]

    def advance(self, positions: Sequence[PositionLogprobs]) -> None:
        """Take the candidates for the next token of each of `prompts`."""
        assert len(positions) == len(self._open), "as many answers as questions"
        self._num_steps += 1
        candidates: list[tuple[float, int, int]] = []
        for place, (beam, position) in enumerate(zip(self._open, positions, strict=True)):
            for token, logprob in self._likeliest(position):
                total = beam.cumulative_logprob + logprob
                if token in self._ends or token in self._stops:
                    self._complete(_grown(beam, token, position, total), token)
                else:
                    candidates.append((-total, place, token))
        self._continue(sorted(candidates), positions)
        if self._num_steps == self._max_tokens or self._is_decided():
            self._close()

    def _likeliest(self, position: PositionLogprobs) -> list[tuple[int, float]]:
        """Candidates that are possible at all, ties by token id."""
        ranked = sorted((-found.logprob, token) for token, found in position.items())
        return [
            (token, -cost) for cost, token in ranked[: CANDIDATES * self._width] if cost < math.inf
        ]

    def _continue(
        self, candidates: list[tuple[float, int, int]], positions: Sequence[PositionLogprobs]
    ) -> None:
        """Open the best candidates, in order, until there are enough. One that completes a stop
        string is complete, and leaves its place to the next."""
        before, self._open = self._open, []
        for cost, place, token in candidates:
            if len(self._open) == self._width:
                break
            beam = _grown(before[place], token, positions[place], -cost)
            if beam.text is not None:
                beam.text = beam.text.fork()
                if (stop := beam.text.update([token])) is not None:
                    self._complete(beam, stop)
                    continue
            self._open.append(beam)

    def _complete(self, beam: Beam, by: int | str) -> None:
        beam.finish_reason = FinishReason.STOP
        if isinstance(by, str) or by not in self._ends:
            beam.stop_reason = by
        length = len(beam.token_ids) - (not isinstance(by, str))
        self._rank(beam, length)

    def _rank(self, beam: Beam, length: int) -> None:
        """Keep a complete sequence if it is among the best; of equal ones, the first."""
        beam.score = self._score(beam.cumulative_logprob, length)
        insort(self._completed, beam, key=lambda one: -one.score)
        del self._completed[self._width :]

    def _score(self, total: float, length: int) -> float:
        return float(total / (len(self.prompt_token_ids) + length) ** self._penalty)

    def _is_decided(self) -> bool:
        """Whether no open sequence can come in among the best. What is added to a sequence makes
        it less likely, and the length that is best for its score is the longest, or with a negative
        penalty the shortest."""
        if not self._open or len(self._completed) < self._width:
            return not self._open
        length = self._max_tokens if self._penalty >= 0 else self._num_steps
        best = self._score(self._open[0].cumulative_logprob, length)
        return best < self._completed[-1].score

    def abort(self) -> None:
        """End it early: the open sequences are ranked as they are."""
        for beam in self._open:
            beam.finish_reason = FinishReason.ABORT
        self._close()

    def _close(self) -> None:
        for beam in self._open:
            self._rank(beam, len(beam.token_ids))
        self._open = []

    def outputs(self) -> list[CompletionOutput]:
        """The best sequences, best first, once the search has ended; at most `width`."""
        assert not self._open, "the search goes on"
        return [self._output(index, beam) for index, beam in enumerate(self._completed)]

    def _output(self, index: int, beam: Beam) -> CompletionOutput:
        text = IncrementalDetokenizer(self._tokenizer, self._params, self.prompt_token_ids)
        by_string = isinstance(beam.stop_reason, str)
        stop = text.update(beam.token_ids, None if by_string else beam.finish_reason)
        return CompletionOutput(
            index,
            text.take(finished=True, delta=False),
            beam.token_ids,
            beam.cumulative_logprob,
            self._shown(beam),
            str(FinishReason.STOP if stop is not None else beam.finish_reason),
            beam.stop_reason if stop is None else stop,
        )

    def _shown(self, beam: Beam) -> list[PositionLogprobs] | None:
        """At each position the chosen token, then as many of the likeliest as were asked for."""
        if (asked := self._params.logprobs) is None:
            return None
        shown = []
        for token, position in zip(beam.token_ids, beam.positions, strict=True):
            ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))
            kept = ranked if asked < 0 else ranked[:asked]
            shown.append({token: position[token], **dict(kept)})
        return shown


def _grown(beam: Beam, token: int, position: PositionLogprobs, total: float) -> Beam:
    return Beam([*beam.token_ids, token], [*beam.positions, position], total, text=beam.text)
