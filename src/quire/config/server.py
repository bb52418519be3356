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
UNKNOWN_FIELDS: Final = ("refuse", "ignore")
"""What may become of unknown request fields."""
PROBES: Final = frozenset(
    ("/health", "/livez", "/readyz", "/ping", "/version", "/metrics", "/load")
)
"""Paths that orchestrators and scrapers request every few seconds."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs keys or `--allow-unauthenticated`."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    uds: str | None = None
    """Listen on this Unix socket instead of a port."""
    api_key: list[str] = field(default_factory=list)
    """Keys that clients must send as `Authorization: Bearer KEY`. They have the role user: routes
    for operators need `--admin-api-key`. Also read from `QUIRE_API_KEY`."""
    admin_api_key: list[str] = field(default_factory=list)
    """Keys that may call every route. Also read from `QUIRE_ADMIN_API_KEY`."""
    api_key_file: str | None = None
    """File of further keys, with a line `name:sha256[:role[:options]]` each; `quire keys` writes
    it. It is read again when it changes. With it, `/metrics` needs a key of the role metrics or
    admin."""
    shared_prefix_cache: bool = False
    """Let all keys find each other's prompts in the prefix cache. Otherwise, if there are several
    keys, each has a part of it for itself, so how fast a reply begins tells nothing of others'
    prompts."""
    allow_unauthenticated: bool = False
    """Serve without keys on an address that others can reach."""
    ssl_certfile: str | None = None
    """Serve HTTPS with this certificate (PEM; further certificates of the chain follow it)."""
    ssl_keyfile: str | None = None
    """Its private key (PEM, without a passphrase), if it is not in the same file."""
    ssl_ca_certs: str | None = None
    """Authorities (PEM) whose certificates clients may show."""
    ssl_cert_reqs: int = 0
    """Whether clients need a certificate: 0 no, 1 they may show one, 2 yes."""
    ssl_ciphers: str | None = None
    """Ciphers of TLS 1.2, in OpenSSL's syntax."""
    enable_ssl_refresh: bool = False
    """Look at these files every second; when they change, new connections use the new ones."""
    allowed_origins: list[str] = field(default_factory=list)
    """Origins (`https://example.com`, or `*`) whose web pages may call from a browser; as a JSON
    list, too. Without any, replies have no CORS headers."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """Methods that these pages may use."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """Request headers that these pages may send."""
    allow_credentials: bool = False
    """Let these pages send cookies and other credentials."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names in the `Host` header, beside those of this machine, that a server without keys on a
    loopback address answers to; `*`: all."""
    root_path: str = ""
    """Path under which a proxy mounts the server."""
    max_body_bytes: int = 4 * 2**20
    """Largest request body."""
    max_n_sequences: int = 1024
    """Most completions that one request may ask for: prompts times `n`. `QUIRE_MAX_N_SEQUENCES` (or
    `VLLM_MAX_N_SEQUENCES`) limits `n` alone, also of `LLM`."""
    max_stored_responses: int = 1000
    """How many replies of `/v1/responses` are kept in memory for `previous_response_id` and
    retrieval; the oldest make room for new ones. 0 keeps none."""
    max_stored_response_bytes: int = 64 * 2**20
    """Memory for these replies and their conversations, as JSON."""
    stored_response_seconds: float = 3600.0
    """For how long such a reply is kept."""
    enable_request_id_headers: bool = True
    """Return `X-Request-Id` with every reply."""
    enable_per_request_metrics: bool = False
    """Tell the timings of each request in its reply, as `metrics`; in a stream, in the chunk with
    the usage. The flag has vLLM's name."""
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

    unknown_request_fields: str = "refuse"
    """What becomes of a request with a field that its route does not know: `refuse` it, or `ignore`
    the field, with one warning for each name in the log; the reply names it in `X-Ignored-Fields`.
    Fields that are known and cannot be served are refused either way."""
    enable_force_include_usage: bool = False
    """End every stream of `/v1/chat/completions` and `/v1/completions` with the token counts, as if
    the client had sent `stream_options.include_usage`. The flag has vLLM's name."""
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
    enable_in_reasoning: bool = False
    """Have the form that a request asks for (`response_format`, `structured_outputs`, calls of
    tools) hold from the first token on. Otherwise a model that reasons does so first, freely, and
    the form holds from where its reasoning ends."""
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
        for name, words in (("journal_fsync", FSYNC), ("unknown_request_fields", UNKNOWN_FIELDS)):
            if (given := getattr(self, name)) not in words:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} must be one of {', '.join(words)}, got {given!r}", param=name
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
        self._check_tls()
        self._check_origins()
        if not (self.has_keys or self.allow_unauthenticated or self.uds or self.is_loopback):
            raise ConfigError(
                f"--host {self.host} can be reached by others, but no key is set: add --api-key "
                "or --api-key-file, or --allow-unauthenticated if that is what you want"
            )

    def _check_tls(self) -> None:
        given = (self.ssl_keyfile, self.ssl_ca_certs, self.ssl_ciphers)
        if self.ssl_certfile is None and (any(given) or self.ssl_cert_reqs):
            raise ConfigError("TLS needs a certificate: add --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} asks clients for certificates, but no "
                "authority is trusted: add --ssl-ca-certs"
            )

    def _check_origins(self) -> None:
        for origin in self.allowed_origins:
            scheme, mark, rest = origin.partition("://")
            if origin != "*" and not (scheme and mark and rest and "/" not in rest):
                raise ConfigError(
                    "--allowed-origins must be * or origins such as https://example.com, "
                    f"got {origin!r}",
                    param="allowed_origins",
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials needs --allowed-origins with names: with * every web page "
                "could use its visitors' credentials"
            )

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return bool(self.api_key or self.admin_api_key or self.api_key_file)

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
