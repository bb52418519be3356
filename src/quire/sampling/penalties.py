"""Penalties on tokens that were already there: repetition, then frequency, then presence.

Each is a pure function of prompt and output so far, so a request that comes back after a
preemption or a crash is penalised exactly as before. Formulas are those of Keskar et al. 2019
(CTRL, repetition) and OpenAI's API reference (frequency, presence).
"""

from __future__ import annotations

import numpy as np
import torch

from quire.sampling.metadata import SamplerState
from quire.sampling.processors import flat_index


def repetition_penalty(state: SamplerState) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output."""
    rows = state.meta.rows.get("repetition_penalty")
    if rows is None:
        return
    seen = [_seen(state, row) for row in rows]
    where, ids = flat_index(state, rows, seen)
    factors = [state.meta.requests[row].params.repetition_penalty for row in rows]
    factor = _spread(state, factors, seen)
    logits = state.logits[where, ids]
    state.logits[where, ids] = torch.where(logits > 0, logits / factor, logits * factor)


def _seen(state: SamplerState, row: int) -> np.ndarray:
    """Distinct tokens of prompt and output."""
    output = state.meta.outputs[row]
    ids = np.union1d(state.meta.requests[row].prompt_ids, output.astype(np.int64))
    return _inside(state, ids)


def _inside(state: SamplerState, ids: np.ndarray) -> np.ndarray:
    return ids[: np.searchsorted(ids, state.logits.shape[1])]


def _spread(state: SamplerState, values: list[float], ids: list[np.ndarray]) -> torch.Tensor:
    """One float32 value per (row, id) pair."""
    each = np.repeat(np.asarray(values, np.float32), [len(i) for i in ids])
    return torch.from_numpy(each).to(state.logits.device)


def frequency_penalty(state: SamplerState) -> None:
    """Subtract the penalty once for each time a token stands in the output."""
    rows = state.meta.rows.get("frequency_penalty")
    if rows is None:
        return
    counted = [
        np.unique(state.meta.outputs[row].astype(np.int64), return_counts=True) for row in rows
    ]
    ids = [_inside(state, found) for found, _ in counted]
    counts = np.concatenate([n[: len(i)] for (_, n), i in zip(counted, ids, strict=True)])
    penalty = _spread(state, [state.meta.requests[r].params.frequency_penalty for r in rows], ids)
    amount = penalty * torch.from_numpy(counts.astype(np.float32)).to(state.logits.device)
    where, columns = flat_index(state, rows, ids)
    state.logits[where, columns] -= amount


def presence_penalty(state: SamplerState) -> None:
    """Subtract the penalty once from every token that stands in the output."""
    rows = state.meta.rows.get("presence_penalty")
    if rows is None:
        return
    ids = [_inside(state, np.unique(state.meta.outputs[r].astype(np.int64))) for r in rows]
    where, columns = flat_index(state, rows, ids)
    penalties = [state.meta.requests[row].params.presence_penalty for row in rows]
    state.logits[where, columns] -= _spread(state, penalties, ids)
