"""Penalties on tokens that have occurred before: repetition, then frequency, then presence.

Each is a pure function of prompt and output so far, so a request that comes back after a
preemption or a crash is penalised exactly as before. Formulas are those of Keskar et al. 2019
(CTRL, repetition) and OpenAI's API reference (frequency, presence).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.sampling.metadata import SamplerState
from quire.sampling.processors import flat_index


def repetition_penalty(state: SamplerState) -> None:
    """Divide positive and multiply negative logits of tokens in prompt or output."""
    rows = state.meta.rows.get("repetition_penalty")
    if rows is None:
        return
    where, ids, _, sizes = _seen(state, rows)
    factor = _spread(state, [state.meta.requests[r].params.repetition_penalty for r in rows], sizes)
    logits = state.logits[where, ids]
    state.logits[where, ids] = torch.where(logits > 0, logits / factor, logits * factor)


def frequency_penalty(state: SamplerState) -> None:
    """Subtract the penalty once for each time a token stands in the output."""
    rows = state.meta.rows.get("frequency_penalty")
    if rows is None:
        return
    where, ids, counts, sizes = _seen(state, rows)
    penalty = _spread(state, [state.meta.requests[r].params.frequency_penalty for r in rows], sizes)
    # Tokens of the prompt alone have count 0: subtracting 0 changes nothing.
    state.logits[where, ids] -= penalty * counts


def presence_penalty(state: SamplerState) -> None:
    """Subtract the penalty once from every token that stands in the output."""
    rows = state.meta.rows.get("presence_penalty")
    if rows is None:
        return
    where, ids, counts, sizes = _seen(state, rows)
    penalty = _spread(state, [state.meta.requests[r].params.presence_penalty for r in rows], sizes)
    state.logits[where, ids] -= penalty * (counts > 0)


def _seen(state: SamplerState, rows: list[int]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Row, id and number in the output of every token seen by some rows, and how many each has."""
    found = [state.meta.count_tokens(r) for r in rows]
    where, ids = flat_index(state, rows, [ids for ids, _ in found])
    counts = torch.from_numpy(np.concatenate([counts for _, counts in found]))
    return where, ids, counts.to(state.logits.device), [len(ids) for ids, _ in found]


def _spread(state: SamplerState, values: list[float], sizes: list[int]) -> Tensor:
    """Each row's float32 value, repeated for each of its tokens."""
    each = np.repeat(np.asarray(values, np.float32), sizes)
    return torch.from_numpy(each).to(state.logits.device)
