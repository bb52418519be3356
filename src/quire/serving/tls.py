"""TLS: one context for the socket, and certificates and authorities that can change under it.

Each handshake asks which context is current (`sni_callback` is called for it, whether or not the
client names a server). So a file that is replaced counts for the next connection, and open
connections stay. To load new files into the old context would not do: an authority that was removed
would still be trusted. Knows files and handshakes, but no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Final

from quire.config import ServerConfig
from quire.errors import StartupError
from quire.logger import get_logger

logger = get_logger(__name__)

LOOK_SECONDS: Final = 1.0
"""Between two looks at the files."""
_Stamp = tuple[int, int, int]


class Tls:
    """The server's side of TLS, as `ServerConfig` says.

    Args:
        config: With `ssl_certfile`.

    Raises:
        StartupError: a file is missing or wrong; names the flag.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._current = _load(config)
        self._stamps = self._look()
        self.context = _load(config)
        """For the listening socket. Every handshake goes on with the current one."""
        self.context.sni_callback = self._use_current

    def _use_current(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        handshake.context = self._current

    async def watch(self) -> None:
        """Follow changes of the files, forever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def refresh(self) -> bool:
        """Take up files that have changed; whether there are new ones in force. What does not fit
        together (a certificate is replaced before its key) is logged, and the former stay."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self._current = _load(self._config)
        except StartupError as error:
            logger.warning("TLS stays as it is until its files change again: %s", error.message)
            return False
        logger.info("TLS files have changed; new connections use the new ones")
        return True

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for _, path in _files(self._config)]


def _files(config: ServerConfig) -> list[tuple[str, str]]:
    """The files that are given, each with its flag."""
    named = (
        ("--ssl-certfile", config.ssl_certfile),
        ("--ssl-keyfile", config.ssl_keyfile),
        ("--ssl-ca-certs", config.ssl_ca_certs),
    )
    return [(flag, path) for flag, path in named if path is not None]


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _load(config: ServerConfig) -> ssl.SSLContext:
    """A context from the files as they are now.

    Raises:
        StartupError: one of them cannot be used.
    """
    for flag, path in _files(config):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert config.ssl_certfile is not None
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except (ssl.SSLError, ValueError) as error:
        key = config.ssl_keyfile or config.ssl_certfile
        raise StartupError(
            f"--ssl-certfile {config.ssl_certfile} and its key in {key} cannot be used: "
            f"{_reason(error)}"
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError as error:
            raise StartupError(
                f"--ssl-ca-certs {config.ssl_ca_certs} holds no usable certificate: "
                f"{_reason(error)}"
            ) from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise StartupError(
                f"--ssl-ciphers {config.ssl_ciphers!r} names no cipher that there is"
            ) from None
    return context


def _no_password() -> str:
    """OpenSSL would ask at the terminal, and the server would wait for an answer."""
    raise ValueError("the key is encrypted; store it without a passphrase, readable by you alone")


def _reason(error: ssl.SSLError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        known = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}
        return known.get(error.reason or "", "it is not in PEM format, or damaged")
    return str(error)
