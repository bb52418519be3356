"""The engine-core process: a socket on one side, an `EngineCore` on the other.

Run as `python -m quire.engine.cores.core_process FD`, where FD is one end of a Unix socket pair
whose other end the front end holds. When that end closes, the front end is gone, and this process
ends at once.

One thread reads, one writes, and the main thread steps, so a slow reader never holds up a step.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import socket
import sys
import threading

import msgspec

from quire import envs
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.core import EngineCore
from quire.engine.cores import wire
from quire.engine.cores.obey import obey
from quire.engine.messages import Failure, FromCore, Outputs, Progress, Ready, Start, ToCore
from quire.errors import QuireError
from quire.logger import get_logger, setup_logging
from quire.utils.function_trace import trace_functions
from quire.utils.process import (
    die_with_parent,
    leave_group_signals_to_parent,
    set_process_title,
)

logger = get_logger(__name__)


class EngineCoreProcess:
    """Feeds a core from a socket and sends back what its steps produce."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="core-writer", daemon=True)
        self.epoch = 0
        self._number = 1
        # of the next message; counted on the main thread alone
        self._again = False
        # the last step raised

    def run(self) -> int:
        """Load, then step until told to end.

        Returns:
            The exit code.
        """
        threading.Thread(target=self._read, name="core-reader", daemon=True).start()
        self._writer.start()
        start = self._inbox.get()
        assert isinstance(start, Start), f"the first message is {type(start).__name__}"
        self.epoch = start.epoch
        try:
            core = self._load(start)
            self._loop(core)
        except QuireError as error:
            return self._fail(type(error).__name__, error.message)
        except Exception as error:
            logger.exception("the engine core stopped")
            what = f"the engine core stopped: {type(error).__name__}"
            return self._fail("EngineDead", what, "Its traceback is in the log above.")
        return 0

    def _load(self, start: Start) -> EngineCore:
        from quire.config import EngineConfig

        core = EngineCore(EngineConfig.from_dict(start.config), progress=self._progress)
        # What is here now stays: to look through all of it takes a tenth of a second, in which
        # every request would wait.
        gc.freeze()
        self._send(Ready(self.epoch, self._number, core.info.to_dict()))
        return core

    def _loop(self, core: EngineCore) -> None:
        """Take what has arrived, then step; sleep on the inbox when there is nothing to do."""
        while True:
            while not core.has_requests or not self._inbox.empty():
                self._handle(core, self._inbox.get())
            self._step(core)

    def _step(self, core: EngineCore) -> None:
        """Step, and tell. A step that raises has not happened: it is tried once more, which helps
        against what passes, such as a lack of memory."""
        try:
            frame = core.step_into(self._frame)
            self._again = False
        except Exception as error:
            if self._again:
                raise
            self._again = True
            logger.exception("a step raised %s and is tried once more", type(error).__name__)
            return
        self._put(frame)

    def _frame(self, outputs: list[EngineCoreOutput], stats: StepStats) -> bytes:
        return wire.encode(Outputs(self.epoch, self._number, outputs, stats))

    def _handle(self, core: EngineCore, message: ToCore) -> None:
        reply = obey(core, message, self._number)
        if reply is not None:
            self._send(reply)

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._send(Progress(self.epoch, self._number, phase, done, total))

    def _fail(self, kind: str, message: str, advice: str = "") -> int:
        self._send(Failure(self.epoch, self._number, message, kind, advice))
        self._outbox.put(None)
        self._writer.join(timeout=2)
        return 1

    def _send(self, message: FromCore) -> None:
        self._put(wire.encode(message))

    def _put(self, frame: bytes) -> None:
        """Send what has been encoded with `_number`. A step that is undone has taken no number."""
        self._number += 1
        self._outbox.put(frame)

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToCore)
        while True:
            try:
                frame = wire.receive(self._sock)
            except OSError:
                frame = None
            if frame is None:
                # The front end is gone: nobody will read what we compute. A running step is not
                # worth waiting for.
                os._exit(0)
            self._inbox.put(decoder.decode(frame))

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._sock.sendall(frame)
            except OSError:
                os._exit(0)


def main(argv: list[str]) -> int:
    """Entry point."""
    die_with_parent()
    set_process_title("quire::EngineCore")
    # The front end decides when to end, and says so by closing the socket: it may have requests
    # to finish first. Ctrl-C, systemd and container runtimes signal every process of the group.
    leave_group_signals_to_parent()
    faulthandler.enable()  # a crash in native code says where
    setup_logging("EngineCore")
    if envs.TRACE_FUNCTION:
        logger.warning("QUIRE_TRACE_FUNCTION: calls go to %s", trace_functions())
    with socket.socket(fileno=int(argv[1])) as sock:
        return EngineCoreProcess(sock).run()


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stderr.flush()
    # Threads may still be blocked in the socket; there is nothing left to clean up.
    os._exit(code)
