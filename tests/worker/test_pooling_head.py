"""What is kept of a prompt that comes in chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import PoolerSpec
from quire.params import PoolingParams
from quire.worker.pooling_head import PoolingHead
from quire.worker.step_runner import Outcome

CHUNK, CHUNKS = 4, 6


class _Mean:
    """A pooler; a real one needs a model."""

    spec = PoolerSpec(task="embed", backbone="Llama", whole_prompts=False, pooling="mean", size=2)

    def __call__(self, rows: list[torch.Tensor], params: list[PoolingParams]) -> list[torch.Tensor]:
        return [part.mean(0) for part in rows]


def one_chunk(first: int, is_last: bool) -> Any:
    return SimpleNamespace(
        req_ids=["a"],
        query_start_loc=np.array([0, CHUNK], dtype=np.int32),
        positions=np.arange(first, first + CHUNK),
        samples=[int(is_last)],
    )


def test_chunks_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after each of them: of a long prompt that would be most of the work."""
    copied, cat = [], torch.cat

    def counted(parts: list[torch.Tensor]) -> torch.Tensor:
        copied.append(sum(map(len, parts)))
        return cat(parts)

    monkeypatch.setattr(torch, "cat", counted)
    head: Any = PoolingHead(_Mean())  # type: ignore[arg-type]
    new = SimpleNamespace(req_id="a", pooling_params=PoolingParams(task="embed"))
    head.take(SimpleNamespace(finished_req_ids=[], preempted_req_ids=[], scheduled_new_reqs=[new]))
    hidden, outcome = torch.arange(CHUNK * CHUNKS * 2.0).view(-1, 2), Outcome()
    for number in range(CHUNKS):
        first, is_last = number * CHUNK, number == CHUNKS - 1
        for _ in range(2):  # a step that is tried again changes nothing
            head.finish(one_chunk(first, is_last), hidden[first : first + CHUNK], outcome)
    got = np.frombuffer(outcome.pooled["a"].data, "<f4")
    assert got.tolist() == hidden.mean(0).tolist()
    assert copied == [CHUNK * CHUNKS] * 2
