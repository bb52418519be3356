"""Steps that forbid tokens or shift their logits, before anything is picked.

Each is a pure function of a request's parameters and its output so far. `allowed_token_ids`, the
mask (a grammar's) and `bad_words` always hold: a request they leave without any token fails (see
`check_candidates` in the sampler). Only the end of the reasoning is forced against bans, but not
against a grammar. `min_tokens` yields: where masking end-of-sequence and stop
ids would leave nothing, the mask is not applied at that position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from quire.errors import GrammarFailed, ProcessorFailed
from quire.sampling.masks import AskedMask, copy_words, permits
from quire.sampling.metadata import ASKED_AFTER, RequestSampling, SamplerState

NEVER = float("-inf")
NOTHING_LEFT: Final = (
    "no token can be sampled: allowed_token_ids, bad_words, the grammar and logits processors "
    "exclude every one"
)


def allowed_token_ids(state: SamplerState) -> None:
    """Only these ids can be sampled."""
    for row in state.meta.rows.get("allowed_token_ids", ()):
        ids = torch.from_numpy(state.meta.requests[row].allowed_ids).to(state.logits.device)
        kept = state.logits[row, ids]
        state.logits[row] = NEVER
        state.logits[row, ids] = kept


def token_mask(state: SamplerState) -> None:
    """Only tokens that the request's mask allows after the row's output can be sampled.

    It must come before `min_tokens`, which yields where it would leave nothing, and so has to see
    what is left.
    """
    masks = _masks(state)
    if masks is not None:
        state.best = state.ops.keep_allowed(state.logits, *masks)


def token_mask_in_pick(state: SamplerState) -> None:
    """The same, where no step before the pick needs to see what is left: the pick reads only what
    is allowed, while a pass of its own over the row would take longer than most masks take to
    make."""
    state.masks = _masks(state)


def _masks(state: SamplerState) -> tuple[np.ndarray, np.ndarray] | None:
    """The rows that have masks, and these; `None` if none has. Rows whose grammar fails do so
    here."""
    meta = state.meta
    asked = meta.rows.get("token_mask", [])
    if not state.asks_after:
        asked = sorted(asked + meta.rows.get(ASKED_AFTER, []))
    if not asked:
        return None
    rows: list[int] = []
    masks = _empty_masks(state, len(asked))
    before: np.ndarray | None = None
    refused = False
    for row in asked:
        mask, output = meta.requests[row].mask, meta.outputs[row]
        assert mask is not None, "the request named the step"
        # Beyond a draft that was not allowed a row means nothing, and no grammar could tell.
        is_draft = bool(meta.drafts_of(row))
        refused = is_draft and (refused or not permits(before, int(output[-1])))
        if refused:
            continue
        before = None
        if _take_mask(state, row, masks[len(rows)]):
            before = masks[len(rows)]
            rows.append(row)
        refused = row in state.failed
    return (np.array(rows, np.int64), masks[: len(rows)]) if rows else None


def masks_of_refused(
    state: SamplerState, rows: Sequence[int], witnesses: Sequence[set[int]]
) -> tuple[list[int], np.ndarray]:
    """Of the rows whose masks are asked after the pick, those that do not allow all tokens which
    decided it, and what they allow. Rows whose grammar fails do so here.

    Args:
        state: The batch.
        rows: In order.
        witnesses: These tokens, for each of the rows; none: the mask is needed in any case.
    """
    meta = state.meta
    refused: list[int] = []
    masks = _empty_masks(state, len(rows))
    lacking: list[tuple[int, AskedMask]] = []
    beyond = False
    for row, some in zip(rows, witnesses, strict=True):
        # To let isinstance look at a protocol would take longer than to ask.
        mask, output = cast("AskedMask", meta.requests[row].mask), meta.outputs[row]
        try:
            # As in `_masks`: beyond a draft that was not allowed a row means nothing.
            draft = {int(output[-1])} if meta.drafts_of(row) else set()
            beyond = bool(draft) and (beyond or not mask.permits(output[:-1], draft))
            if beyond or (some and mask.permits(output, some)):
                continue
        except GrammarFailed as error:
            state.fail(row, error.message)
            beyond = True
            continue
        lacking.append((row, mask))
        if meta.num_drafts and _take_mask(state, row, masks[len(refused)]):
            refused.append(row)  # at once, for the next row moves the mask on
    if lacking and not meta.num_drafts:
        lacking[0][1].make_together([(mask, meta.outputs[row]) for row, mask in lacking])
        for row, _ in lacking:
            if _take_mask(state, row, masks[len(refused)]):
                refused.append(row)
    return refused, masks[: len(refused)]


def mask_now(state: SamplerState, row: int) -> float:
    """Mask a row whose mask is otherwise asked after the pick. The largest logit left; of a row
    without a mask, too."""
    mask = _empty_masks(state, 1)
    if not _take_mask(state, row, mask[0]):
        return float(state.logits[row].amax())
    return float(state.ops.keep_allowed(state.logits, np.array([row], np.int64), mask)[0])


def _take_mask(state: SamplerState, row: int, into: np.ndarray) -> bool:
    """Copy a row's mask; gives whether it has one. A row whose grammar fails does so here."""
    mask = state.meta.requests[row].mask
    assert mask is not None, "the request named the step"
    try:
        found = mask.allowed(state.meta.outputs[row])
    except GrammarFailed as error:
        state.fail(row, error.message)
        return False
    if found is not None:
        copy_words(found, into, state.logits.shape[1])
    return found is not None


def _empty_masks(state: SamplerState, count: int) -> np.ndarray:
    return np.empty((count, -(-state.logits.shape[1] // 32)), dtype=np.int32)


def bad_words(state: SamplerState) -> None:
    """Ban the last token of a sequence whose other tokens end the output so far."""
    rows: list[int] = []
    banned: list[np.ndarray] = []
    for row in state.meta.rows.get("bad_words", ()):
        output = state.meta.outputs[row]
        for length, by_start in state.meta.requests[row].bad_words.items():
            if length <= len(output):
                last = by_start.get(tuple(output[len(output) - length :].tolist()))
                if last is not None:
                    rows.append(row)
                    banned.append(last)
    if rows:
        state.logits[flat_index(state, rows, banned)] = NEVER


def min_tokens(state: SamplerState) -> None:
    """Mask end-of-sequence and stop ids until there are enough output tokens."""
    meta = state.meta
    rows = [
        row
        for row in meta.rows.get("min_tokens", ())
        if len(meta.outputs[row]) < meta.requests[row].params.min_tokens
    ]
    if not rows:
        return
    where, ids = flat_index(state, rows, [meta.requests[row].stop_ids for row in rows])
    saved = state.logits[where, ids]
    state.logits[where, ids] = NEVER
    empty = state.logits.amax(1) == NEVER
    if bool(empty.any()):
        back = empty[where]
        state.logits[where[back], ids[back]] = saved[back]


def thinking_budget(state: SamplerState) -> None:
    """Where the budget of reasoning is spent, only the next token of its end can be sampled."""
    for row in state.meta.rows.get("thinking_budget", ()):
        if row not in state.failed:
            token = forced_end(state.meta.requests[row], state.meta.outputs[row])
            if token is not None:
                state.logits[row] = NEVER
                state.logits[row, token] = 0.0


def forced_end(request: RequestSampling, output: np.ndarray) -> int | None:
    """The token that must follow an output, int32 `[n]`, because the budget of reasoning is spent;
    `None`: there is none, or the request's grammar does not allow it."""
    token = None if request.thinking is None else request.thinking.forced(output)
    if token is None or request.mask is None:
        return token
    try:
        return token if permits(request.mask.allowed(output), token) else None
    except GrammarFailed:
        return None  # the step of the mask says so


def logit_bias(state: SamplerState) -> None:
    """Add the request's bias to the logits of its ids."""
    rows = state.meta.rows.get("logit_bias")
    if rows is None:
        return
    requests = [state.meta.requests[row] for row in rows]
    where, ids = flat_index(state, rows, [r.bias_ids for r in requests])
    values = torch.from_numpy(np.concatenate([r.bias_values for r in requests]))
    state.logits[where, ids] += values.to(state.logits.device)


def early_processors(state: SamplerState) -> None:
    """Logits processors of others that may change which token is the likeliest."""
    for row in state.meta.rows.get("early_processors", ()):
        _run_custom(state, row, late=False)


def late_processors(state: SamplerState) -> None:
    """Logits processors of others that leave the likeliest token the likeliest. The row's largest
    logit is 0 again afterwards."""
    for row in state.meta.rows.get("late_processors", ()):
        if _run_custom(state, row, late=True):
            best = state.logits[row].amax()
            if best == NEVER:
                state.fail(row, NOTHING_LEFT)
            else:
                state.logits[row] -= best


def _run_custom(state: SamplerState, row: int, *, late: bool) -> bool:
    """Whether the row has what the processors made of it, and not failed before or now."""
    processors = state.meta.requests[row].processors
    assert processors is not None, "the request named the step"
    if row in state.failed:
        return False
    try:
        found = processors.apply(state.logits[row], state.meta.outputs[row], late=late)
    except ProcessorFailed as error:
        state.fail(row, error.message)
        return False
    state.logits[row] = found
    return True


def flat_index(
    state: SamplerState, rows: list[int], ids: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    """Row and column of every (row, id) pair; `ids` is parallel to `rows`."""
    where = np.repeat(np.asarray(rows, np.int64), [len(i) for i in ids])
    device = state.logits.device
    return torch.from_numpy(where).to(device), torch.from_numpy(np.concatenate(ids)).to(device)
