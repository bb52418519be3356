"""Whose a kept reply is, how long it is kept, and how much is kept in all; `Idempotency-Key`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asgi_caller import Caller
from fake_engine import FakeEngine
from patience import PATIENCE
from quire.config import ServerConfig
from quire.errors import QuireError, StepFailed
from quire.serving.app import build_app
from quire.serving.dialect import OPENAI
from quire.serving.keep_alive import COMMENT
from quire.serving.kept_streams import MAX_READERS, Opening
from quire.serving.server_state import ServerState

PATH = "/v1/completions"
KEEP = {"x-resumable": "true"}
BODY = {"prompt": "hi", "stream": True, "max_tokens": 400}


class Served:
    """A server over the fake engine."""

    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(reply="x" * 100)
        self.state = ServerState(ServerConfig(**options), self.engine)
        self.app = build_app(self.state)

    def post(self, body: Any = BODY, cut: int | None = None, **headers: str) -> Caller:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Caller(self.app, "POST", PATH, body, named, cut)

    def get(self, stream_id: str, **headers: str) -> Caller:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Caller(self.app, "GET", f"/v1/streams/{stream_id}", headers=named)

    async def status(self, caller: Caller) -> int:
        await done(caller)
        return caller.status

    def counted(self, name: str) -> dict[str, float]:
        return {
            next(iter(one.labels.values()), ""): one.value  # type: ignore[union-attr]
            for one in self.state.http.snapshot()
            if one.name == name
        }


async def done(caller: Caller) -> Caller:
    async with asyncio.timeout(PATIENCE):
        await caller.task
    return caller


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def test_generation_goes_on_without_the_client() -> None:
    served = Served()
    served.engine.hang.clear()
    caller = served.post(x_resumable="true")
    await until(lambda: served.engine.submitted)
    caller.gone.set()
    await done(caller)
    assert served.engine.aborted == [] and served.state.in_flight == 1
    served.engine.hang.set()
    await until(lambda: served.state.kept.now().ended)
    assert served.state.in_flight == 0 and served.state.answering == 0


async def test_without_the_header_a_disconnect_ends_the_request() -> None:
    for options, headers in (({}, {}), ({"resumable_streams": True}, {"x_resumable": "false"})):
        served = Served(**options)
        served.engine.hang.clear()
        caller = served.post(**headers)
        await until(lambda engine=served.engine: engine.submitted)
        caller.gone.set()
        await done(caller)
        assert len(served.engine.aborted) == 1
        assert served.state.kept.now().running == served.state.kept.now().ended == 0


async def test_the_flag_keeps_all() -> None:
    served = Served(resumable_streams=True)
    caller = await done(served.post())
    assert (await done(served.get(caller.stream_id))).data == caller.data


async def test_a_whole_reply_is_kept_too() -> None:
    served = Served()
    served.engine.hang.clear()
    caller = served.post({**BODY, "stream": False}, idempotency_key="k")
    await until(lambda: served.engine.submitted)
    caller.gone.set()
    await done(caller)
    again = served.post({**BODY, "stream": False}, idempotency_key="k")
    served.engine.hang.set()
    await done(again)
    assert again.json["choices"][0]["text"] == "x" * 100
    assert again.headers["idempotent-replayed"] == "true"
    kept = await done(served.get(again.stream_id))
    assert kept.data == again.data and kept.headers["content-type"] == "application/json"
    assert await served.status(served.get(again.stream_id, last_event_id="a:1")) == 404


async def test_other_keys_find_nothing() -> None:
    served = Served(api_key=["alice", "bob"])
    mine, other = {"x_api_key": "alice"}, {"x_api_key": "bob"}
    caller = await done(served.post(x_resumable="true", **mine))
    stream_id = caller.stream_id
    last = f"{stream_id}:end.1"
    assert await served.status(served.get(stream_id)) == 401
    unknown = await done(served.get("nothing", **other))
    for attempt in (
        served.get(stream_id, **other),
        served.post(last_event_id=last, **other),
        Caller(served.app, "DELETE", f"/v1/streams/{stream_id}", headers={"x-api-key": "bob"}),
    ):
        await done(attempt)
        assert (attempt.status, attempt.json) == (404, unknown.json)
    for attempt in (
        served.get(stream_id, **mine),
        served.get(stream_id, authorization="Bearer alice"),
        served.post(last_event_id=last, **mine),
    ):
        assert await served.status(attempt) == 200


async def test_keys_of_one_client_are_not_those_of_another() -> None:
    served = Served(api_key=["alice", "bob"])
    first = await done(served.post(idempotency_key="1", x_api_key="alice"))
    second = await done(served.post({**BODY, "prompt": "other"}, idempotency_key="1",
                                    x_api_key="bob"))  # fmt: skip
    assert second.status == 200 and first.stream_id != second.stream_id


async def test_delete_ends_the_request() -> None:
    served = Served()
    served.engine.hang.clear()
    reader = served.post(x_resumable="true")
    await reader.begun.wait()
    url = f"/v1/streams/{reader.stream_id}"
    deleted = await done(Caller(served.app, "DELETE", url))
    assert deleted.json == {"id": reader.stream_id, "deleted": True}
    await done(reader)
    assert b"stream_deleted" in reader.data and b"[DONE]" in reader.data
    assert len(served.engine.aborted) == 1
    assert await served.status(Caller(served.app, "DELETE", url)) == 404
    assert await served.status(served.get(reader.stream_id)) == 404


async def test_one_key_is_one_request() -> None:
    served = Served()
    served.engine.hang.clear()
    callers = [served.post(idempotency_key="k") for _ in range(3)]
    await until(lambda: served.engine.submitted)
    callers.append(served.post(idempotency_key="k"))
    served.engine.hang.set()
    for caller in callers:
        await done(caller)
    callers.append(await done(served.post(idempotency_key="k")))
    assert len({caller.data for caller in callers}) == 1 and b"[DONE]" in callers[0].data
    assert len({caller.stream_id for caller in callers}) == 1
    assert len(served.engine.submitted) == 1
    assert served.counted("quire:stream_resumes") == {"idempotency_key": 4}


async def test_one_key_for_two_requests_is_refused() -> None:
    served = Served()
    await done(served.post(idempotency_key="k"))
    for body in ({**BODY, "prompt": "ho"}, {**BODY, "stream": False}):
        caller = await done(served.post(body, idempotency_key="k"))
        assert caller.status == 422
        error = caller.json["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    other_path = Caller(served.app, "POST", "/v1/chat/completions", BODY, {"idempotency-key": "k"})
    assert await served.status(other_path) == 422
    assert len(served.engine.submitted) == 1


async def test_going_on_with_another_request_is_refused() -> None:
    served = Served()
    caller = await done(served.post(x_resumable="true"))
    last = f"{caller.stream_id}:end.1"
    other = await done(served.post({**BODY, "prompt": "ho"}, last_event_id=last))
    assert (other.status, other.json["error"]["code"]) == (422, "other_request")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_failed_may_be_tried_again(stream: bool) -> None:
    served = Served()
    body = {**BODY, "stream": stream}
    served.engine.break_after, served.engine.death = 3, StepFailed("no luck")
    first = await done(served.post(body, idempotency_key="k"))
    assert b"no luck" in first.data and (first.status == 200) == stream
    if stream:
        assert (await done(served.get(first.stream_id))).data == first.data
    served.engine.break_after = None
    again = await done(served.post(body, idempotency_key="k"))
    assert again.status == 200 and b"no luck" not in again.data
    assert len(served.engine.submitted) == 2


async def test_a_refused_request_is_not_kept() -> None:
    served = Served()
    served.engine.refuse = QuireError("not now")
    for _ in range(2):
        assert await served.status(served.post(idempotency_key="k")) == 500
    assert await served.status(served.post({**BODY, "n": 0}, idempotency_key="k")) == 400
    assert served.state.kept.now().ended == served.state.kept.now().running == 0
    served.engine.refuse = None
    assert await served.status(served.post(idempotency_key="k")) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x_resumable": "perhaps"},
        {"idempotency_key": ""},
        {"idempotency_key": "k" * 256},
        {"idempotency_key": "k\x01"},
        {"last_event_id": "x" * 20_000},
    ],
)
async def test_bad_headers_are_refused(headers: dict[str, str]) -> None:
    served = Served()
    caller = await done(served.post(**headers))
    assert caller.status == 400
    assert caller.json["error"]["param"].lower() == next(iter(headers)).replace("_", "-")
    assert served.engine.submitted == []


async def test_unknown_places_are_refused() -> None:
    served = Served()
    stream_id = (await done(served.post(x_resumable="true"))).stream_id
    for place in ("99~1.1", "0~1.9", "nonsense", "\n"):
        assert (
            await served.status(served.get(stream_id, last_event_id=f"{stream_id}:{place}")) == 404
        )
    url = f"/v1/streams/{stream_id}?after=a"
    two = Caller(served.app, "GET", url, headers={"last-event-id": "b"})
    assert await served.status(two) == 400
    assert await served.status(served.post(last_event_id="unknown:1~1.1")) == 404


async def test_the_oldest_that_ended_makes_room() -> None:
    served = Served(max_kept_streams=3)
    ids = [(await done(served.post(x_resumable="true"))).stream_id for _ in range(5)]
    found = [await served.status(served.get(one)) for one in ids]
    assert found == [404, 404, 200, 200, 200]
    assert served.counted("quire:kept_streams_dropped") == {"count": 2}
    assert served.counted("quire:kept_streams") == {"running": 0, "ended": 3}


async def test_no_room_while_all_run() -> None:
    served = Served(max_kept_streams=2, resumable_streams=True)
    served.engine.hang.clear()
    running = [served.post(x_resumable="true") for _ in range(2)]
    await until(lambda: len(served.engine.submitted) == 2)
    refused = await done(served.post(x_resumable="true"))
    assert refused.status == 429 and "retry-after" in refused.headers
    plain = served.post()  # nobody asked to keep this one
    served.engine.hang.set()
    for caller in (*running, plain):
        assert await served.status(caller) == 200
    assert "x-stream-id" not in plain.headers


async def test_time_is_up() -> None:
    served = Served(stream_retention=0.01)
    stream_id = (await done(served.post(idempotency_key="k"))).stream_id
    await until(lambda: served.state.kept.now().ended == 0)
    assert await served.status(served.get(stream_id)) == 404
    assert served.counted("quire:kept_streams_dropped") == {"expired": 1}
    assert (await done(served.post(idempotency_key="k"))).stream_id != stream_id
    assert len(served.engine.submitted) == 2


async def test_bytes_are_bounded() -> None:
    length = len((await done(Served().post(x_resumable="true"))).data)
    served = Served(max_kept_bytes=int(3.5 * length))
    ids = []
    for _ in range(6):
        ids.append((await done(served.post(x_resumable="true"))).stream_id)
        assert served.state.kept.now().num_bytes <= 3.5 * length
    assert [await served.status(served.get(one)) for one in ids] == [404] * 3 + [200] * 3
    assert served.counted("quire:kept_streams_dropped") == {"bytes": 3}


async def test_a_stream_that_is_read_may_be_longer_than_what_is_kept() -> None:
    length = len((await done(Served().post(x_resumable="true"))).data)
    served = Served(max_kept_bytes=length // 4)
    caller = await done(served.post(x_resumable="true"))
    assert b"[DONE]" in caller.data and b"error" not in caller.data
    assert len(caller.data) == length
    assert served.state.kept.now().num_bytes <= length // 4
    assert await served.status(served.get(caller.stream_id)) == 404
    ids = [line[4:].decode() for line in caller.data.splitlines() if line.startswith(b"id: ")]
    late = await done(served.get(caller.stream_id, last_event_id=ids[-3]))
    assert late.status == 200 and caller.data.endswith(late.data) and late.data


async def test_a_stream_that_nobody_reads_ends_at_the_limit() -> None:
    length = len((await done(Served().post(x_resumable="true"))).data)
    served = Served(max_kept_bytes=length // 4)
    served.engine.hang.clear()
    caller = served.post(x_resumable="true")
    await until(lambda: served.engine.submitted)
    caller.gone.set()
    await done(caller)
    served.engine.hang.set()
    await until(lambda: served.engine.aborted)
    await until(lambda: served.state.in_flight == 0)
    assert served.state.kept.now().num_bytes == 0
    assert served.counted("quire:kept_streams_dropped") == {"bytes": 1}


async def test_bytes_of_forgotten_streams_count_while_somebody_reads_them() -> None:
    served = Served(stream_retention=0.01)
    slow = served.post(x_resumable="true")
    slow.reads.clear()
    await until(lambda: served.counted("quire:kept_streams_dropped"))
    assert served.state.kept.now().num_bytes > 1000
    slow.reads.set()
    await done(slow)
    assert b"[DONE]" in slow.data and served.state.kept.now().num_bytes == 0


async def test_readers_are_bounded_and_the_oldest_goes() -> None:
    served = Served()
    served.engine.hang.clear()
    readers = [served.post(x_resumable="true")]
    await readers[0].begun.wait()
    for _ in range(MAX_READERS):
        readers.append(served.get(readers[0].stream_id))
        await readers[-1].begun.wait()
    await done(readers[0])
    assert b"reader_replaced" in readers[0].data
    served.engine.hang.set()
    for reader in readers[1:]:
        await done(reader)
        assert b"[DONE]" in reader.data and b"error" not in reader.data


async def test_hundreds_of_kept_streams() -> None:
    served = Served()
    callers = [served.post({**BODY, "prompt": f"p{i}"}, cut=700, x_resumable="true")
               for i in range(300)]  # fmt: skip
    for caller in callers:
        await done(caller)
    await until(lambda: served.state.kept.now().ended == 300)
    for caller in callers:
        whole, last = caller.whole_events()
        rest = await done(served.get(caller.stream_id, last_event_id=last))
        uncut = await done(served.get(caller.stream_id))
        assert whole + rest.data == uncut.data and uncut.data.count(b"[DONE]") == 1
    assert served.engine.aborted == []
    assert served.state.kept.now().num_bytes == sum(
        kept.size for kept in served.state.kept._all.values()
    )


async def test_silent_kept_streams_get_comments_between_events() -> None:
    served = Served(stream_keep_alive=0.001)
    served.engine.hang.clear()
    reader = served.post(x_resumable="true")
    await until(lambda: reader.data.count(COMMENT) > 2)
    served.engine.hang.set()
    await done(reader)
    assert reader.data.replace(COMMENT, b"") == (await done(served.get(reader.stream_id))).data


async def test_long_replies_are_read_in_pieces_of_whole_events() -> None:
    served = Served()
    kept = served.state.kept.open(Opening(b"", b"", None, True, OPENAI))
    assert kept is not None
    events = [b"data: %b\n\n" % (b"x" * size) for size in (5, 60_000, 9_000, 200_000, 70_000, 3)]
    kept.start(200, [])
    kept.end(b"".join(events))
    reader, pieces, more = kept.read(), [], True
    while more:
        piece, more = await reader.take()
        pieces.append(piece)
    assert b"".join(pieces) == b"".join(events)
    assert len(pieces) > 3 and all(piece.endswith(b"\n\n") for piece in pieces)
