"""A core that computes nothing, for front ends and supervisors: deterministic, without a process.

Nothing happens by itself. What the front end sends lies in `inbox` until `take` is called, what the
core says lies in `outbox` until `give` is; in between, a test may lose, repeat or exchange
messages. The tokens of a request are a function of its prompt, seed and position, as those of a
real one are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from known_streams import token
from quire.config import EngineConfig
from quire.core.admission import LIVE_LIMITS
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.engine.cores.death import Death
from quire.engine.cores.handle import OnExit, OnMessage
from quire.engine.cores.watchdog import Observation
from quire.engine.messages import (
    AbortRequests,
    AddRequests,
    Call,
    EngineCoreRequest,
    Failure,
    FromCore,
    Outputs,
    Progress,
    Ready,
    Reply,
    ToCore,
)
from quire.outputs import FinishReason

INFO = {"device": "nothing", "dtype": "none", "num_blocks": 7}


class FakeCore:
    """One core of one epoch."""

    def __init__(self, epoch: int, on_message: OnMessage, on_exit: OnExit) -> None:
        self.epoch = epoch
        self.inbox: deque[ToCore] = deque()
        self.outbox: deque[FromCore] = deque()
        self.requests: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.limits: dict[str, Any] = {}
        self.state = "new"
        """`new`, `loading`, `ready`, `failed` or `gone`."""
        self.stopped = self.reaped = False
        self.num_steps = 0
        self.seen: Observation | None = None
        """What a watchdog sees."""
        self.condemned = False
        self._on_message = on_message
        self._on_exit = on_exit
        self._said = 0

    # ---- as `CoreHandle` says ----------------------------------------------------------------

    def start(self, config: EngineConfig) -> None:
        assert self.state == "new", "a core is never started twice"
        self.state = "loading"
        self.limits = {name: getattr(config.scheduler, name) for name in LIVE_LIMITS}

    def send(self, message: ToCore) -> None:
        assert message.epoch == self.epoch, "sent to the wrong core"
        if self.state != "gone":
            self.inbox.append(message)

    def prepare(self, message: ToCore) -> Callable[[], None]:
        return partial(self.send, message)

    def observe(self, closely: bool) -> Observation | None:
        return self.seen

    def condemn(self) -> None:
        self.condemned = True

    def stop(self) -> None:
        self.state = "gone"
        self.stopped = True

    async def ended(self, grace: float = 1.0) -> None:
        assert self.stopped, "it was not told to stop"
        self.reaped = True

    # ---- what tests do with it ---------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether `take` or `step` would do anything."""
        return self.state == "loading" or (
            self.state == "ready" and bool(self.inbox or self.requests)
        )

    def load(self) -> None:
        """One part of loading: twice progress, then it is ready."""
        if self._said < 2:
            self._say(Progress(self.epoch, 0, "weights", 50 * self._said, 100))
        else:
            self.state = "ready"
            self._say(Ready(self.epoch, 0, INFO))

    def take(self) -> None:
        """Take the next message."""
        match self.inbox.popleft():
            case AddRequests(requests=requests):
                for request in requests:
                    assert request.request_id not in self.requests, "the core has it already"
                    self.requests[request.request_id] = request, list(request.output_token_ids)
            case AbortRequests(request_ids=ids):
                for request_id in ids:
                    self.requests.pop(request_id, None)
            case Call(call_id=call_id, args=args):
                self.limits |= {name: args[name] for name in args if name != "priorities"}
                self._say(Reply(self.epoch, 0, call_id, dict(self.limits)))

    def step(self, tokens: int = 1) -> None:
        """So many tokens for each request that has a seat."""
        self.num_steps += 1
        seated = list(self.requests.items())[: self.limits["max_num_seqs"]]
        outputs = [self._advance(request, done, tokens) for _, (request, done) in seated]
        waiting = len(self.requests) - len(seated)
        stats = StepStats(step=self.num_steps, num_waiting=max(0, waiting))
        self._say(Outputs(self.epoch, 0, outputs, stats))

    def give(self) -> None:
        """Have the front end hear the next message, whether it still listens or not."""
        self._on_message(self.outbox.popleft())

    def fail(self, kind: str = "EngineDead") -> None:
        """Say that it cannot go on."""
        self.state = "failed"
        self._say(Failure(self.epoch, 0, "it does not work", kind))

    def die(self) -> None:
        """End like a process that was killed: what it had said may still be heard, or not."""
        self.state = "gone"
        self._on_exit(self, Death("killed by SIGKILL", "By a test."))

    def _say(self, message: FromCore) -> None:
        self._said += 1
        message.number = self._said
        self.outbox.append(message)

    def _advance(
        self, request: EngineCoreRequest, done: list[int], tokens: int
    ) -> EngineCoreOutput:
        params = request.sampling_params
        most = params.max_tokens or 0
        new = [
            token(request.prompt_token_ids, params.seed, position)
            for position in range(len(done), min(len(done) + tokens, most))
        ]
        done += new
        ended = FinishReason.LENGTH if len(done) == most else None
        if ended:
            del self.requests[request.request_id]
        return EngineCoreOutput(request.request_id, new, finish_reason=ended)
