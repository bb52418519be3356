"""One request over HTTP, timed: what is sent when, and when each output comes.

The only place of the benchmarks that knows aiohttp. Knows no load: `load.py` says when to ask.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from quire.bench.backends import MAX_TOKENS, Asking, Backend, error_of
from quire.bench.load import UNREACHABLE
from quire.bench.result import RequestRecord
from quire.errors import ConfigError, StartupError
from quire.workload.request import WorkloadRequest

if TYPE_CHECKING:
    import aiohttp

QUICK_SECONDS: Final = 10.0
"""For questions beside the load: models, metrics, profiler."""
_MOST_REASON: Final = 300
_MOST_STRAY: Final = 65536
"""Bytes of a reply without events that are kept, to say why it has none."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def base_url_of(text: str) -> str:
    """The root of a server, from a URL with or without `/v1`.

    Raises:
        ConfigError: it is no http(s) URL.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.port is None or parts.port > 0
    except ValueError:  # a host or a port that is none
        is_valid = False
    if not is_valid or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url must look like http://127.0.0.1:8000, got {text!r}")
    return url.rstrip("/").removesuffix("/v1")


def check_header(flag: str, name: str, value: str) -> None:
    """Tell before the load whether a header can be sent.

    Raises:
        ConfigError: its name or its value has a character that HTTP forbids.
    """
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{flag}: {name!r} is no name of an HTTP header")
    if not value.replace("\t", " ").isprintable():
        # The value may be a key: it is not shown.
        raise ConfigError(
            f"{flag}: the value of {name} has a line break or another character that an HTTP "
            "header cannot hold: take it out"
        )


class BenchClient:
    """A connection pool to one server, in the event loop that enters it.

    Args:
        base_url: Its root.
        backend: How it is asked.
        endpoint: Path to ask instead of the backend's own.
        headers: Of every request.
        verify: False: take any certificate.
        request_timeout: Seconds for one request from sending to the end.

    Raises:
        StartupError: aiohttp is not installed.
    """

    def __init__(
        self,
        base_url: str,
        backend: Backend,
        *,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: bool = True,
        request_timeout: float = 6 * 3600.0,
    ) -> None:
        try:
            import aiohttp
        except ImportError:
            raise StartupError(
                "benchmarks of servers need aiohttp: pip install 'quire[bench]'"
            ) from None
        self._aiohttp = aiohttp
        self.base_url, self.backend = base_url, backend
        self._url = base_url + (endpoint or backend.path)
        self._headers = dict(headers or {})
        self._verify = verify
        self._timeout = request_timeout
        self._session: aiohttp.ClientSession | None = None
        self.heard: Callable[[], None] = _nothing
        """Called for each piece of a reply: the server is alive."""

    async def __aenter__(self) -> BenchClient:
        # A closed loop would hide the server's queue: no limit on connections.
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=self._verify)
        self._session = self._aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=self._aiohttp.ClientTimeout(total=self._timeout, sock_connect=30),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, request: WorkloadRequest, asking: Asking, request_id: str | None = None
    ) -> RequestRecord:
        """One request. Whatever goes wrong is in the record's `error`; only a cancellation is
        raised."""
        assert self._session is not None
        body = self.backend.body(request, asking)
        payload = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if request_id is not None:
            headers["x-request-id"] = request_id
        record = RequestRecord(time.perf_counter(), request.prompt_len, priority=request.priority)
        reader = _ReplyReader(self.backend, record, _asks_for_nothing(body))
        try:
            async with self._session.post(self._url, data=payload, headers=headers) as reply:
                if reply.status != 200:
                    record.status, record.error = reply.status, await _refusal(reply)
                    self.heard()
                else:
                    await self._read(reply, reader)
        except self._aiohttp.ClientConnectorError as error:
            record.error = UNREACHABLE + _reason(error)
        except TimeoutError:
            record.error = f"no end after {self._timeout:g} s (--request-timeout)"
        except (self._aiohttp.ClientError, OSError) as error:
            record.error = f"the reply broke off: {error or type(error).__name__}"
        except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested deeply
            record.error = f"the reply cannot be read: {error}"[:_MOST_REASON]
        reader.close()
        return record

    async def get(self, path: str, within: float = QUICK_SECONDS) -> tuple[int, bytes]:
        """Status and body of a GET that ends within so many seconds.

        Raises:
            StartupError: the server cannot be reached.
        """
        return await self._quick("GET", path, within)

    async def post(self, path: str) -> tuple[int, bytes]:
        """Status and body of a POST without a body.

        Raises:
            StartupError: the server cannot be reached.
        """
        return await self._quick("POST", path, QUICK_SECONDS)

    async def _quick(self, method: str, path: str, within: float) -> tuple[int, bytes]:
        assert self._session is not None
        limit = self._aiohttp.ClientTimeout(total=within)
        try:
            url = self.base_url + path
            async with self._session.request(method, url, timeout=limit) as reply:
                return reply.status, await reply.read()
        except TimeoutError:
            raise StartupError(
                f"{self.base_url} did not answer {path} within {within:g} s"
            ) from None
        except (self._aiohttp.ClientError, OSError) as error:
            raise StartupError(
                f"cannot reach {self.base_url}: {_reason(error)}. Is a server running there? "
                "`quire serve` starts one"
            ) from None

    async def _read(self, reply: aiohttp.ClientResponse, reader: _ReplyReader) -> None:
        if not self.backend.streams:
            body = await reply.read()
            self.heard()
            reader.whole(body, time.perf_counter())
            return
        async for piece in reply.content.iter_any():
            now = time.perf_counter()
            self.heard()
            reader.feed(piece, now)


class _ReplyReader:
    """Turns what comes into the times and counts of a record.

    Args:
        backend: Knows the API.
        record: Filled in.
        may_be_empty: Whether a reply without any output is right.
    """

    def __init__(self, backend: Backend, record: RequestRecord, may_be_empty: bool) -> None:
        self._backend, self._record = backend, record
        self._may_be_empty = may_be_empty or not backend.streams
        self._rest = b""
        self._stray = b""
        """Lines that are no events, as long as no event came."""
        self._texts: list[str] = []
        self._latest = self._heard_at = record.start
        self._is_whole = self._has_events = False

    def feed(self, piece: bytes, now: float) -> None:
        """Read bytes of a stream that came now.

        Raises:
            ValueError: an event cannot be read.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._has_events = True
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._is_whole, self._heard_at = True, now
                else:
                    self._take(json.loads(data), now)
            elif not self._has_events and len(self._stray) < _MOST_STRAY:
                self._stray += line + b"\n"

    def whole(self, body: bytes, now: float) -> None:
        """Read a reply that came at once.

        Raises:
            ValueError: it cannot be read.
        """
        self._take(json.loads(body), now)

    def close(self) -> None:
        """Nothing more comes: settle the record."""
        record = self._record
        record.text = _valid("".join(self._texts))
        record.error = _valid(record.error or self._fault())
        if not record.error:
            record.end = self._heard_at if record.first_token is None else self._latest

    def _fault(self) -> str:
        """Why a reply that was read to its end is none; empty: it is one."""
        if not self._is_whole:
            said = "" if self._has_events else _error_in(self._stray + self._rest)
            return said or "the reply broke off before its end"
        if self._record.first_token is None and not self._may_be_empty:
            return "no token came: the reply ended without any output"
        return ""

    def _take(self, event: Any, now: float) -> None:
        part, record = self._backend.read(event), self._record
        self._heard_at = now
        if part.error:
            record.error = record.error or part.error[:_MOST_REASON]
        if part.prompt_tokens is not None:
            record.input_len = part.prompt_tokens
        if part.output_tokens is not None:
            record.output_len = part.output_tokens
        if part.is_end:
            self._is_whole = True
        if part.is_output:
            self._texts.append(part.text)
            if record.first_token is None:
                record.first_token = now
            else:
                record.itls.append(now - self._latest)
            self._latest = now


def _valid(text: str) -> str:
    """A text with marks for half characters, which JSON can hold, but neither a tokenizer nor a
    file. Halves that came in two events are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _asks_for_nothing(body: Mapping[str, Any]) -> bool:
    """Whether a request allows no token at all."""
    return any(body.get(name) == 0 for name in MAX_TOKENS)


def _error_in(body: bytes) -> str:
    """What a reply says that should have been a stream, and is an error in JSON."""
    try:
        return error_of(json.loads(body))[:_MOST_REASON]
    except (ValueError, RecursionError):
        return ""


async def _refusal(reply: aiohttp.ClientResponse) -> str:
    body = (await reply.read())[:65536]
    try:
        said = json.loads(body)
        reason = said["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = " ".join(body.decode("utf-8", "replace").split())
    return f"{reply.status}: {str(reason)[:_MOST_REASON] or 'no reason given'}"


def _reason(error: Exception) -> str:
    """Why there is no connection, without the library's own words around it."""
    inner = getattr(error, "os_error", None) or error
    number = getattr(inner, "errno", None)
    if number and number > 0:
        return os.strerror(number)
    # The errors of names (`socket.gaierror`) have numbers of their own, below 0.
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


def _nothing() -> None:
    pass
