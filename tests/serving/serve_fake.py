"""`run_server` with a fake engine, in a process of its own: `serve_fake.py PORT|SOCKET HOW DRAIN
[HANDOVER-SOCKET HANDOVER-SECONDS]`. `SERVE_FAKE` in the environment holds further options as JSON.

Its streams stand still until SIGUSR1 lets them go on, or ends the engine that is to die: what a
test wants to see in between, it sees however busy the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fake_engine import FakeEngine
from quire.config import EngineConfig, ServerConfig
from quire.errors import EngineDead, ModelLoadError
from quire.serving import drain
from quire.serving import server as serving


class Engine(FakeEngine):
    def __init__(self, how: str) -> None:
        super().__init__(reply="abcdefghij")
        self.how = how
        self.state, self.progress = "loading", ("weights", 1, 4)
        self.hang.clear()

    async def wait_ready(self) -> None:
        if self.how == "no-model":
            raise ModelLoadError("there is no model folder 'x'")
        if self.how == "bug":
            raise RuntimeError("a bug")
        if self.how == "loads-forever":
            await asyncio.sleep(600)
        if self.how == "hung-thread":
            self.hung = asyncio.ensure_future(asyncio.to_thread(time.sleep, 6000))
        self.state = "ready"
        go_on = self.die if self.how == "dies" else self.hang.set
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go_on)

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
    where, how, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    place: dict[str, object] = {"port": int(where)} if where.isdigit() else {"uds": where}
    if len(sys.argv) > 4:
        place |= {"handover_socket": sys.argv[4], "handover_timeout": float(sys.argv[5])}
    place |= json.loads(os.environ.get("SERVE_FAKE", "{}"))
    server = ServerConfig(shutdown_timeout=seconds, **place)  # type: ignore[arg-type]
    serving.FLUSH_SECONDS = drain.FLUSH_SECONDS = 60.0  # type: ignore[misc]
    serving.STOP_SECONDS = 60.0  # type: ignore[misc]
    return serving.run_server(EngineConfig(), server, lambda config: start(config, how))


if __name__ == "__main__":
    sys.exit(main())
