"""`run_server` with a fake engine, in a process of its own: `serve_fake.py PORT|SOCKET [HOW]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeEngine
from quire.config import EngineConfig, ServerConfig
from quire.errors import EngineDead, ModelLoadError
from quire.serving.server import run_server


class Engine(FakeEngine):
    def __init__(self, how: str) -> None:
        super().__init__(reply="abcdefghij")
        self.how = how
        self.state, self.progress = "loading", ("weights", 1, 4)
        self.delay = 0.05

    async def wait_ready(self) -> None:
        if self.how == "no-model":
            raise ModelLoadError("there is no model folder 'x'")
        if self.how == "bug":
            raise RuntimeError("a bug")
        if self.how == "loads-forever":
            await asyncio.sleep(600)
        await asyncio.sleep(0.2)
        self.state = "ready"
        if self.how == "dies":
            asyncio.get_running_loop().call_later(0.2, self.die)

    def die(self) -> None:
        for stream, task, _ in self._tasks.values():
            task.cancel()
            stream.queue.put_nowait(EngineDead("the engine core died"))
        self._tasks.clear()
        self.state = "dead"

    async def shutdown(self) -> None:
        if self.how == "stuck":
            await asyncio.sleep(600)
        await super().shutdown()
        print("engine stopped", flush=True)


async def start(config: EngineConfig, how: str) -> Engine:
    return Engine(how)


def main() -> int:
    where, how, drain = sys.argv[1], sys.argv[2], float(sys.argv[3])
    place = {"port": int(where)} if where.isdigit() else {"uds": where}
    server = ServerConfig(shutdown_timeout=drain, **place)  # type: ignore[arg-type]
    return run_server(EngineConfig(), server, lambda config: start(config, how))


if __name__ == "__main__":
    sys.exit(main())
