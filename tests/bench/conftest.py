"""A server with the embedded model on a real socket, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import Server, serving


@pytest.fixture(scope="session")
def bench_server() -> Iterator[Server]:
    with serving() as running:
        yield running
