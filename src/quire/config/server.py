"""Where the HTTP server listens, and who may call it. The engine core never sees this."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final

from quire.bounds import check_section
from quire.errors import ConfigError

LOG_LEVELS: Final = {
    "trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50,
}  # fmt: skip
"""uvicorn's names, by their numbers."""
FSYNC: Final = ("never", "interval", "always")
"""When a journal is synced."""
PROBES: Final = frozenset(
    ("/health", "/livez", "/readyz", "/ping", "/version", "/metrics", "/load")
)
"""Paths that orchestrators and scrapers request every few seconds."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs `--api-key` or
    `--allow-unauthenticated`."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    uds: str | None = None
    """Listen on this Unix socket instead of a port."""
    api_key: list[str] = field(default_factory=list)
    """Keys that clients must send as `Authorization: Bearer KEY`. Also read from
    `QUIRE_API_KEY`."""
    allow_unauthenticated: bool = False
    """Serve without keys on an address that others can reach."""
    root_path: str = ""
    """Path under which a proxy mounts the server."""
    max_body_bytes: int = 4 * 2**20
    """Largest request body."""
    max_stored_responses: int = 1000
    """How many replies of `/v1/responses` are kept in memory for `previous_response_id` and
    retrieval; the oldest make room for new ones. 0 keeps none."""
    max_stored_response_bytes: int = 64 * 2**20
    """Memory for these replies and their conversations, as JSON."""
    stored_response_seconds: float = 3600.0
    """For how long such a reply is kept."""
    enable_request_id_headers: bool = True
    """Return `X-Request-Id` with every reply."""
    disable_uvicorn_access_log: bool = False
    """Do not log requests."""
    disable_access_log_for_endpoints: str | None = None
    """Comma-separated paths whose requests are logged only at level DEBUG. Empty: no such path.
    Default: the probes and scrapes, `/health,/livez,/readyz,/ping,/version,/metrics,/load`."""
    uvicorn_log_level: str = "info"
    """Lowest level of the HTTP server's own log lines: `trace`, `debug`, `info`, `warning`, `error`
    or `critical`. Requests are logged at `info`. Of uvicorn's messages only warnings are shown,
    unless this is `debug` or `trace`."""
    shutdown_timeout: float = 25.0
    """Seconds that running requests have to finish after SIGTERM, SIGHUP or Ctrl-C; what is not
    finished then ends with an error. 0 ends them at once, and so does a second signal. The default
    is less than the 30 s after which Kubernetes kills a pod."""
    stream_keep_alive: float = 10.0
    """Seconds of silence after which a stream of server-sent events gets a comment line, which
    clients skip, so that proxies keep the connection: while a request waits, a long prompt is
    computed or the engine core is replaced. 0: never."""
    handover_socket: str | None = None
    """Unix socket by which the next server started with the same flag takes over this one's
    listening socket once its model is loaded; no connection is refused meanwhile. This one ends
    when its streams have. Nothing is taken over if no server answers there."""
    handover_timeout: float = 600.0
    """Seconds that requests have to finish after the listening socket was taken over; then as
    after SIGTERM."""
    write_timeout: float = 60.0
    """Seconds after which a connection is closed whose client has taken nothing of a reply that
    waits for it. Reading slowly is not enough. 0: never."""
    resumable_streams: bool = False
    """Keep the reply to every request, as if it had the header `X-Resumable: true`: when its client
    disconnects, generation goes on, and the client can fetch the rest. A request with
    `X-Resumable: false` is not kept."""
    stream_retention: float = 300.0
    """Seconds for which a resumable reply can be fetched after its end. 0: only while it is being
    generated."""
    max_kept_streams: int = 1024
    """Most resumable replies, running and ended. The oldest that has ended makes room for another;
    if all are running, a request that asks for one gets 429."""
    max_kept_bytes: int = 2**28
    """Most bytes of all resumable replies. The oldest that have ended make room; then the longest
    that is running loses what its readers have, or ends if it has no reader."""

    disable_fastapi_docs: bool = False
    """Do not describe the routes at `/openapi.json` and `/docs`. The flag has vLLM's name."""
    enable_auto_tool_choice: bool = True
    """Let clients leave it to the model whether to call a tool. Otherwise requests with tools need
    another `tool_choice` than `auto`."""
    tool_call_parser: str | None = None
    """Parser that finds tool calls in the output, by its name (see docs/tools.md); `none` leaves
    them in the text. Default: the one whose syntax is in the chat template."""
    reasoning_parser: str = ""
    """Parser that splits reasoning from the answer; `none` leaves it in the text. Default: the one
    whose marks are in the chat template."""
    journal_dir: str | None = None
    """Folder (mode 0700) of a journal of resumable requests: a server that is started again goes on
    with those that were unfinished, and their clients can fetch the rest. It holds prompts and
    outputs."""
    journal_fsync: str = "interval"
    """When the journal is synced to the disk: `never`, `interval` (every second) or `always`.
    Without it the journal outlives the process but not the machine. `always` also lets no stream
    begin before its request is on the disk."""
    journal_max_bytes: int = 2**30
    """Largest size of the journal. Requests beyond it are served, but not written."""
    journal_key_file: str | None = None
    """File with 32 random bytes with which the journal is encrypted (AES-256-GCM). Needs
    `pip install 'quire[journal]'`."""
    journal_claim_timeout: float = 300.0
    """Seconds after a start in which a client must ask for a request that goes on from the journal;
    then it is ended."""

    def __post_init__(self) -> None:
        check_section(self)
        if self.journal_fsync not in FSYNC:
            raise ConfigError(
                f"--journal-fsync must be one of {', '.join(FSYNC)}, got {self.journal_fsync!r}",
                param="journal_fsync",
            )
        if self.uvicorn_log_level not in LOG_LEVELS:
            raise ConfigError(
                f"--uvicorn-log-level must be one of {', '.join(LOG_LEVELS)}, "
                f"got {self.uvicorn_log_level!r}"
            )
        for path in self.unlogged_paths:
            if not path.startswith("/"):
                raise ConfigError(
                    "--disable-access-log-for-endpoints must be paths that begin with /, "
                    f"separated by commas, got {path!r}"
                )
        if not (self.api_key or self.allow_unauthenticated or self.uds or self.is_loopback):
            raise ConfigError(
                f"--host {self.host} can be reached by others, but no key is set: add --api-key, "
                "or --allow-unauthenticated if that is what you want"
            )

    @property
    def unlogged_paths(self) -> frozenset[str]:
        """Paths whose requests are logged at level DEBUG only."""
        given = self.disable_access_log_for_endpoints
        if given is None:
            return PROBES
        return frozenset(path for part in given.split(",") if (path := part.strip()))

    @property
    def logs_access(self) -> bool:
        """Whether requests are logged at all."""
        return not self.disable_uvicorn_access_log and LOG_LEVELS[self.uvicorn_log_level] <= 20

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
