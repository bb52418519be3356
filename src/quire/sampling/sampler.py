"""The sampler: an ordered tuple of steps from logits to tokens.

Every step does the same to a row whatever else is in the batch: it is elementwise, or its sums
along the row are exact or in a fixed order. There is no generator: the random number of a token
follows from the request's seed, the output position and the token's id alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire.errors import NOT_A_NUMBER
from quire.kernels.dispatch import Ops
from quire.kernels.dispatch import ops as default
from quire.sampling.filters import min_p, temperature, top_k, top_p
from quire.sampling.logprobs import LogprobRow, gather_logprobs
from quire.sampling.metadata import ASKED_AFTER, SamplerState, SamplingMetadata
from quire.sampling.penalties import frequency_penalty, presence_penalty, repetition_penalty
from quire.sampling.processors import (
    NOTHING_LEFT,
    allowed_token_ids,
    bad_words,
    early_processors,
    late_processors,
    logit_bias,
    mask_now,
    masks_of_refused,
    min_tokens,
    thinking_budget,
    token_mask,
    token_mask_in_pick,
)
from quire.sampling.race import winners

Step = Callable[[SamplerState], None]

WITNESSES: Final = 16
"""Tokens about which a mask is asked at most; more take about as long as a mask."""
OVERFLOW: Final = "numerical: penalties or bias push a logit out of range"
_RESHAPING: Final = frozenset(
    ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "early_processors")
    + ("repetition_penalty", "frequency_penalty", "presence_penalty")
)
"""Steps after which a row may have no candidate, or a number out of range. `token_mask` is another,
but says itself what it has left."""
_SEES_MASKED: Final = _RESHAPING - {"allowed_token_ids"} | {"thinking_budget", "late_processors"}
"""Steps between `token_mask` and the end of the pick that read what it has left, or may undo it."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per row."""

    token_ids: list[int]
    logprobs: list[LogprobRow | None]
    """Only rows whose request asked for them."""
    failed: dict[int, str]
    """Reason by row; the row's token means nothing."""


def check_finite(state: SamplerState) -> None:
    """Fail rows in which the model produced NaN or infinity."""
    finite = state.ops.finite_rows(state.logits)
    if not bool(finite.all()):
        for row in (~finite).nonzero().flatten().tolist():
            state.fail(row, NOT_A_NUMBER)


def raw_logprobs(state: SamplerState) -> None:
    """Log-softmax of the model's own logits, for the rows that asked for log-probabilities."""
    rows = state.meta.rows.get("raw_logprobs")
    if rows is not None:
        every = len(rows) == len(state.logits)
        logits = (state.logits if every else state.logits[rows]).float()
        state.raw_logprobs = state.ops.log_softmax(logits, keep="logprobs")


def to_float32(state: SamplerState) -> None:
    """All later arithmetic is in float32."""
    state.logits = state.logits.float()


def check_candidates(state: SamplerState) -> None:
    """Fail rows in which the steps before left no token, or overflowed."""
    masked = () if state.best is None else state.best.tolist()
    if _RESHAPING.isdisjoint(state.meta.rows) and all(map(math.isfinite, masked)):
        return
    best = state.logits.amax(1)
    for row in (~torch.isfinite(best)).nonzero().flatten().tolist():
        largest = float(best[row])
        if state.asks_after and row in state.meta.rows.get(ASKED_AFTER, ()):
            largest = mask_now(state, row)  # it may hide what is out of range
        if not math.isfinite(largest):
            state.fail(row, NOTHING_LEFT if largest == float("-inf") else OVERFLOW)


def greedy_pick(state: SamplerState) -> None:
    """The likeliest token of every row, the lowest id among equals; random rows are overwritten
    later."""
    random = state.meta.rows.get("temperature", ())
    if len(random) < len(state.logits):
        state.token_ids = state.logits.argmax(1)


def random_pick(state: SamplerState) -> None:
    """The winner of an exponential race among the tokens that are left: see `race`."""
    meta = state.meta
    for rows, logits in state.slabs("temperature"):
        seeds = [meta.requests[row].seed for row in rows]
        positions = [len(meta.outputs[row]) for row in rows]
        state.token_ids[rows] = winners(logits, seeds, positions)


def pick(state: SamplerState) -> None:
    """All steps of `PICKING` in one call, with the same tokens."""
    meta = state.meta
    numbers = None
    if "temperature" in meta.rows:
        numbers = np.array([request.numbers for request in meta.requests])
    seeds = np.array([request.seed for request in meta.requests], dtype=np.uint64)
    positions = np.array([len(output) for output in meta.outputs], dtype=np.int64)
    late = _pick_slowly(state, meta.rows.get("late_processors", ()))

    def picked(
        part: slice,
        masks: tuple[np.ndarray, np.ndarray] | None,
        witnesses: np.ndarray | None = None,
    ) -> Tensor:
        assert state.ops.pick_tokens is not None, "the sampler asks before"
        given = None if numbers is None else numbers[part]
        where = seeds[part], positions[part]
        return state.ops.pick_tokens(state.logits[part], given, *where, masks, witnesses)

    asked = ASKED_AFTER in meta.rows
    witnesses = np.empty((len(seeds), WITNESSES), np.int32) if asked else None
    state.token_ids = picked(slice(len(seeds)), state.masks, witnesses)
    if witnesses is not None:
        _ask_masks(state, witnesses, picked)
    if state.masks is not None or asked:
        for row in (state.token_ids < 0).nonzero().flatten().tolist():
            state.fail(row, NOTHING_LEFT)
            state.token_ids[row] = 0
    for row, token in late.items():
        state.token_ids[row] = token


def _ask_masks(state: SamplerState, witnesses: np.ndarray, picked: Callable[..., Tensor]) -> None:
    """Ask masks about what was picked without them, and pick again what they do not allow."""
    rows = [row for row in state.meta.rows[ASKED_AFTER] if row not in state.failed]
    some = [set(of_row) - {-1} for of_row in witnesses[rows].tolist()]
    refused, masks = masks_of_refused(state, rows, some)
    for part in _parts(refused):
        here = [i for i, row in enumerate(refused) if part.start <= row < part.stop]
        places = np.array([refused[i] for i in here])
        again = picked(part, (places - part.start, masks[here]))
        state.token_ids[places] = again[places - part.start]


def _parts(rows: Sequence[int]) -> list[slice]:
    """Slices of the batch that hold some rows: one, whose rows are computed side by side, unless
    most of it would be other rows."""
    if rows and 2 * len(rows) < rows[-1] + 1 - rows[0]:
        return [slice(row, row + 1) for row in rows]
    return [slice(rows[0], rows[-1] + 1)] if rows else []


def _pick_slowly(state: SamplerState, rows: Sequence[int]) -> dict[int, int]:
    """Pick tokens of rows that have a step of others' between the steps of `PICKING`."""
    tokens = {}
    for row in rows:
        meta = SamplingMetadata.build([state.meta.requests[row]], [state.meta.outputs[row]])
        ids = torch.zeros(1, dtype=torch.int64)
        alone = SamplerState(state.logits[row : row + 1].clone(), meta, ids, state.ops)
        for step in PICKING:
            step(alone)
        if alone.failed:
            state.fail(row, alone.failed[0])
        tokens[row] = int(alone.token_ids[0])
    return tokens


PICKING: Final[tuple[Step, ...]] = (
    greedy_pick,
    temperature,
    min_p,
    late_processors,
    top_k,
    top_p,
    random_pick,
)
"""Steps that some kernels do at once (`pick`). These define what is picked."""


def pick_logprobs(state: SamplerState) -> None:
    """Log-probability and rank of each picked token, the likeliest ones, and those asked for."""
    if state.raw_logprobs is None:
        return
    rows = state.meta.rows["raw_logprobs"]
    requests = [state.meta.requests[row] for row in rows]
    found = gather_logprobs(
        state.raw_logprobs,
        state.token_ids[rows],
        [request.params.num_likeliest for request in requests],
        state.ops,
        [request.scored_ids for request in requests],
    )
    state.logprobs = dict(zip(rows, found, strict=True))


class Sampler:
    """Turns logits into tokens, in this order:

    1. `check_finite`: a row with NaN or infinity fails alone
    2. `raw_logprobs`: log-softmax of the logits as they came
    3. `to_float32`
    4. `allowed_token_ids`
    5. `token_mask`
    6. `bad_words`
    7. `min_tokens`: end-of-sequence and stop ids masked
    8. `logit_bias`
    9. `early_processors`: of others
    10. `repetition_penalty`
    11. `frequency_penalty`
    12. `presence_penalty`
    13. `thinking_budget`: the end of the reasoning, where it is forced
    14. `check_candidates`: a row without any token left fails alone
    15. `greedy_pick`: where the temperature is 0
    16. `temperature`
    17. `min_p`
    18. `late_processors`: of others, if they leave the likeliest token the likeliest
    19. `top_k`
    20. `top_p`
    21. `random_pick`
    22. `pick_logprobs`
    """

    steps: tuple[Step, ...] = (
        check_finite,
        raw_logprobs,
        to_float32,
        allowed_token_ids,
        token_mask,
        bad_words,
        min_tokens,
        logit_bias,
        early_processors,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        thinking_budget,
        check_candidates,
        greedy_pick,
        temperature,
        min_p,
        late_processors,
        top_k,
        top_p,
        random_pick,
        pick_logprobs,
    )

    def __init__(self, ops: Ops = default) -> None:
        """`ops` are those of the model whose logits come; by default the process's."""
        self._ops = ops

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: `[rows, vocab]`; overwritten.
            metadata: One entry per row.
        """
        ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        state = SamplerState(logits, metadata, ids, self._ops)
        state.asks_after = self.picks_at_once(logits.device.type)
        for step in self._plan(logits, metadata):
            step(state)
        rows = range(len(logits))
        logprobs = [state.logprobs.get(row) for row in rows]
        return SamplerOutput(state.token_ids.tolist(), logprobs, state.failed)

    def take(self, likeliest: Tensor) -> SamplerOutput:
        """What the steps give where no row needs any but `check_finite` and `greedy_pick`.

        Args:
            likeliest: int64 `[rows]`: the likeliest token, -1 for NaN or infinity in the row.
        """
        tokens = likeliest.tolist()
        failed = {row: NOT_A_NUMBER for row, token in enumerate(tokens) if token < 0}
        return SamplerOutput(tokens, [None] * len(tokens), failed)

    def _plan(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[Step, ...]:
        """The steps, those of `PICKING` as one where the kernels can, and with masks if it may."""
        if not self.picks_at_once(logits.device.type):
            return self.steps
        first = self.steps.index(PICKING[0])
        before = self.steps[:first]
        if _SEES_MASKED.isdisjoint(metadata.rows):
            before = tuple(token_mask_in_pick if s is token_mask else s for s in before)
        return (*before, pick, *self.steps[first + len(PICKING) :])

    def picks_at_once(self, device: str) -> bool:
        """Whether the kernels do the steps of `PICKING` in one call, for logits on a device. Masks
        are then asked after the pick, where requests allow it."""
        return self._ops.pick_tokens is not None and device == "cpu"
