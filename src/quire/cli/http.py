"""A client of a running server: JSON and server-sent events over the standard library.

Knows HTTP and OpenAI's error format, but nothing of models. Only commands that talk to a running
server use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.errors import ConfigError, EngineError, RequestError, StartupError

if TYPE_CHECKING:
    import http.client

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
"""Seconds of silence after which the server counts as gone. A long prompt takes its time before the
first token."""


class Client:
    """One server, by its base URL (`http://127.0.0.1:8000`, with or without `/v1`)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ConfigError if the URL is not an http(s) one."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {url!r}")
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(f"--url has an invalid port: {url!r}") from None
        self._secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        self.has_key = bool(api_key)
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = url

    def model(self) -> str:
        """Name of the first model the server lists.

        Raises:
            StartupError: the server cannot be reached, refuses, or lists none.
        """
        connection, response = self._open("GET", "/v1/models", None)
        try:
            models = json.loads(response.read())["data"]
            return str(models[0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise StartupError(f"{self.url} answers, but lists no model at /v1/models") from None
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        """The body of a GET.

        Raises:
            StartupError: the server cannot be reached or lets nobody in.
            RequestError: it refuses this request.
            EngineError: the answer breaks off.
        """
        connection, response = self._open("GET", path, None)
        try:
            return response.read()
        except (OSError, ValueError) as error:
            raise EngineError(f"the answer of {self.url} broke off: {error}") from None
        finally:
            connection.close()

    def get_json(self, path: str) -> Any:
        """The JSON body of a GET.

        Raises:
            EngineError: the answer is no JSON, or what `get` raises.
        """
        try:
            return json.loads(self.get(path))
        except ValueError:
            raise EngineError(f"{self.url}{path} does not answer with JSON") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST and yield the events of the answer, until `[DONE]`.

        Closing the iterator closes the connection, which makes the server abort the request.

        Raises:
            StartupError: the server cannot be reached or lets nobody in.
            RequestError: it refuses this request.
            EngineError: the stream breaks off or carries an error.
        """
        connection, response = self._open("POST", path, body)
        try:
            for line in response:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _event(data)
        except (OSError, ValueError) as error:
            raise EngineError(f"the answer of {self.url} broke off: {error}") from None
        finally:
            connection.close()
        raise EngineError(f"the answer of {self.url} broke off before its end")

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        import http.client

        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_SECONDS)
        payload = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(_READ_SECONDS)
            connection.request(method, self._base + path, payload, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or error
            raise StartupError(
                f"cannot reach {self.url}: {reason}. Is a server running there? `quire serve` "
                "starts one"
            ) from None
        if response.status != 200:
            text = response.read(65536)
            connection.close()
            # 401 concerns every request to come; the others only this one.
            kind_of = RequestError if response.status in (400, 404, 413, 422, 429) else StartupError
            raise kind_of(f"{self.url} answers {response.status}: {_reason(text)}")
        return connection, response


def _event(data: bytes) -> dict[str, Any]:
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError("an event is not an object")
    if "error" in event:
        raise EngineError(_reason(data))
    return event


def _reason(body: bytes) -> str:
    """`error.message` of an OpenAI envelope, else the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "no reason given"
