"""Steps that forbid tokens or shift their logits, before anything is picked.

Each is a pure function of a request's parameters and its output so far. `allowed_token_ids`, the
mask (a grammar's) and `bad_words` always hold: a request they leave without any token fails (see
`check_candidates` in the sampler). `min_tokens` yields: where masking end-of-sequence and stop
ids would leave nothing, the mask is not applied at that position.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.errors import GrammarFailed
from quire.sampling.masks import addends, permits
from quire.sampling.metadata import SamplerState

NEVER = float("-inf")


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
    vocab_size, meta = state.logits.shape[1], state.meta
    before: np.ndarray | None = None
    refused = False
    for row in meta.rows.get("token_mask", ()):
        mask, output = meta.requests[row].mask, meta.outputs[row]
        assert mask is not None, "the request named the step"
        # Beyond a draft that was not allowed a row means nothing, and no grammar could tell.
        is_draft = bool(meta.drafts_of(row))
        refused = is_draft and (refused or not permits(before, int(output[-1])))
        if refused:
            continue
        try:
            before = mask.allowed(output)
        except GrammarFailed as error:
            state.fail(row, error.message)
            refused = True
            continue
        if before is not None:
            banned = torch.from_numpy(addends(before, vocab_size)).to(state.logits.device)
            state.logits[row].add_(banned)


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


def logit_bias(state: SamplerState) -> None:
    """Add the request's bias to the logits of its ids."""
    rows = state.meta.rows.get("logit_bias")
    if rows is None:
        return
    requests = [state.meta.requests[row] for row in rows]
    where, ids = flat_index(state, rows, [r.bias_ids for r in requests])
    values = torch.from_numpy(np.concatenate([r.bias_values for r in requests]))
    state.logits[where, ids] += values.to(state.logits.device)


def flat_index(
    state: SamplerState, rows: list[int], ids: list[np.ndarray]
) -> tuple[Tensor, Tensor]:
    """Row and column of every (row, id) pair; `ids` is parallel to `rows`."""
    where = np.repeat(np.asarray(rows, np.int64), [len(i) for i in ids])
    device = state.logits.device
    return torch.from_numpy(where).to(device), torch.from_numpy(np.concatenate(ids)).to(device)
