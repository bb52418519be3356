"""One server with the embedded model, and what the mixed requests give alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from live_server import Server, serving
from mixed import facts, mixed_requests
from quire import LLM, RequestOutput, SamplingParams


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server shared by the tests that only talk to it."""
    with serving() as running:
        yield running
        assert "integrity check failed" not in running.log


@pytest.fixture(scope="session")
def alone() -> list[RequestOutput]:
    """Each of the mixed requests by itself: nothing to share, nobody to meet."""
    with LLM(enable_prefix_caching=False) as llm:
        return [
            llm.generate(r["prompt"], SamplingParams(**r["params"]), use_tqdm=False)[0]
            for r in mixed_requests(64)
        ]


@pytest.fixture(scope="session")
def alone_facts(alone: list[RequestOutput]) -> list[Any]:
    """What must be the same of them."""
    return [facts(output) for output in alone]
