"""A key file that changes while requests are answered fails none of them. Certificates: see
`test_tls.py`; both at once, over a real server: `benchmarks/reload.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.config.key_file import digest_of
from quire.serving.app import build_app
from quire.serving.server_state import ServerState

BODY = {"prompt": "hi", "max_tokens": 2}
CALLERS, EACH = 4, 100


def write(path: Path, number: int) -> None:
    """The key that stays, with another limit, and one that comes and goes."""
    keys = {"stays": f"concurrent={50 + number}", f"key{number}": ""}
    lines = [f"{name}:{digest_of(name.encode()).hex()}:user:{o}" for name, o in keys.items()]
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines))
    fresh.chmod(0o600)
    fresh.replace(path)


async def test_no_request_fails_while_keys_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, 0)
    state = ServerState(ServerConfig(api_key_file=str(path)), FakeEngine())
    app = build_app(state)
    transport = httpx.ASGITransport(app=app)

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(key: str, stream: bool) -> httpx.Response:
            headers = {"x-api-key": key}
            return await client.post(
                "/v1/completions", json=BODY | {"stream": stream}, headers=headers
            )

        async def caller(number: int) -> list[int]:
            return [(await ask("stays", bool(number % 2))).status_code for _ in range(EACH)]

        callers = [asyncio.ensure_future(caller(i)) for i in range(CALLERS)]
        changes = 0
        while not all(one.done() for one in callers):
            changes += 1
            write(path, changes)
            state.keys.reload()
            for name, status in ((f"key{changes}", 200), (f"key{changes - 1}", 401)):
                assert (await ask(name, False)).status_code == status
        answers = [status for one in callers for status in one.result()]
    assert answers == [200] * CALLERS * EACH
    assert changes > 10
    state.accounts.check_integrity()
