"""Messages between a front end and an engine core: msgpack over a Unix socket, no pickle.

Each message carries the epoch of the core it belongs to, so that words of a dead core can be told
from those of its successor. Messages of a core are numbered as well: one that was lost or repeated
would be a gap or a repetition in somebody's text. A core in the caller's process gets and gives
the same messages, without encoding them.
"""

from __future__ import annotations

from typing import Any

import msgspec

import quire.errors
from quire.core.output import EngineCoreOutput
from quire.core.stats import StepStats
from quire.errors import EngineDead, QuireError
from quire.params import PoolingParams, SamplingParams


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """One completion to compute. A request with `n` > 1 becomes `n` of these."""

    request_id: str
    """Internal id, unique in this front end: `<external>-<8 hex digits>`, with `<i>_` in front for
    completion `i` of `n`."""
    external_id: str
    """The id the caller knows."""
    index: int
    """Which of the `n` completions."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    """With `n` = 1 and `seed`, `eos_token_ids`, `bad_words_token_ids` filled in."""
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    output_token_ids: list[int] = []
    """Already generated tokens, when a journal is replayed into a new core."""
    client: str = ""
    """Who asked, for the `fair` scheduling policy."""
    pooling_params: PoolingParams | None = None
    """Set for pooling models: the prompt is computed, nothing is sampled."""


class Start(msgspec.Struct, tag=True):
    """Front end to core, first message: the configuration."""

    epoch: int
    config: dict[str, Any]
    begun: float = 0.0
    """When the core was asked for, in seconds of the machine's monotonic clock."""


class Prepare(msgspec.Struct, tag=True):
    """To a spare process, first message: do what can be done before it is needed as a core."""

    epoch: int
    """0: it is no core yet."""
    config: dict[str, Any]


class AddRequests(msgspec.Struct, tag=True):
    """Front end to core."""

    epoch: int
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, tag=True):
    """Front end to core; unknown ids are ignored."""

    epoch: int
    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Front end to core: run a named control verb and answer with `Reply`."""

    epoch: int
    call_id: int
    verb: str
    args: dict[str, Any] = {}


class Prepared(msgspec.Struct, tag=True):
    """A spare process can become a core now. Not counted among the messages of a core."""

    epoch: int
    number: int


class Ready(msgspec.Struct, tag=True):
    """Core to front end: the model is loaded."""

    epoch: int
    number: int
    info: dict[str, Any]
    parts: dict[str, float] = {}
    """Seconds that each part of the start took: names of `quire.core.stats.RECOVERY_PARTS`."""


class Progress(msgspec.Struct, tag=True):
    """Core to front end while loading."""

    epoch: int
    number: int
    phase: str
    done: int = 0
    total: int = 0


class Outputs(msgspec.Struct, tag=True):
    """Core to front end: what one step produced."""

    epoch: int
    number: int
    outputs: list[EngineCoreOutput]
    stats: StepStats | None = None


class Reply(msgspec.Struct, tag=True):
    """Core to front end: the answer to a `Call`."""

    epoch: int
    number: int
    call_id: int
    result: Any = None
    error: str | None = None
    kind: str = "EngineError"
    """Name of the error's class in `quire.errors`."""


class Failure(msgspec.Struct, tag=True):
    """Core to front end: the core cannot start or go on."""

    epoch: int
    number: int
    message: str
    kind: str = "EngineDead"
    """Name of the class in `quire.errors`."""
    advice: str = ""
    """For the operator; of `EngineDead` alone."""

    def error(self) -> QuireError:
        """The error to raise on the front end's side."""
        kind = error_class(self.kind)
        if issubclass(kind, EngineDead):
            return kind(self.message, advice=self.advice)
        return kind(self.message)


ToCore = Start | Prepare | AddRequests | AbortRequests | Call
FromCore = Ready | Prepared | Progress | Outputs | Reply | Failure
"""Each with `epoch` and `number`: 1, 2, 3 in the order in which the core of that epoch sends."""


def error_class(kind: str) -> type[QuireError]:
    """The class in `quire.errors` that a message names; `EngineDead` if it names none."""
    found = getattr(quire.errors, kind, EngineDead)
    return found if isinstance(found, type) and issubclass(found, QuireError) else EngineDead
