"""The state that every handler can reach: the served models by name, and whether they accept
requests now.

Knows nothing of routes or wire formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire import envs
from quire.config import PoolerSpec, ServerConfig
from quire.engine.frontend.disk.disk_journal import DiskJournal
from quire.engine.frontend.stream import StreamBuffers
from quire.errors import NotFound, QuireError, UnsupportedTask
from quire.observability.metrics.http_metrics import HttpMetrics
from quire.observability.metrics.prometheus import HttpText
from quire.serving.auth import KeyRing
from quire.serving.engine_protocol import EngineClient
from quire.serving.errors import (
    EngineGone,
    EngineLoading,
    EngineReplacing,
    EngineStalled,
    ShuttingDown,
)
from quire.serving.kept_streams import KeptReplies
from quire.serving.key_accounts import KeyAccounts
from quire.serving.model_parsers import ModelParsers, choose_parsers
from quire.serving.owned_store import OwnedStore
from quire.serving.parsing import PARSERS
from quire.serving.unread import Unread
from quire.serving.unread_fields import UnknownFields
from quire.utils.timing import Clock, RealClock
from quire.version import __version__

LONGEST_GUESS: Final = 60.0
"""Seconds. No client is told to stay away for longer on the strength of an estimate, and OpenAI's
clients ignore a larger `Retry-After`."""

_OPEN: Final = frozenset(("ready", "stalled", "replacing"))
# states of an engine that accepts requests


@dataclass(slots=True)
class ServedModel:
    """A model name that requests may ask for, and the engine that serves it."""

    name: str
    """The name in replies."""
    engine: EngineClient
    fingerprint: str
    """`system_fingerprint`: equal for equal software and model configuration."""
    parsers: ModelParsers = ModelParsers()
    """Parsers for the text of its replies."""


class ServerState:
    """What all requests of one server share.

    Args:
        config: Where the server listens and who may call.
        engine: The first engine, if it has already been started.
        clock: Monotonic time.
        keys: Made from `config` if left out.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient | None = None,
        clock: Clock | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self.config = config
        self.models: dict[str, ServedModel] = {}
        """By served name; the first one is the default."""
        self.engine = engine
        self.keys = KeyRing(config) if keys is None else keys
        self.draining = False
        """Set on shutdown: readiness goes, and no new request is taken."""
        self.handed_over = False
        """Another process accepts connections now. Those that are here are served, but replies ask
        the clients to connect anew."""
        self.closed = False
        """Set at the end of a drain: nothing more is submitted, whenever it was accepted."""
        self.start_seconds: float | None = None
        """How long the start took; `None` before its end."""
        self._clock = clock or RealClock()
        self._born = self._clock.now()
        self._drain_ends = 0.0
        self.accounts = KeyAccounts(self._clock)
        """What the keys of the key file use."""
        self.keys.listen(self.accounts.use)
        self.http = HttpMetrics()
        self.http.keys_now = self.accounts.now
        self.http_text = HttpText(self.http)
        self.kept = KeptReplies(
            config.stream_retention, config.max_kept_streams, config.max_kept_bytes, self.http
        )
        """Replies for clients that come back."""
        self.unread = Unread(config.write_timeout, self._buffers, self.http.count_write_timeout)
        """What clients have not taken from their connections."""
        self.journal: DiskJournal | None = None
        """Holds them for the process after this one."""
        self.in_flight = 0
        """Requests for generation that are being answered."""
        self.answering = 0
        """HTTP requests with a body that has been read and a reply that has not ended: what a drain
        waits for. It includes those that are still being tokenised."""
        self.active_ids: set[str] = set()
        """Engine request ids of these, for the end of a drain."""
        self.unknown_fields = UnknownFields(config.unknown_request_fields == "ignore")
        """What becomes of request fields that no route knows."""
        self.responses: OwnedStore[Any] = OwnedStore(
            config.max_stored_responses,
            config.max_stored_response_bytes,
            config.stored_response_seconds,
            self._clock,
        )
        """What `/v1/responses` keeps for its callers."""
        self.created: Final = int(time.time())

    def serve(self, engine: EngineClient, parsers: Sequence[str] | None = None) -> None:
        """Serve an engine under its names; it may still be loading.

        Args:
            engine: The engine to serve.
            parsers: Names of the output parsers that read its replies, in this order. `None`: those
                of the configuration, or else those that its chat template shows.

        Raises:
            ConfigError: there is no such parser.
        """
        if parsers is not None:
            chosen = ModelParsers(tuple(PARSERS.get(name) for name in parsers))
        else:
            template = engine.tokenizer.chat_template
            sources = list(template.templates.values()) if template is not None else []
            chosen = choose_parsers(self.config, sources)
        model = engine.config.model
        if model.structured_outputs_config.get("enable_in_reasoning"):
            chosen = dataclasses.replace(chosen, in_reasoning=True)
        cache = engine.config.cache
        kept = f"{cache.kv_cache_dtype} {cache.kv_cache_dtype_skip_layers} {envs.CPU_INT4_W4A8}"
        digest = hashlib.sha256(f"{__version__} {model} {kept}".encode()).hexdigest()
        for name in dict.fromkeys(model.names):
            assert name not in self.models, f"{name} is served already"
            self.models[name] = ServedModel(name, engine, f"fp_{digest[:10]}", chosen)

    @property
    def engine(self) -> EngineClient | None:
        """The default engine, which serves routes without a model; `None` until it is started.
        Setting it replaces all engines."""
        return next((model.engine for model in self.models.values()), None)

    @engine.setter
    def engine(self, engine: EngineClient | None) -> None:
        self.models.clear()
        if engine is not None:
            self.serve(engine)

    def _buffers(self) -> StreamBuffers | None:
        """Where unread bytes are counted: all connections with the default engine."""
        return None if self.engine is None else self.engine.buffers

    @property
    def engines(self) -> list[EngineClient]:
        """All engines, each once."""
        return list({id(model.engine): model.engine for model in self.models.values()}.values())

    def status(self) -> str:
        """State of the server for probes, which is that of its default engine: `ready`, `loading`,
        `replacing`, `stalled`, `draining` or `dead`."""
        return self._status(self.engine)

    def mark_started(self) -> None:
        """Note that the first engine is ready."""
        self.start_seconds = self._clock.now() - self._born

    def begin_drain(self, seconds: float) -> None:
        """Accept no new requests from now on; those accepted before have `seconds` to finish. A
        second call changes nothing."""
        if not self.draining:
            self.draining, self._drain_ends = True, self._clock.now() + seconds

    def seconds_until_restart(self) -> float:
        """When this address can answer again at the latest, if the server is started anew as soon
        as it has ended: what is left of the drain, and a start like that of this process."""
        left = max(0.0, self._drain_ends - self._clock.now()) if self.draining else 0.0
        return max(1.0, left + (self.start_seconds or 0.0))

    def seconds_until_ready(self, engine: EngineClient | None) -> float:
        """Estimated from the progress of a model that is loading, as if its phase had begun when
        the server started."""
        _, percent = _progress(engine)
        if percent == 0:
            return 1.0
        passed = self._clock.now() - self._born
        return min(LONGEST_GUESS, max(1.0, passed * (100 - percent) / percent))

    def _status(self, engine: EngineClient | None) -> str:
        if self.draining:
            return "draining"
        if engine is None or engine.state != "ready":
            return "loading" if engine is None else engine.state
        return "stalled" if engine.is_stalled else "ready"

    @property
    def recovers(self) -> bool:
        """Whether the default engine's core is being replaced, or soon will be because it hangs."""
        status = self.status()
        if status == "stalled":
            assert self.engine is not None
            return self.engine.config.recovery.core_stall_timeout > 0
        return status == "replacing"

    def progress(self) -> tuple[str, int]:
        """While loading or replacing: the phase, and how much of it is done in percent."""
        return _progress(self.engine)

    def unused_id(self, request_id: str) -> str:
        """The id, made unique if a request with it is active, because callers may repeat theirs."""
        if request_id not in self.active_ids:
            return request_id
        return f"{request_id}-{uuid.uuid4().hex[:8]}"

    def check_open(self) -> None:
        """Refuse a request before its body is read, if no model could accept it.

        Raises:
            ShuttingDown, EngineLoading, EngineDead: none could; all are 503.
        """
        if not any(self._status(engine) in _OPEN for engine in self.engines):
            self._require(self.engine)

    def model_for(self, name: str | None = None) -> ServedModel:
        """The model that a request asks for, or the default one, if it accepts requests.

        An unknown name is refused only once the default engine is ready: a client that retries
        while the server starts or ends must not be told that its model does not exist.

        Raises:
            ShuttingDown, EngineLoading, EngineDead: it takes none; all are 503.
            NotFound: no served model has this name.
        """
        found = self.models.get(name) if name is not None else None
        self._require(self.engine if found is None else found.engine)
        if name is None:
            return next(iter(self.models.values()))
        if found is None:
            raise _unknown_model(name, self.models)
        return found

    def engine_for(self, name: str | None = None) -> EngineClient:
        """The engine of `model_for`, which says what is raised."""
        return self.model_for(name).engine

    def _require(self, engine: EngineClient | None) -> None:
        """Refuse if an engine cannot accept requests. One that is stalled or being replaced can,
        because what it accepts is not lost."""
        if self._status(engine) not in _OPEN and (error := self._why(engine)):
            raise error

    def unready(self) -> QuireError | None:
        """Why the server is not ready; `None` if it is."""
        return self._why(self.engine)

    def _why(self, engine: EngineClient | None) -> QuireError | None:
        match self._status(engine):
            case "ready":
                return None
            case "draining":
                return ShuttingDown(self.seconds_until_restart())
            case "dead":
                return EngineGone(self.seconds_until_restart())
            case "loading":
                return EngineLoading(*_progress(engine), self.seconds_until_ready(engine))
            case "replacing":
                return EngineReplacing(*_progress(engine))
            case _:
                return EngineStalled()


def _progress(engine: EngineClient | None) -> tuple[str, int]:
    if engine is None:
        return "starting", 0
    phase, done, total = engine.progress
    return phase, min(100, 100 * done // total) if total > 0 else 0


def _unknown_model(name: str, known: Iterable[str]) -> NotFound:
    served = ", ".join(f"`{one}`" for one in known)
    shown = name[:200] if name.isprintable() else ascii(name[:200])
    error = NotFound(f"The model `{shown}` does not exist. Served here: {served}.", param="model")
    error.code = "model_not_found"
    return error


def require_runner(engine: EngineClient, runner: str) -> PoolerSpec | None:
    """Check that the model is run for `generate` or `pooling`, as the caller needs; returns how it
    pools.

    Raises:
        UnsupportedTask: it is run for the other; the message says so.
    """
    pooler = engine.pooler
    if (pooler is not None) == (runner == "pooling"):
        return pooler
    name = engine.config.model.names[0]
    if pooler is None:
        raise UnsupportedTask(
            f"`{name}` generates text; embeddings, classes and scores need a pooling model, or a "
            "server started with --runner pooling.",
            param="model",
        )
    does = "gives embeddings" if pooler.task == "embed" else "classifies"
    raise UnsupportedTask(f"`{name}` {does}; it generates no text.", param="model")
