"""A control verb costs a function and a row: the one of `docs/plugins.md`, asked in this process,
through the engine core's, and over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from distributions import Distributions, entry_points
from documented import install
from live_server import serving
from patience import PATIENCE
from quire import LLM, EngineConfig, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.verbs import VERBS
from quire.errors import EngineError, InvalidRequest

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
BAD = [
    ({"count": "3"}, "count must be an integer, got '3'"),
    ({"cuont": 3}, "no argument 'cuont'; did you mean 'count'?"),
    ({"count": 2**70}, "count cannot be sent: .*, got 1180591620717411303424"),
]


def test_inline(distributions: Distributions) -> None:
    install("A control verb", distributions)
    with LLM(max_num_seqs=4) as llm:
        engine = llm.llm_engine
        for name in "abc":
            engine.add_request(name, "One", LONG, arrival_time=None)
        engine.step()
        (first,) = engine.call("oldest", {})
        assert first.startswith("a-")
        assert [name[0] for name in engine.call("oldest", {"count": 2})] == ["a", "b"]
        for args, told in BAD:
            with pytest.raises(InvalidRequest, match=told):
                engine.call("oldest", args)
        engine.abort_request(["a", "b", "c"])


async def test_through_the_process(distributions: Distributions) -> None:
    install("A control verb", distributions)
    async with await AsyncLLM.start(EngineConfig.from_options(max_num_seqs=4)) as engine:
        await engine.wait_ready()
        streams = [await engine.submit("One", LONG, name) for name in "ab"]
        for stream in streams:
            await anext(stream)
        assert [name[0] for name in await engine.call("oldest", count=2)] == ["a", "b"]
        for args, told in BAD:
            with pytest.raises(InvalidRequest, match=told):
                await engine.call("oldest", **args)
        for stream in streams:
            await stream.aclose()


def test_over_http(distributions: Distributions) -> None:
    install("A control verb", distributions)
    with serving() as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.post("/oldest", json={"count": 2}).json() == []
        reply = client.post("/oldest", json={"count": "2"})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == 'count must be an integer, got "2".'


def _echo(core: Any, value: Any) -> Any:
    return value


def _fails(core: Any) -> None:
    """Leaves the books in the middle of a step."""
    batch = core.scheduler.schedule()
    raise RuntimeError(f"{batch.total_num_scheduled_tokens} tokens scheduled")


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(max_num_seqs=4) as made:
        yield made


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERBS, "_rows", {**VERBS._rows, "echo": _echo, "fails": _fails})
    monkeypatch.setattr(VERBS, "_loaded", dict(VERBS._loaded))


@pytest.mark.usefixtures("rows")
def test_a_result_is_what_a_message_would_carry(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.call("echo", {"value": (1, (2, "x"))}) == [1, [2, "x"]]
    VERBS.register("opaque", lambda core: object())
    with pytest.raises(EngineError, match="the result of verb"):
        engine.call("opaque", {})
    with pytest.raises(InvalidRequest, match="value cannot be sent"):
        engine.call("echo", {"value": object()})
    with pytest.raises(InvalidRequest, match="value is required"):
        engine.call("echo", {})


@pytest.mark.usefixtures("rows")
def test_what_fails_unexpectedly_is_taken_back(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", "One", SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    with pytest.raises(RuntimeError, match="1 tokens scheduled"):
        engine.call("fails", {})
    steps = [engine.step() for _ in range(10)]
    ended = [output for outputs in steps for output in outputs if output.finished]
    assert [len(output.outputs[0].token_ids) for output in ended] == [4]
    assert engine.call("check_integrity", {})["running"] == 0


async def test_a_broken_one_harms_no_core(distributions: Distributions) -> None:
    source = "from __future__ import annotations\n\n\n"
    source += "def opaque(core):\n    return object()\n\n\ndef odd(core, x: Nothing): ...\n"
    rows = entry_points(
        verb__opaque2="bad_verbs:opaque", verb__odd="bad_verbs:odd", verb__no="bad_verbs:no"
    )
    distributions.install("quire-bad", {"bad_verbs": source}, rows)
    async with await AsyncLLM.start(EngineConfig.from_options(max_num_seqs=4)) as engine:
        await engine.wait_ready()
        with pytest.raises(EngineError, match="the result of verb 'opaque'"):
            await engine.call("opaque2")
        with pytest.raises(InvalidRequest, match="verb 'no' .entry point verb.no of quire-bad 1.0"):
            await engine.call("no")
        with pytest.raises(InvalidRequest, match="the annotations of verb 'odd': name 'Nothing'"):
            await engine.call("odd", x=1)
        assert await engine.call("ping") >= 0
