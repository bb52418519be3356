"""The engine-core process: a socket on one side, an `EngineCore` on the other.

Run as `python -m quire.engine.cores.core_main FD PULSE [WEIGHTS]`, where FD is one end of a Unix
socket pair whose other end the front end holds, PULSE the file of a `Pulse`, and WEIGHTS the
descriptor of memory for packed weights. When the other end of the socket closes, the front end is
gone, and this process ends at once.

A spare (`quire.engine.cores.spare`) is told to prepare first, and waits for the word to start.

One thread reads, and the main thread steps and sends; what a slow reader does not take is left to a
second thread (`sender.py`), so that nothing ever holds up a step.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.core import EngineCore
from quire.engine.cores import wire
from quire.engine.cores.culprit import find_culprit
from quire.engine.cores.obey import obey_contained
from quire.engine.cores.parts import encode_outputs
from quire.engine.cores.pulse import Activity, Pulse
from quire.engine.cores.sender import Sender
from quire.engine.cores.start_parts import StartParts
from quire.engine.messages import (
    Call,
    Failure,
    FromCore,
    Outputs,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Reply,
    Start,
    ToCore,
)
from quire.errors import QuireError
from quire.logger import flush_logs, get_logger, setup_logging
from quire.utils.function_trace import trace_functions
from quire.utils.process import (
    die_with_parent,
    end_first_without_memory,
    leave_group_signals_to_parent,
    set_process_title,
)

logger = get_logger(__name__)

TITLE: Final = "quire::EngineCore"
SPARE_TITLE: Final = "quire::SpareCore"
NICE: Final = 10
"""Of a spare that prepares: it gets a tenth of what a busy core gets. At 19 it would take minutes
beside one that uses all cores."""


@dataclass(slots=True)
class _Made:
    """What a step has to tell."""

    frames: list[bytes]
    too_large: list[str]
    """Requests whose output cannot be sent."""


class EngineCoreProcess:
    """Feeds a core from a socket and sends back what its steps produce.

    Args:
        sock: To the front end.
        pulse: Where it shows what it does; a page that nobody sees unless given.
        begun: When the interpreter was up, by the machine's monotonic clock.
        weights: Descriptor of the memory for weights that outlives this process, if there is any.
    """

    def __init__(
        self,
        sock: socket.socket,
        pulse: Pulse | None = None,
        begun: float | None = None,
        weights: int | None = None,
    ) -> None:
        self._sock = sock
        self._pulse = pulse or Pulse()
        self._taken = 0
        # messages, but for the one to prepare
        self._weights = weights
        self._is_prepared = False
        self._begun = time.monotonic() if begun is None else begun
        self._inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self._sender = Sender(sock, lambda: _ends_the_process("writes"))
        self.epoch = 0
        self._number = 1
        # of the next message; counted on the main thread alone
        self._again = False
        # the last step raised and is being tried once more

    def run(self) -> int:
        """Load, then step until told to end.

        Returns:
            The exit code.
        """
        threading.Thread(target=self._read, name="core-reader", daemon=True).start()
        try:
            start = self._take()
            if isinstance(start, Prepare):
                self._prepare(start)
                self._taken = 0
                start = self._take()
            assert isinstance(start, Start), f"the first message is {type(start).__name__}"
            set_process_title(TITLE)
            self.epoch = start.epoch
            self._loop(self._load(start))
        except QuireError as error:
            return self._fail(type(error).__name__, error.message)
        except Exception as error:
            logger.exception("the engine core stopped")
            what = f"the engine core stopped: {type(error).__name__}"
            return self._fail("EngineDead", what, "Its traceback is in the log above.")
        return 0

    def _prepare(self, asked: Prepare) -> None:
        """Do what can be done without knowing the limits of a core, and without much memory."""
        set_process_title(f"{SPARE_TITLE} starting")
        worker = threading.Thread(target=_import_gently, args=(asked.config, self._weights))
        worker.start()
        worker.join()
        set_process_title(SPARE_TITLE)
        self._is_prepared = True
        self._sender.put(wire.encode(Prepared(asked.epoch, 0)))

    def _load(self, start: Start) -> EngineCore:
        parts = StartParts(start.begun)
        if self._is_prepared:
            parts.end("promotion")
        else:
            parts.end("process", self._begun)
            _import_all(self._weights)
            parts.end("imports")

        def progress(phase: str, done: int, total: int) -> None:
            parts.hear(phase)
            self._send(Progress(self.epoch, self._number, phase, done, total))

        core = EngineCore(
            EngineConfig.from_dict(start.config), progress=progress, announce=self._announce
        )
        from quire.weights import kept

        if (weights := kept.kept_weights()) is not None:
            weights.finish()
        # What is here now stays: to look through all of it takes a tenth of a second, in which
        # every request would wait.
        gc.freeze()
        gc.enable()
        parts.end_loading()
        self._send(Ready(self.epoch, self._number, core.info.to_dict(), parts.seconds))
        return core

    def _loop(self, core: EngineCore) -> None:
        """Take what has arrived, then step; sleep on the inbox when there is nothing to do."""
        while True:
            while not core.has_requests or not self._inbox.empty():
                if self._inbox.empty():
                    self._show(Activity.IDLE)
                message = self._take()
                self._show(Activity.CALL if isinstance(message, Call) else Activity.TAKING)
                self._handle(core, message)
                self._show(Activity.STEP)
            self._step(core)

    def _take(self) -> ToCore:
        message = self._inbox.get()
        self._taken += 1
        return message

    def _show(self, phase: Activity) -> None:
        self._pulse.begin(phase, 0, 0, 0, self._taken, self._number - 1)

    def _announce(self, tokens: int, rows: int, attended: int) -> None:
        self._pulse.begin(Activity.STEP, tokens, rows, attended, self._taken, self._number - 1)

    def _step(self, core: EngineCore) -> None:
        """Step, and tell. A step that raises has not happened: it is tried once more, which helps
        against what passes, such as a lack of memory. If it raises again, the request that causes
        it is looked for and ended."""
        try:
            self._step_once(core)
            self._again = False
        except Exception as error:
            if self._again:
                self._end_culprit(core, error)
            else:
                logger.exception("a step raised %s and is tried once more", type(error).__name__)
            self._again = not self._again

    def _step_once(self, core: EngineCore) -> None:
        made = _Made([], [])

        def encode(outputs: list[EngineCoreOutput], stats: StepStats) -> None:
            made.frames, made.too_large = encode_outputs(self.epoch, self._number, outputs, stats)

        core.step_into(encode)
        for frame in made.frames:
            self._put(frame)
        if made.too_large:
            core.abort_requests(made.too_large)
        try:
            core.look_after()
        except Exception:  # the step has happened, and what it gave is on its way
            logger.exception("a completed step was followed by an exception")

    def _end_culprit(self, core: EngineCore, error: Exception) -> None:
        """End the request that makes steps raise.

        Raises:
            Exception: the error, if it is no single request's: a new core may do better.
        """
        culprit = find_culprit(core, lambda: self._step_once(core))
        if culprit is None:
            raise error
        logger.error("request %s makes steps raise, and ends", culprit, exc_info=error)
        reason = f"internal error in a step of it ({type(error).__name__}); see the server's log"
        output = core.fail_request(culprit, reason)
        if output is not None:
            self._send(Outputs(self.epoch, self._number, [output]))

    def _handle(self, core: EngineCore, message: ToCore) -> None:
        reply = obey_contained(core, message, self._number)
        if reply is None:
            return
        try:
            frame = wire.encode(reply)
        except Exception as error:
            if not isinstance(reply, Reply):
                raise
            logger.exception("the result of a verb cannot be sent")
            reason = f"its result cannot be sent: {error}"
            frame = wire.encode(Reply(reply.epoch, reply.number, reply.call_id, error=reason))
        self._put(frame)

    def _fail(self, kind: str, message: str, advice: str = "") -> int:
        # Before the message: whoever gets it points to the log, and may end, and this process
        # with it.
        flush_logs()
        self._send(Failure(self.epoch, self._number, message, kind, advice))
        self._sender.close(2.0)
        return 1

    def _send(self, message: FromCore) -> None:
        self._put(wire.encode(message))

    def _put(self, frame: bytes) -> None:
        """Send what has been encoded with `_number`. A step that is undone has taken no number."""
        self._number += 1
        self._sender.put(frame)

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToCore)
        with _ends_the_process("reads"):
            while (frame := wire.receive(self._sock)) is not None:
                self._inbox.put(decoder.decode(frame))
        # The front end is gone: nobody will read what we compute. A running step is not worth
        # waiting for.
        os._exit(0)


def _import_all(weights: int | None) -> None:
    """What a core is made of: torch above all. Map the weights, if they are there."""
    from quire.executor import inline  # noqa: F401
    from quire.weights import kept

    if weights is not None:
        kept.open_kept(weights)


def _import_gently(config: dict[str, Any], weights: int | None) -> None:
    """The same and whatever else need not wait, in a thread of low priority: another core is at
    work. (A process could not raise its priority again; this one's other threads keep it.)"""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    _import_all(weights)
    from quire.executor.base import make_executor

    with suppress(QuireError):  # a core says it better, when it starts
        given = EngineConfig.from_dict(config)
        shape = given.model.read_shape()
        make_executor(given.resolve(shape)[0], shape)


@contextmanager
def _ends_the_process(what: str) -> Iterator[None]:
    """Reading or writing that ends by an exception takes its process with it: a core that still
    computes, but hears or says nothing, would be noticed late and could not be helped."""
    try:
        yield
    except OSError:
        os._exit(0)  # the front end is gone
    except BaseException:
        logger.critical("what %s has failed, and the core with it", what, exc_info=True)
        flush_logs()
        os._exit(1)


def main(argv: list[str], begun: float) -> int:
    """What `core_main` runs; `begun`: see `EngineCoreProcess`."""
    die_with_parent()
    # The front end holds the journal with which a core can be replaced.
    end_first_without_memory()
    # The front end decides when to end, and says so by closing the socket: it may have requests
    # to finish first. Ctrl-C, systemd and container runtimes signal every process of the group.
    leave_group_signals_to_parent()
    faulthandler.enable()  # a crash in native code says where
    setup_logging("EngineCore", detached=True)
    if envs.TRACE_FUNCTION:
        logger.warning("QUIRE_TRACE_FUNCTION: calls go to %s", trace_functions())
    descriptor, page, *weights = map(int, argv[1:])
    pulse = Pulse(page)
    pulse.dump_at_signal()
    with socket.socket(fileno=descriptor) as sock:
        return EngineCoreProcess(sock, pulse, begun, *weights).run()
