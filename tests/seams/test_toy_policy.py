"""A scheduling policy of a plugin, as `docs/plugins.md` shows it: inline and in a server."""

from __future__ import annotations

import httpx
import pytest

from distributions import Distributions, entry_points
from documented import install, modules
from live_server import serving
from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.errors import ConfigError


def test_the_documented_policy_decides_who_goes_first(distributions: Distributions) -> None:
    install("A policy", distributions)
    assert len(modules("A policy")["lifo_policy"].splitlines()) <= 25
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(max_num_seqs=1, scheduling_policy="lifo") as llm:
        engine = llm.llm_engine
        for name in "abc":
            engine.add_request(name, "One", params)
        ended = []
        while engine.has_unfinished_requests:
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["c", "b", "a"]


def test_a_server_finds_it_in_both_of_its_processes(distributions: Distributions) -> None:
    install("A policy", distributions)
    with (
        serving("--scheduling-policy", "lifo", "--max-num-seqs", "2") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        assert client.get("/limits").json()["scheduling_policy"] == "lifo"
        asked = {"model": "quire-demo", "prompt": "One", "max_tokens": 2}
        assert client.post("/v1/completions", json=asked).status_code == 200
        for name in ("fcfs", "lifo"):
            reply = client.post("/limits", json={"scheduling_policy": name})
            assert reply.json()["scheduling_policy"] == name
        reply = client.post("/limits", json={"scheduling_policy": "filo"})
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert "must be one of fcfs" in message and "prefill_first, lifo, got 'filo'" in message


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('no')", "cannot be imported: RuntimeError: no"),
        ("class P: pass", "is not a subclass of quire.core.policies.Policy"),
        (
            "from quire.core.policies import FCFS\n"
            "class P(FCFS):\n    def peek_request(self, now): return None",
            "peek_request breaks the contract of Policy.peek_request",
        ),
    ],
)
def test_a_broken_one_is_told_before_the_model_is_loaded(
    distributions: Distributions, source: str, why: str, request: pytest.FixtureRequest
) -> None:
    name = f"broken{request.node.callspec.indices['source']}"
    rows = entry_points(**{f"policy__{name}": f"{name}_policy:P"})
    distributions.install("quire-broken", {f"{name}_policy": source}, rows)
    with pytest.raises(ConfigError) as caught:
        LLM(scheduling_policy=name)
    assert caught.value.message.endswith(why)
    assert name in caught.value.message
