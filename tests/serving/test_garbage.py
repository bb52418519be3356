"""A request leaves no circles of objects: the garbage collector would have to find them, and every
other request waits while it looks. With 400 refusals a second, that was a tenth of each second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asgi_caller import Caller
from circles import circles
from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.errors import TooManyRequests
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

COMPLETION = {"model": "quire-demo", "prompt": "ab", "max_tokens": 4}
CHAT = {"model": "quire-demo", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
TIMES = 20


async def _garbage(act: Callable[[], Awaitable[Any]]) -> Counter[str]:
    """What only the collector found, for each of many times."""
    await act()  # the first fills caches
    with circles(TIMES) as found:
        for _ in range(TIMES):
            await act()
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1/completions", COMPLETION, 200),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/completions", COMPLETION | {"temperature": -1}, 400),
        ("/v1/completions", COMPLETION | {"model": "other"}, 404),
    ],
)
async def test_no_circles_of_a_reply(
    path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    app = build_app(ServerState(ServerConfig(), FakeEngine()))

    async def act() -> None:
        caller = Caller(app, "POST", path, body | {"stream": stream})
        await caller.task
        assert caller.status == status

    assert not await _garbage(act)


async def test_no_circles_of_a_refusal() -> None:
    engine = FakeEngine()
    app = build_app(ServerState(ServerConfig(), engine))

    async def full(*args: Any, **how: Any) -> Any:
        raise TooManyRequests("The queue is full.", retry_after=1.0)

    engine.submit = full  # type: ignore[method-assign]

    async def act() -> None:
        caller = Caller(app, "POST", "/v1/completions", COMPLETION)
        await caller.task
        assert caller.status == 429

    assert not await _garbage(act)


async def test_no_circles_of_a_client_that_goes() -> None:
    app = build_app(ServerState(ServerConfig(), FakeEngine()))

    async def act() -> None:
        caller = Caller(app, "POST", "/v1/completions", COMPLETION | {"stream": True}, cut=20)
        await caller.task

    assert not await _garbage(act)
