"""Limits and usage of keys over ASGI: every door, every way to end, hundreds of requests at once.

The front end is the real one; its core says one token when the test lets it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asgi_caller import Caller
from quire.config import ServerConfig
from quire.config.key_file import digest_of
from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.async_llm import AsyncLLM
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.messages import AbortRequests, EngineCoreRequest, Outputs
from quire.outputs import FinishReason
from quire.serving.app import build_app
from quire.serving.key_accounts import Account
from quire.serving.server_state import ServerState
from quire.utils.timing import ManualClock
from silent_core import SilentCore, silent_engine

TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": [1, 2, 3], "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/invocations": {"prompt": "hi", "max_tokens": 2},
}
BEAMS = {"prompt": [1, 2, 3], "max_tokens": 3, "use_beam_search": True, "n": 2, "temperature": 0}

SCORES = TokenLogprobs([5, 5, 6, 7, 8], [-1.0, -1.0, -2.0, -3.0, -4.0], 1)


class HeldCore(SilentCore):
    """Ends completions at once, or when the test lets it."""

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        super().__init__(epoch, on_message, on_exit)
        self.is_open = True
        self.reason = FinishReason.LENGTH
        self.scores = False
        self.held: dict[str, EngineCoreRequest] = {}

    def send(self, message: Any) -> None:
        super().send(message)
        if isinstance(message, AbortRequests):
            for name in message.request_ids:
                self.held.pop(name, None)

    def _end(self, requests: list[EngineCoreRequest]) -> None:
        self.held |= {request.request_id: request for request in requests}
        if self.is_open:
            self.let(len(self.held))

    def let(self, count: int, tokens: int = 1, last: bool = True) -> None:
        """Give the oldest completions tokens, and their end."""
        names = list(self.held)[:count]
        reason = self.reason if last else None
        scores = [SCORES] * tokens if self.scores else None
        outputs = [EngineCoreOutput(n, [5] * tokens, scores, finish_reason=reason) for n in names]
        for name in names if last else ():
            del self.held[name]
        self._number += 1
        self._on_message(Outputs(self.epoch, self._number, outputs))


class World:
    """A server with a key file.

    Args:
        path: Of the key file.
        keys: Name to options of its line.
        options: Of the engine.
    """

    def __init__(self, path: Path, keys: dict[str, str], **options: Any) -> None:
        self.path = path
        self.write(keys)
        self.clock = ManualClock(1000.0)
        self.engine: AsyncLLM
        self.core: HeldCore
        self.engine, self.core = silent_engine(HeldCore, **options)
        config = ServerConfig(api_key_file=str(path), api_key=["plain"], shared_prefix_cache=True)
        self.state = ServerState(config, self.engine, self.clock)
        self.app = build_app(self.state)
        self.encoded = 0
        encode = self.engine.tokenizer.encode

        def counted(*args: Any, **more: Any) -> list[int]:
            self.encoded += 1
            return encode(*args, **more)

        self.engine.tokenizer.encode = counted  # type: ignore[method-assign]

    def write(self, keys: dict[str, str]) -> None:
        lines = []
        for name, options in keys.items():
            role = "admin" if name == "ops" else "metrics" if name == "scraper" else "user"
            lines.append(f"{name}:{digest_of(name.encode()).hex()}:{role}:{options}")
        # In one piece, as the server may read it at any moment.
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def account(self, name: str) -> Account:
        found = self.state.accounts.find(name)
        assert found is not None and found.name == name
        return found

    def send(
        self, key: str, path: str = TEXT, cut: int | None = None, headers: Any = None, **fields: Any
    ) -> Caller:
        body = {**DOORS.get(path, {}), **fields} or None
        headers = {"x-api-key": key, **(headers or {})}
        return Caller(self.app, "POST" if body else "GET", path, body, headers, cut)

    async def ask(self, key: str, path: str = TEXT, **more: Any) -> Caller:
        caller = self.send(key, path, **more)
        await caller.task
        return caller

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(5000):
            if holds():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never comes to that")

    def check(self) -> None:
        self.state.accounts.check_integrity()
        self.engine.check_integrity()

    def check_idle(self) -> None:
        self.check()
        for account in (*self.state.accounts._accounts.values(), self.state.accounts.find("")):
            assert account is not None and not account.is_busy and not account.meter.num_entering


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    made: list[World] = []

    def build(keys: dict[str, str], **options: Any) -> World:
        made.append(World(tmp_path / "keys", keys, **options))
        return made[-1]

    yield build
    for world in made:
        await world.engine.shutdown()


Make = Callable[..., World]


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOORS)
async def test_every_door_refuses_before_it_tokenises(make: Make, path: str) -> None:
    world = make({"ann": "requests_per_minute=1", "bob": ""})
    first = await world.ask("ann", path)
    assert first.status == 200, first.data
    encoded, sent = world.encoded, len(world.core.sent)
    refused = await world.ask("ann", path)
    assert refused.status == 429, refused.data
    assert (world.encoded, len(world.core.sent)) == (encoded, sent)
    assert refused.headers["retry-after"] == "60"
    assert refused.headers["retry-after-ms"] == "60000"
    assert "x-should-retry" not in refused.headers
    message = refused.json["error"]["message"]
    assert "'ann'" in message and "requests_per_minute=1" in message
    assert (await world.ask("bob", path)).status == 200
    world.clock.advance(60)
    assert (await world.ask("ann", path)).status == 200
    world.check_idle()


async def test_the_error_names_limit_value_and_key(make: Make) -> None:
    world = make({"ann": "concurrent=1", "bob": ""})
    world.core.is_open = False
    held = world.send("ann")
    await world.until(lambda: len(world.core.held) == 1)
    refused = await world.ask("ann")
    error = refused.json["error"]
    assert (error["code"], error["type"]) == ("key_limit_reached", "TooManyRequests")
    assert (error["limit"], error["limit_value"], error["key"]) == ("concurrent", 1, "ann")
    assert refused.headers["retry-after"] == "1"
    world.core.let(1)
    await held.task
    assert held.status == 200
    world.core.is_open = True
    assert (await world.ask("ann")).status == 200
    world.check_idle()


async def test_tokens_are_charged_when_they_are_used_read_or_not(make: Make) -> None:
    world = make({"ann": "tokens_per_minute=100", "bob": ""})
    assert (await world.ask("ann", prompt=[1] * 50, max_tokens=50)).status == 200
    assert world.account("ann").tokens_used.used == 51, "a limit of 50 was asked, 1 was made"
    world.core.is_open = False
    left = world.send("ann", prompt=[1] * 40, max_tokens=500)
    await world.until(lambda: len(world.core.held) == 1)
    world.core.let(1, tokens=129, last=False)
    left.gone.set()
    await left.task
    assert world.account("ann").tokens_used.used == 220
    refused = await world.ask("ann")
    assert refused.status == 429 and refused.headers["retry-after-ms"] == "72600"
    world.clock.advance(72.5)
    assert (await world.ask("ann")).status == 429
    world.clock.advance(0.1)
    world.core.is_open = True
    assert (await world.ask("ann")).status == 200
    world.check_idle()


async def test_a_key_alone_in_its_file_has_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ann:{digest_of(b'ann').hex()}:user:requests_per_minute=1")
    path.chmod(0o600)
    engine, _ = silent_engine()
    app = build_app(ServerState(ServerConfig(api_key_file=str(path)), engine))
    for status in (200, 429):
        caller = Caller(app, "POST", TEXT, DOORS[TEXT], {"x-api-key": "ann"})
        await caller.task
        assert caller.status == status, caller.data
    await engine.shutdown()


async def test_beams_are_one_request_and_every_beam_is_charged(make: Make) -> None:
    world = make({"ann": "requests_per_minute=1,concurrent=1", "bob": ""})
    world.core.is_open = False
    asked = world.send("ann", **BEAMS)
    await world.until(lambda: len(world.core.held) == 1)
    assert len(world.account("ann").places) == 1
    assert (await world.ask("ann", **BEAMS)).status == 429
    asked.gone.set()
    await asked.task
    assert world.account("ann").meter.prompt_tokens == 3
    world.check_idle()


async def test_the_later_steps_of_beams_are_charged_and_not_refused(make: Make) -> None:
    """The prompt once, and a token of each beam in each step: 1, 2 and 2."""
    world = make({"ann": "tokens_per_minute=4,queue_share=0.01", "bob": ""}, max_num_queued_reqs=8)
    world.core.scores = True
    found = await world.ask("ann", **BEAMS)
    assert found.status == 200, found.data
    meter = world.account("ann").meter
    assert (meter.prompt_tokens, meter.generated_tokens) == (3, 5)
    assert world.account("ann").tokens_used.used == 8, "what runs is not cut"
    refused = await world.ask("ann")
    assert refused.status == 429 and refused.json["error"]["limit"] == "tokens_per_minute"
    assert refused.headers["retry-after-ms"] == "75000", "5 of 4 a minute"
    assert world.account("bob").meter.generated_tokens == 0
    world.check_idle()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"n": 5, "temperature": 1}),
        (TEXT, {"prompt": [[1], [2], [3]], "n": 2, "temperature": 1}),
        ("/v1/chat/completions", {"n": 5, "temperature": 1}),
        ("/inference/v1/generate", {"sampling_params": {"n": 5, "temperature": 1}}),
    ],
)
async def test_what_no_share_ever_holds_is_wrong_and_not_too_much(
    make: Make, path: str, fields: dict[str, Any]
) -> None:
    world = make({"ann": "queue_share=0.25", "bob": ""}, max_num_queued_reqs=16)
    refused = await world.ask("ann", path, **fields)
    assert refused.status == 400, refused.data
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
    error = refused.json["error"]
    assert error["code"] == "key_share_too_small"
    assert (error["limit"], error["limit_value"], error["key"]) == ("queue_share", 0.25, "ann")
    assert "may have 4 waiting" in error["message"] and "of 16" in error["message"]
    assert not world.core.sent
    assert (await world.ask("bob", path, **fields)).status == 200
    assert (await world.ask("ann", path)).status == 200
    assert world.account("ann").outcomes["invalid"] == 1
    world.check_idle()


# ---- fairness ----------------------------------------------------------------------------------


async def test_one_key_that_offers_ten_times_too_much_is_nothing_to_others(make: Make) -> None:
    world = make(
        {"greedy": "queue_share=0.5", "ann": "", "bob": ""}, max_num_seqs=4, max_num_queued_reqs=16
    )
    world.core.is_open = False
    greedy = [world.send("greedy", prompt="a word") for _ in range(400)]
    others: list[Caller] = []
    for turn in range(60):
        if turn < 40:
            others += [world.send(key, prompt="a word") for key in ("ann", "bob")]
            greedy += [world.send("greedy", prompt="a word") for _ in range(20)]
        await asyncio.sleep(0.002)
        world.check()
        assert world.account("greedy").meter.num_waiting <= 8
        world.core.let(6)
    while world.core.held or not all(caller.task.done() for caller in others + greedy):
        world.core.let(6)
        await asyncio.sleep(0.001)
    assert {caller.status for caller in others} == {200}
    served = [caller for caller in greedy if caller.status == 200]
    refused = [caller for caller in greedy if caller.status == 429]
    assert len(served) + len(refused) == len(greedy) == 1200
    assert len(served) > 20 and len(refused) > 600
    assert {caller.json["error"]["limit"] for caller in refused} == {"queue_share"}
    # What was refused was not tokenised, and the engine never heard of it.
    assert world.encoded == len(served) + len(others)
    assert len(world.core.sent) == len(served) + len(others)
    world.check_idle()


async def test_without_a_share_others_are_refused(make: Make) -> None:
    """The test above can fail."""
    world = make({"greedy": "", "ann": ""}, max_num_seqs=4, max_num_queued_reqs=16)
    world.core.is_open = False
    for _ in range(100):
        world.send("greedy")
    await world.until(lambda: len(world.core.held) == 20)
    refused = await world.ask("ann")
    assert refused.status == 429 and refused.json["error"]["code"] == "queue_full"
    assert world.account("ann").outcomes["refused"] == 1
    world.core.is_open = True
    world.core.let(1000)
    await world.until(lambda: not world.account("greedy").is_busy)
    world.check_idle()


# ---- every way to end --------------------------------------------------------------------------


async def test_who_has_read_the_last_byte_may_send_the_next(make: Make) -> None:
    world = make({"ann": "concurrent=1", "bob": ""})
    transport = httpx.ASGITransport(world.app)
    headers = {"x-api-key": "ann"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as client:
        for number in range(60):
            path = list(DOORS)[number % len(DOORS)]
            stream = number % 2 == 1 and path != "/invocations"
            kept = {"x-resumable": "true"} if number % 3 == 0 else {}
            reply = await client.post(path, json=DOORS[path] | {"stream": stream}, headers=kept)
            assert reply.status_code == 200, (number, path, reply.text)
    assert world.account("ann").outcomes["completed"] == 60
    world.check_idle()


async def test_a_background_response_has_its_place_to_its_end(make: Make) -> None:
    world = make({"ann": "concurrent=1", "bob": ""})
    world.core.is_open = False
    begun = await world.ask("ann", "/v1/responses", background=True, store=True)
    assert begun.status == 200, begun.data
    assert (await world.ask("ann")).status == 429
    world.core.let(1)
    await world.until(lambda: not world.account("ann").is_busy)
    assert world.account("ann").outcomes == {
        "completed": 1, "limited": 1, "refused": 0, "invalid": 0, "failed": 0, "disconnected": 0
    }  # fmt: skip
    begun = await world.ask("ann", "/v1/responses", background=True, store=True)
    cancelled = Caller(
        world.app, "POST", f"/v1/responses/{begun.json['id']}/cancel", {}, {"x-api-key": "ann"}
    )
    await cancelled.task
    assert cancelled.status == 200, cancelled.data
    assert world.account("ann").outcomes["disconnected"] == 1
    world.check_idle()


async def test_a_kept_reply_has_its_place_though_its_client_is_gone(make: Make) -> None:
    world = make({"ann": "concurrent=1", "bob": ""})
    world.core.is_open = False
    first = world.send("ann", headers={"x-resumable": "true"}, stream=True)
    await world.until(lambda: len(world.core.held) == 1)
    first.gone.set()
    await first.task
    assert (await world.ask("ann")).status == 429
    world.core.let(1)
    await world.until(lambda: not world.account("ann").is_busy)
    assert world.account("ann").outcomes["completed"] == 1
    world.check_idle()


@pytest.mark.parametrize("seed", range(4))
async def test_places_come_back_whatever_happens(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    keys = {f"k{i}": "" for i in range(4)}
    world = make(keys, max_num_seqs=8, max_num_queued_reqs=24)
    world.core.is_open = False
    submit, room = world.engine.submit, world.engine.check_room
    encode = world.engine.tokenizer.encode

    def bomb(chance: float) -> None:
        if rng.random() < chance:
            raise rng.choice([RuntimeError, KeyError, MemoryError, asyncio.CancelledError])

    async def shaky_submit(*args: Any, **more: Any) -> Any:
        bomb(0.05)
        stream = await submit(*args, **more)
        bomb(0.05)
        return stream

    def shaky_encode(*args: Any, **more: Any) -> list[int]:
        bomb(0.05)
        return encode(*args, **more)

    def shaky_room(meter: Any) -> None:
        bomb(0.02)
        room(meter)

    world.engine.submit = shaky_submit  # type: ignore[method-assign]
    world.engine.tokenizer.encode = shaky_encode  # type: ignore[method-assign]
    world.engine.check_room = shaky_room  # type: ignore[method-assign]
    callers: list[Caller] = []
    for turn in range(150):
        for _ in range(rng.randrange(5)):
            path = rng.choice(list(DOORS))
            fields: dict[str, Any] = {"stream": True} if rng.random() < 0.5 else {}
            if path == "/v1/responses" and rng.random() < 0.5:
                fields |= {"background": True, "store": True}
            elif path == TEXT and rng.random() < 0.3:
                fields |= {"n": 3, "prompt": ["a", "b"]}
            kept = {"x-resumable": "true"} if rng.random() < 0.3 else {}
            cut = rng.choice([None, None, 1, 60])
            callers.append(world.send(rng.choice(list(keys)), path, cut, kept, **fields))
        if turn % 10 == 0:  # other limits while all that runs
            limits = ["", "concurrent=3", "queue_share=0.3", "requests_per_minute=30"]
            world.write({key: rng.choice(limits) for key in keys})
            world.state.keys.reload()
            world.check()
        if callers and rng.random() < 0.3:
            rng.choice(callers).gone.set()
        if callers and rng.random() < 0.1:
            rng.choice(callers).task.cancel()
        world.core.reason = rng.choice([FinishReason.LENGTH, FinishReason.ERROR])
        world.core.let(rng.randrange(5), last=rng.random() < 0.7)
        await asyncio.sleep(0)
        world.check()
    for _ in range(3000):
        if all(caller.task.done() for caller in callers) and not world.core.held:
            break
        world.core.let(1000)
        await asyncio.sleep(0.001)
    await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)
    await world.until(lambda: not any(world.account(key).is_busy for key in keys))
    world.check_idle()
    total = Counter[str]()
    for key in keys:
        total.update(world.account(key).outcomes)
    assert all(total[name] for name in ("completed", "limited", "failed", "disconnected")), total


async def test_limits_change_under_load_at_once(make: Make) -> None:
    world = make({"ann": "concurrent=200", "bob": ""})
    world.core.is_open = False
    running = [world.send("ann") for _ in range(150)]
    await world.until(lambda: len(world.core.held) == 150)
    world.write({"ann": "concurrent=10", "bob": ""})
    world.state.keys.reload()
    assert (await world.ask("ann")).json["error"]["limit_value"] == 10
    world.core.let(140)
    await world.until(lambda: len(world.account("ann").places) == 10)
    assert (await world.ask("ann")).status == 429
    world.core.let(1)
    await world.until(lambda: len(world.account("ann").places) == 9)
    running.append(world.send("ann"))
    await world.until(lambda: len(world.account("ann").places) == 10)
    world.write({"bob": ""})  # what runs goes on
    world.state.keys.reload()
    assert (await world.ask("ann")).status == 401
    world.core.let(100)
    await asyncio.gather(*(caller.task for caller in running))
    assert {caller.status for caller in running} == {200}
    world.check_idle()


# ---- usage -------------------------------------------------------------------------------------


async def test_usage_is_told_to_whom_it_concerns(make: Make) -> None:
    keys = {"ann": "requests_per_minute=3,queue_share=0.25", "bob": "", "ops": "", "scraper": ""}
    world = make(keys)
    for prompt in ([1, 2, 3], [4, 5]):
        await world.ask("ann", prompt=prompt, n=2, temperature=1)
    await world.ask("ann", prompt=[])
    await world.ask("ann")
    await world.ask("bob", "/v1/chat/completions")
    mine = (await world.ask("ann", "/v1/usage")).json
    assert mine == {
        "object": "list",
        "data": [
            {
                "object": "key_usage",
                "key": "ann",
                "limits": {"requests_per_minute": 3, "queue_share": 0.25},
                "free": {"requests_per_minute": 0},
                "requests": {
                    "running": 0, "completed": 2, "limited": 1, "refused": 0, "invalid": 1,
                    "failed": 0, "disconnected": 0,
                },
                "limited": {"requests_per_minute": 1},
                "tokens": {"prompt": 5, "cached": 0, "generated": 4},
            }
        ],
    }  # fmt: skip
    everybody = (await world.ask("ops", "/v1/usage")).json["data"]
    assert [one["key"] for one in everybody] == ["ann", "bob", "ops", "scraper"]
    assert everybody[0] == mine["data"][0] and everybody[1]["requests"]["completed"] == 1
    assert (await world.ask("scraper", "/v1/usage")).status == 403
    assert (await world.ask("nobody", "/v1/usage")).status == 401
    assert (await world.ask("ann", "/v1/usage?key=bob")).status == 400
    assert (await world.ask("plain", "/v1/usage")).json["data"] == []


async def test_metrics_name_keys_of_the_file_alone(make: Make) -> None:
    world = make({"ann": "requests_per_minute=1", "scraper": ""})
    for key in ("ann", "ann", "plain"):
        await world.ask(key)
    text = (await world.ask("scraper", "/metrics")).data.decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("quire:key_"):
                found[sample.name, *sample.labels.values()] = sample.value
    assert found["quire:key_requests_total", "ann", "completed"] == 1
    assert found["quire:key_requests_total", "ann", "limited"] == 1
    assert found["quire:key_limited_total", "ann", "requests_per_minute"] == 1
    assert found["quire:key_tokens_total", "ann", "prompt"] == 3
    assert found["quire:key_tokens_total", "ann", "generated"] == 1
    assert found["quire:key_requests_total", "other", "completed"] == 1
    assert found["quire:key_requests_running", "ann"] == 0
    assert {labels[1] for labels in found} == {"ann", "scraper", "other"}


async def test_without_a_key_file_nothing_is_counted() -> None:
    engine, _ = silent_engine()
    state = ServerState(ServerConfig(), engine)
    app = build_app(state)
    asked = Caller(app, "POST", TEXT, DOORS[TEXT])
    await asked.task
    told = Caller(app, "GET", "/v1/usage")
    await told.task
    assert asked.status == 200 and told.json == {"object": "list", "data": []}
    assert engine.frontend.meters is not None and not engine.frontend.meters._open
    assert b"quire:key_requests_total{" not in state.http_text.render()
    await engine.shutdown()
