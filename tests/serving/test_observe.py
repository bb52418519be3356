"""Routes over the records: explanation, listing, timeline, diagnosis."""

from __future__ import annotations

import httpx
import pytest

from fake_engine import FakeEngine
from record_rig import Rig


@pytest.fixture
def rig(engine: FakeEngine) -> Rig:
    """Two requests with chosen ids, in the engine's records."""
    rig = Rig(seqs=1)
    rig.add("chatcmpl-a/b", 4, 30)
    rig.add("cmpl-c-0", 4)
    rig.drain()
    engine.records = rig.records
    return rig


async def test_explain(client: httpx.AsyncClient, rig: Rig) -> None:
    reply = await client.get("/v1/requests/cmpl-c-0/explain")
    assert reply.status_code == 200
    told = reply.json()
    [completion] = told["completions"]
    assert told["id"] == completion["id"] == "cmpl-c-0"
    assert sum(p["seconds"] for p in completion["parts"]) == pytest.approx(completion["seconds"])
    causes = {(p["cause"], p["reason"]) for p in completion["parts"]}
    assert ("queued", "max_num_seqs") in causes


async def test_explain_as_text_and_with_a_slash_in_the_id(
    client: httpx.AsyncClient, rig: Rig
) -> None:
    reply = await client.get("/v1/requests/a%2Fb/explain?format=text")
    assert reply.headers["content-type"].startswith("text/plain")
    assert reply.text.startswith("request chatcmpl-a/b: ") and "decode" in reply.text


async def test_unknown_id_is_404_with_known_ones(client: httpx.AsyncClient, rig: Rig) -> None:
    reply = await client.get("/v1/requests/nobody/explain")
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert "'nobody'" in message and "cmpl-c-0, chatcmpl-a/b" in message


async def test_timeline(client: httpx.AsyncClient, rig: Rig) -> None:
    reply = await client.get("/v1/timeline?steps=5")
    assert reply.json()["otherData"]["steps"] == 5


async def test_listing_and_diagnosis(client: httpx.AsyncClient, rig: Rig) -> None:
    assert (await client.get("/v1/requests")).json() == {"object": "list", "data": []}
    told = (await client.get("/v1/diagnosis?seconds=1e8")).json()
    assert told["signals"]["steps"] == len(rig.records)
    assert [f["name"] for f in told["findings"]] == ["too_few_seats"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/timeline?steps=0", "steps must be a positive number, got '0'"),
        ("/v1/timeline?steps=0.5", "steps must be at least 1, got 0"),
        ("/v1/timeline?steps=many", "got 'many'"),
        ("/v1/timeline?step=3", "unknown parameter 'step'; known: steps"),
        ("/v1/timeline?steps=3&steps=4", "steps is given 2 times"),
        ("/v1/diagnosis?seconds=-1", "seconds must be a positive number"),
        ("/v1/diagnosis?seconds=nan", "seconds must be a positive number"),
        ("/v1/requests?x=1", "unknown parameter 'x'; known: none"),
        ("/v1/requests/cmpl-c-0/explain?format=xml", "format must be json or text, got 'xml'"),
    ],
)
async def test_bad_parameters(
    client: httpx.AsyncClient, rig: Rig, path: str, expected: str
) -> None:
    reply = await client.get(path)
    assert reply.status_code == 400
    assert expected in reply.json()["error"]["message"]
