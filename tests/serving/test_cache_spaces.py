"""Several keys have a part of the prefix cache each; one key, or none, has all of it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import ServerConfig
from quire.config.key_file import digest_of
from quire.core.block_hash import extend_block_hashes
from quire.core.request import Request
from quire.params import SamplingParams
from quire.serving.app import build_app
from quire.serving.auth import KeyRing
from quire.serving.server_state import ServerState

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "hi"}]],
        "max_tokens": 2,
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
}


def sent(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-api-key", key.encode())]


async def salts(config: ServerConfig, path: str, keys: list[str | None], **fields: object) -> list:
    """What the engine gets as cache salt from a request with each key."""
    engine = FakeEngine()
    transport = httpx.ASGITransport(build_app(ServerState(config, engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key in keys:
            headers = {"x-api-key": key} if key else {}
            reply = await client.post(path, json={**BODIES[path], **fields}, headers=headers)
            assert reply.status_code == 200, reply.text
    return [one[4] for one in engine.submitted]


def hashes(salt: str | None) -> list[bytes]:
    """Of the blocks of one prompt: what the prefix cache finds them by."""
    request = Request("x", list(range(64)), SamplingParams(), cache_salt=salt)
    extend_block_hashes(request, 16)
    return request.block_hashes


@pytest.mark.parametrize("path", BODIES)
async def test_keys_find_nothing_of_each_other(path: str) -> None:
    config = ServerConfig(api_key=["one", "two"], admin_api_key=["ops"])
    plain = await salts(config, path, ["one", "two", "ops", "one"])
    salted = await salts(config, path, ["one", "two"], cache_salt="mine")
    # The same key finds its own, and nobody anything of another's or of what has no salt.
    assert plain[0] == plain[3]
    different = [*plain[:3], *salted, None, "mine"]
    found = [block for salt in different for block in hashes(salt)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (ServerConfig(), None),
        (ServerConfig(api_key=["one"]), "one"),
        (ServerConfig(api_key=["one", "two"], shared_prefix_cache=True), "two"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_otherwise_nothing_changes(config: ServerConfig, key: str | None, path: str) -> None:
    assert await salts(config, path, [key]) == [None]
    assert await salts(config, path, [key], cache_salt="mine") == ["mine"]


async def test_no_salt_leads_into_anothers_space() -> None:
    config = ServerConfig(api_key=["one", "two"])
    [target] = await salts(config, "/v1/completions", ["one"])
    assert await salts(config, "/v1/completions", ["two"], cache_salt=target) != [target]


def test_what_a_key_left_is_not_for_the_one_that_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a:{digest_of(b'a').hex()}")
    path.chmod(0o600)
    keys = KeyRing(ServerConfig(api_key_file=str(path)))
    assert keys.caller(sent("a")).space == ""
    path.write_text(f"bb:{digest_of(b'b').hex()}")
    keys.reload()
    assert keys.caller(sent("b")).space != ""


def test_a_key_for_metrics_sends_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a:{digest_of(b'a').hex()}\nb:{digest_of(b'b').hex()}:metrics")
    path.chmod(0o600)
    assert KeyRing(ServerConfig(api_key_file=str(path))).caller(sent("a")).space == ""


async def test_a_prefix_is_explained_in_the_part_of_a_key() -> None:
    config = ServerConfig(api_key=["one", "two"], admin_api_key=["ops"])
    [one] = await salts(config, "/v1/completions", ["one"])
    [ops] = await salts(config, "/v1/completions", ["ops"])
    [mine] = await salts(config, "/v1/completions", ["one"], cache_salt="mine")
    engine = FakeEngine()
    transport = httpx.ASGITransport(build_app(ServerState(config, engine)))
    asks = [
        ({"key": "key 0"}, one),
        ({"key": "key 0", "cache_salt": "mine"}, mine),
        ({}, ops),
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(**fields: object) -> httpx.Response:
            headers = {"x-api-key": "ops"}
            return await client.post(
                "/explain_prefix", json={"prompt": "x"} | fields, headers=headers
            )

        for fields, salt in asks:
            assert (await ask(**fields)).status_code == 200
            assert engine.salts[-1] == salt
        reply = await ask(key="nobody")
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "key")
