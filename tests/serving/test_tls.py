"""HTTPS: certificates of the server and of clients, and their replacement under load."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from patience import wait_for
from quire.config import ServerConfig
from quire.errors import ConfigError, StartupError
from quire.serving.tls import Tls
from server_process import CHAT, Process, serve  # noqa: F401

Serve = Callable[..., Process]
NOW = datetime.datetime.now(datetime.UTC)
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


@dataclass
class Made:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(PEM)

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            how = serialization.BestAvailableEncryption(passphrase)
        return self.key.private_bytes(PEM, PKCS8, how)


def make(name: str, by: Made | None = None) -> Made:
    """A certificate for 127.0.0.1, by an authority or by itself as one."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if by is None else by.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(days=1))
        .not_valid_after(NOW + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(by is None, None), critical=True)
        .sign(key if by is None else by.key, hashes.SHA256())
    )
    return Made(built, key)


OLD, NEW = make("old authority"), make("new authority")


class Files:
    """A certificate, its key and authorities, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / f"{n}.pem" for n in ("cert", "key", "ca"))

    def write(self, made: Made) -> None:
        self.cert.write_bytes(made.pem)
        self.key.write_bytes(made.key_pem())

    def trust(self, authority: Made) -> None:
        self.ca.write_bytes(authority.pem)

    def options(self, clients: bool = False) -> dict[str, object]:
        found: dict[str, object] = {
            "ssl_certfile": str(self.cert),
            "ssl_keyfile": str(self.key),
            "enable_ssl_refresh": True,
        }
        return found | ({"ssl_ca_certs": str(self.ca), "ssl_cert_reqs": 2} if clients else {})


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path)
    found.write(make("server", OLD))
    found.trust(OLD)
    return found


def client_context(tmp_path: Path, server_by: Made, shown: Made | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=server_by.pem.decode())
    if shown is not None:
        path = tmp_path / "client.pem"
        path.write_bytes(shown.pem + shown.key_pem())
        context.load_cert_chain(path)
    return context


def started(serve: Serve, options: dict[str, object]) -> Process:  # noqa: F811
    return serve(env={"SERVE_FAKE": json.dumps(options)})


def test_https(serve: Serve, files: Files, tmp_path: Path) -> None:  # noqa: F811
    server = started(serve, files.options())
    url = server.url()
    assert url.startswith("https://")
    server.go_on()
    with httpx.Client(base_url=url, verify=client_context(tmp_path, OLD)) as client:
        assert client.get("/health").status_code == 200
        assert "abcdefghij"[-1] in client.post("/v1/chat/completions", json=CHAT).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health", verify=client_context(tmp_path, NEW))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url.replace("https", "http") + "/health")
    server.signal()
    assert server.end() == 0


def test_clients_with_certificates(serve: Serve, files: Files, tmp_path: Path) -> None:  # noqa: F811
    url = started(serve, files.options(clients=True)).url()
    ours, other = make("client", OLD), make("client", NEW)

    def status(shown: Made | None) -> int:
        context = client_context(tmp_path, OLD, shown)
        try:
            return httpx.get(url + "/health", verify=context).status_code
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            return 0

    assert [status(ours), status(other), status(None)] == [200, 0, 0]
    files.trust(NEW)  # what was trusted before no longer is
    wait_for(lambda: status(other) == 200)
    assert [status(ours), status(None)] == [0, 0]


async def test_new_files_under_load(serve: Serve, files: Files, tmp_path: Path) -> None:  # noqa: F811
    server = started(serve, files.options())
    url = server.url()
    server.go_on()
    both = ssl.create_default_context(cadata=(OLD.pem + NEW.pem).decode())
    done, stop = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal done
        while not stop.is_set():  # a new connection for each
            async with httpx.AsyncClient(verify=both, timeout=60) as client:
                reply = await client.post(url + "/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
            done += 1

    clients = [asyncio.ensure_future(ask()) for _ in range(4)]
    async with httpx.AsyncClient(verify=client_context(tmp_path, OLD)) as staying:
        await staying.get(url + "/health")
        for by in (NEW, OLD, NEW):
            files.write(make("server", by))
            only = client_context(tmp_path, by)

            def served(only: ssl.SSLContext = only) -> bool:
                try:
                    return httpx.get(url + "/health", verify=only).status_code == 200
                except httpx.ConnectError:
                    return False

            await asyncio.to_thread(wait_for, served)
        assert (await staying.get(url + "/health")).status_code == 200
    stop.set()
    await asyncio.gather(*clients)
    assert done


def test_files_that_do_not_fit_are_not_taken_up(files: Files) -> None:
    tls = Tls(ServerConfig(**files.options()))  # type: ignore[arg-type]
    before = tls._current
    assert not tls.refresh()
    other = make("server", NEW)
    files.cert.write_bytes(other.pem)  # its key is not there yet
    assert not tls.refresh() and tls._current is before
    assert not tls.refresh()  # and said only once
    files.key.write_bytes(other.key_pem())
    assert tls.refresh() and tls._current is not before
    files.key.unlink()
    assert not tls.refresh()


def test_bad_files(files: Files) -> None:
    config = ServerConfig(**files.options(clients=True))  # type: ignore[arg-type]
    Tls(config)
    files.key.write_bytes(make("other").key_pem())
    with pytest.raises(StartupError, match="key does not belong to the certificate"):
        Tls(config)
    files.key.write_bytes(make("other").key_pem(b"secret"))
    with pytest.raises(StartupError, match="without a passphrase"):
        Tls(config)
    files.write(make("server", OLD))
    files.ca.write_text("nothing")
    with pytest.raises(StartupError, match="--ssl-ca-certs .* no usable certificate"):
        Tls(config)
    files.cert.write_text("nothing")
    with pytest.raises(StartupError, match="not in PEM format"):
        Tls(config)
    files.cert.unlink()
    with pytest.raises(StartupError, match="--ssl-certfile .* cannot be read: No such file"):
        Tls(config)


def test_ciphers(files: Files) -> None:
    good = ServerConfig(**files.options(), ssl_ciphers="ECDHE+AESGCM")  # type: ignore[arg-type]
    Tls(good)
    bad = ServerConfig(**files.options(), ssl_ciphers="NONSENSE")  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="--ssl-ciphers 'NONSENSE'"):
        Tls(bad)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ssl_keyfile": "k"}, "add --ssl-certfile"),
        ({"ssl_cert_reqs": 2}, "add --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "add --ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "ssl.cert.reqs must be"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)  # type: ignore[arg-type]
