"""`GET /server_info` tells the configuration, and nothing that is nobody's business."""

from __future__ import annotations

import dataclasses

import httpx
import pytest

from fake_engine import FakeEngine
from quire.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ObservabilityConfig,
    ServerConfig,
)
from quire.serving.app import build_app
from quire.serving.server_info import SECRET, told_value
from quire.serving.server_state import ServerState

KEY = {"authorization": "Bearer operators-secret"}
SERVER = ServerConfig(
    api_key=["very-secret-key", "another-secret"],
    admin_api_key=["operators-secret"],
    journal_dir="/srv/hidden/journal",
    journal_key_file="/srv/hidden/key.bin",
    uds="/run/hidden/quire.sock",
    handover_socket="~/hidden/handover.sock",
)
ENGINE = EngineConfig(
    model=ModelConfig(model="/srv/hidden/my-model", max_model_len=512),
    cache=CacheConfig(swap_dir="../hidden/swap", swap_space=1),
    observability=ObservabilityConfig(
        otlp_traces_endpoint="https://name:password@traces.example:4317/v1?token=hidden",
        profiler_config={"profiler": "torch", "torch_profiler_dir": "/srv/hidden/traces"},
    ),
)


@pytest.fixture
def client(engine: FakeEngine) -> httpx.AsyncClient:
    engine.config = ENGINE
    engine.info = {"num_blocks": 7, "weights": "/srv/hidden/weights.bin"}
    transport = httpx.ASGITransport(build_app(ServerState(SERVER, engine)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY)


@pytest.mark.parametrize("form", ["json", "text"])
async def test_no_key_no_folder_no_password(client: httpx.AsyncClient, form: str) -> None:
    reply = await client.get("/server_info", params={"config_format": form})
    assert reply.status_code == 200
    for word in ("secret", "hidden", "password", "token=", "/srv", "/run"):
        assert word not in reply.text, word
    for word in ("my-model", "journal", "quire.sock", "traces.example:4317", "weights.bin"):
        assert word in reply.text, word


async def test_every_field_is_told(client: httpx.AsyncClient) -> None:
    told = (await client.get("/server_info?config_format=json")).json()
    config = told["vllm_config"]
    for section, given in {**ENGINE.to_dict(), "server": dataclasses.asdict(SERVER)}.items():
        assert set(config[section]) == set(given)
    assert config["model"]["max_model_len"] == 512
    assert config["core"] == {"num_blocks": 7, "weights": ".../weights.bin"}
    for name in ("api_key", "admin_api_key"):
        assert config["server"][name] == "(not shown)"
    assert told["versions"]["quire"] and told["versions"]["torch"]


async def test_text_is_the_default(client: httpx.AsyncClient) -> None:
    lines = (await client.get("/server_info")).json()["vllm_config"].splitlines()
    assert "model.max_model_len=512" in lines
    assert 'model.model=".../my-model"' in lines


async def test_refusals(client: httpx.AsyncClient) -> None:
    reply = await client.get("/server_info", params={"config_format": "xml"})
    assert reply.status_code == 400
    assert "text, json" in reply.text and "xml" in reply.text
    assert (await client.get("/server_info?x=1")).status_code == 400
    assert (await client.get("/server_info", headers={"authorization": "no"})).status_code == 401
    assert (await client.post("/server_info")).status_code == 405


def test_fields_that_hold_keys_are_known() -> None:
    """A new option whose name says that it holds a secret has to be decided on."""
    names = {f.name for f in dataclasses.fields(ServerConfig)}
    for section in EngineConfig().to_dict().values():
        names |= set(section)
    words = {"key", "secret", "password", "credential", "credentials", "auth"}
    suspects = {name for name in names if words & set(name.split("_")) or name.endswith("_token")}
    known = {"journal_key_file", "api_key_file", "allow_credentials"}
    assert suspects - SECRET == known, "paths, and a switch"


def test_values() -> None:
    assert told_value("x", {"a": [1, 2.5, None, True, "b"]}) == {"a": [1, 2.5, None, True, "b"]}
    assert told_value("model", "org/name") == "org/name"
    assert told_value("api_key", []) == []
