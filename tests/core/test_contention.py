"""A pool hardly larger than one request, and two hundred of them: all finish, and most of the
work is done once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.config.scheduler import POLICIES

PROMPT, OUTPUT, BLOCK, COUNT = 160, 80, 16, 200


def token(request: Any) -> int:
    return (sum(request.all_token_ids) * 31 + request.num_tokens) % 1000


@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_livelock_and_little_recomputation(
    make: Callable[..., Any], policy: str, caching: bool, swap_blocks: int
) -> None:
    num_blocks = int(1.2 * (PROMPT + OUTPUT) / BLOCK) + 1
    bench = make(
        num_blocks=num_blocks,
        block_size=BLOCK,
        budget=64,
        caching=caching,
        max_model_len=PROMPT + OUTPUT,
        scheduling_policy=policy,
        swap_blocks=swap_blocks,
    )
    bench.check_every = 7  # 16,000 steps: a check takes three times as long as one
    for i in range(COUNT):
        bench.add(f"r{i}", [(i * 7 + j) % 997 for j in range(PROMPT)], max_tokens=OUTPUT)
    computed = 0
    while bench.scheduler.requests:
        bench.step(token)
        computed += bench.last.total_num_scheduled_tokens
    bench.scheduler.check_integrity()
    assert len(bench.finished) == COUNT
    useful = COUNT * (PROMPT + OUTPUT)
    assert computed <= 3 * useful, f"{computed / useful:.2f} times the useful tokens"
    for i in range(COUNT):
        alone = [(i * 7 + j) % 997 for j in range(PROMPT)]
        for _ in range(OUTPUT):
            alone.append((sum(alone) * 31 + len(alone)) % 1000)
        assert bench.tokens[f"r{i}"] == alone[PROMPT:]
