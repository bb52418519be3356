"""What an engine cannot record, and what its front end cannot go along with, ends its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fake_core import FakeCore
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, QuireError


def engine_of(cores: list[FakeCore], **options: Any) -> AsyncLLM:
    def make(*given: Any) -> FakeCore:
        cores.append(FakeCore(*given))
        return cores[-1]

    return AsyncLLM(EngineConfig.from_options(**options), entropy=b"", make_core=make)


@pytest.mark.parametrize("name", ["absent/trace.jsonl", ".", "a\0b"])
def test_a_recording_that_cannot_be_written_is_told_before_a_core_is_made(
    name: str, tmp_path: Path
) -> None:
    async def start() -> None:
        engine_of([], record=f"{tmp_path}/{name}")

    with pytest.raises(ConfigError, match="--record: cannot write"):
        asyncio.run(start())


def test_an_engine_that_has_not_started_keeps_the_last_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("the last one")

    async def start() -> None:
        engine_of([], record=str(path))

    asyncio.run(start())
    assert path.read_text() == "the last one"


@pytest.mark.parametrize("error", [ConfigError("no disk"), KeyError("device")], ids=repr)
def test_a_front_end_that_cannot_start_ends_the_start(error: Exception) -> None:
    def fails(*_: Any) -> None:
        raise error

    async def start() -> None:
        cores: list[FakeCore] = []
        engine = engine_of(cores)
        engine.frontend.started = fails  # type: ignore[method-assign]
        engine.supervisor.start()
        while cores[0].state == "loading":
            cores[0].load()
        with pytest.raises(type(error)):  # where a process says it, this is logged
            while cores[0].outbox:
                cores[0].give()
        try:
            async with asyncio.timeout(60):
                await engine.wait_ready()
        except QuireError as said:
            told = said.message
        assert told == str(error) if isinstance(error, QuireError) else "'device'" in told
        assert engine.state == "dead"
        await engine.shutdown()

    asyncio.run(start())
