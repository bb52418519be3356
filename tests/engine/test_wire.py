"""Frames survive any chunking; broken ones are noticed."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec
import pytest

from quire.core.batch import TokenLogprobs
from quire.core.output import EngineCoreOutput
from quire.engine.cores import wire
from quire.engine.messages import AddRequests, EngineCoreRequest, FromCore, Outputs, ToCore
from quire.outputs import FinishReason
from quire.params import SamplingParams


def test_messages_round_trip() -> None:
    params = SamplingParams(seed=3, stop=["x"], logit_bias={5: -1.5}, eos_token_ids=[2])
    sent = AddRequests(4, [EngineCoreRequest("i", "e", 0, [1, 2], params, 1.5, cache_salt="s")])
    got = msgspec.msgpack.decode(wire.encode(sent)[wire.HEADER :], type=ToCore)
    assert got == sent
    logprob = TokenLogprobs([5, 6], [-0.1, -2.25], 1)
    output = EngineCoreOutput("i", [5], [logprob], [None, logprob], FinishReason.STOP, "x")
    sent_back = Outputs(4, 9, [output])
    got_back = msgspec.msgpack.decode(wire.encode(sent_back)[wire.HEADER :], type=FromCore)
    assert got_back == sent_back


def test_frames_survive_any_chunking() -> None:
    ours, theirs = socket.socketpair()
    frames = [wire.encode({"n": i, "pad": "x" * (i * 37 % 500)}) for i in range(50)]
    stream = b"".join(frames)

    def send() -> None:
        for start in range(0, len(stream), 7):
            theirs.sendall(stream[start : start + 7])
        theirs.close()

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        got = [msgspec.msgpack.decode(wire.receive(ours) or b"") for _ in range(50)]
        assert wire.receive(ours) is None
    thread.join()
    assert [m["n"] for m in got] == list(range(50))


def test_an_absurd_length_is_refused_before_memory_is_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((2**32 - 1).to_bytes(4, "little"))
        with pytest.raises(ConnectionError, match="over the limit"):
            wire.receive(ours)


async def connect() -> tuple[wire.Channel, socket.socket]:
    """A channel and the other end of its socket."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(wire.Channel, sock=ours)
    return channel, theirs


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
async def test_a_channel_gives_frames_however_they_arrive(size: int) -> None:
    channel, theirs = await connect()
    frames = [wire.encode({"n": i, "pad": "x" * (i * 3701 % 70_000)}) for i in range(12)]
    stream = b"".join(frames)
    got: list[bytes] = []
    for start in range(0, len(stream), size):
        channel.data_received(stream[start : start + size])  # nobody listens yet
        if start > len(stream) // 2 and not got:
            first = await channel.frame()
            assert first == frames[0][wire.HEADER :]
            got.append(first)
            channel.listen(got.append)
    if not got:
        channel.listen(got.append)
    assert got == [frame[wire.HEADER :] for frame in frames]
    theirs.close()
    await channel.closed
    assert await channel.frame() is None


async def test_who_stops_listening_gets_nothing_more() -> None:
    channel, theirs = await connect()
    got: list[bytes] = []

    def take(frame: bytes) -> None:
        got.append(frame)
        channel.listen(None)

    channel.listen(take)
    channel.data_received(b"".join(map(wire.encode, range(3))))
    assert got == [msgspec.msgpack.encode(0)]
    channel.listen(got.append)
    assert got == [msgspec.msgpack.encode(i) for i in range(3)]
    channel.transport.close()
    theirs.close()


async def test_a_channel_to_a_broken_peer_is_cut() -> None:
    channel, theirs = await connect()
    got: list[bytes] = []
    channel.listen(got.append)
    with theirs:
        theirs.sendall(wire.encode(1) + (2**32 - 1).to_bytes(4, "little") + b"more")
        await channel.closed
    assert got == [msgspec.msgpack.encode(1)]
