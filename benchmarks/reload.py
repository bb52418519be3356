"""Whether requests fail while key file and certificates are replaced under load.

One server over TLS that asks clients for certificates, with a key file. Clients send requests, each
over a new connection or over one that stays, streamed or not. Meanwhile the key file is rewritten
(keys come and go, limits change; the clients' key stays), the server's certificate is replaced by
one of another authority, and the list of authorities for clients grows and shrinks (the clients'
stays): each so often, at `--every` seconds. Every answer must be a complete 200; and at the end,
the last of the new files must be in force: a new key and a new authority's client get in, a key
that has gone and an authority that has gone do not.

    python benchmarks/reload.py [--model DIR] [--seconds 30] [--every 1.5] [--json]

The exit code is 1 if a request failed, or the last files are not in force.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import re
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import one_server
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BODY: Final = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}
NOW: Final = datetime.datetime.now(datetime.UTC)


class Made:
    """A certificate and its key, by an authority or by itself as one."""

    def __init__(self, name: str, by: Made | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        built = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name if by is None else by.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=1))
            .not_valid_after(NOW + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        signer = self.key if by is None else by.key
        self.pem = built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @property
    def with_key(self) -> bytes:
        """Both in one file."""
        return self.pem + self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


class Files:
    """What the server reads, and what is written there next. Each file is replaced in one go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = [Made("one authority"), Made("another authority")]
        self.client_authority, self.guests = Made("clients"), Made("guests")
        self.client = folder / "client.pem"
        self.client.write_bytes(Made("a client", self.client_authority).with_key)
        self.changes = 0
        self.write()

    def write(self) -> None:
        """The next version of all files."""
        server = Made("server", self.servers[self.changes % 2])
        self._replace("server.pem", server.with_key)
        guests = self.guests.pem if self.changes % 2 else b""
        self._replace("authorities.pem", self.client_authority.pem + guests)
        keys = {"ann": f"concurrent={100 + self.changes}", f"key{self.changes}": ""}
        lines = [f"{n}:{hashlib.sha256(n.encode()).hexdigest()}:user:{o}" for n, o in keys.items()]
        self._replace("keys", "\n".join(lines).encode())
        self.changes += 1

    def _replace(self, name: str, data: bytes) -> None:
        fresh = self.folder / f"{name}.new"
        fresh.write_bytes(data)
        fresh.chmod(0o600)
        fresh.replace(self.folder / name)

    def context(self, certificate: Path | None = None, by: int | None = None) -> ssl.SSLContext:
        """Of a client who trusts one of the server's authorities, or both."""
        trusted = self.servers if by is None else [self.servers[by]]
        context = ssl.create_default_context(cadata=b"".join(m.pem for m in trusted).decode())
        context.load_cert_chain(certificate or self.client)
        return context

    @contextlib.contextmanager
    def serving(self, arguments: Sequence[str]) -> Iterator[int]:
        """The port of a `quire serve`."""
        flags = [*arguments]
        flags += ["--ssl-certfile", str(self.folder / "server.pem"), "--enable-ssl-refresh"]
        flags += ["--ssl-ca-certs", str(self.folder / "authorities.pem"), "--ssl-cert-reqs", "2"]
        flags += ["--api-key-file", str(self.folder / "keys"), "--disable-uvicorn-access-log"]
        with one_server.serving(*flags) as port:
            yield port


class Connection:
    """Asks over one connection; closes it after each request unless it `stays`."""

    def __init__(self, port: int, context: ssl.SSLContext, key: str, stays: bool) -> None:
        self._where = ("127.0.0.1", port, context)
        self._key, self._stays = key, stays
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, stream: bool) -> str:
        """`200` if the answer is complete, or what came instead."""
        try:
            return await self._ask(stream)
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            return type(error).__name__

    async def _ask(self, stream: bool) -> str:
        if self._streams is None:
            host, port, context = self._where
            self._streams = await asyncio.open_connection(host, port, ssl=context)
        reader, writer = self._streams
        body = json.dumps(BODY | {"stream": stream}).encode()
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {self._key}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"content-length: (\d+)", head)
        if length is not None:
            reply = await reader.readexactly(int(length.group(1)))
        else:
            reply = await reader.readuntil(b"\r\n0\r\n\r\n")
        if not self._stays:
            await self.close()
        status = head.split(b" ", 2)[1].decode()
        whole = b"data: [DONE]\n\n" in reply if stream else reply.endswith(b"}")
        return status if status != "200" or whole else "cut short"

    async def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            writer = self._streams[1]
            self._streams = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def measure(files: Files, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load and changes, and what became of both."""
    answers: Counter[str] = Counter()
    over = asyncio.Event()

    async def client(number: int) -> None:
        mine = Connection(port, files.context(), "ann", stays=number % 2 == 1)
        while not over.is_set():
            answers[await mine.ask(stream=number % 4 > 1)] += 1
        await mine.close()

    clients = [asyncio.ensure_future(client(i)) for i in range(options.clients)]
    end = asyncio.get_running_loop().time() + options.seconds
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(options.every)
        await asyncio.to_thread(files.write)
    in_force = await settled(files, port)
    over.set()
    await asyncio.gather(*clients)
    failed = answers.total() - answers["200"]
    return {
        "requests": answers.total(),
        "failed": failed,
        "answers": dict(answers),
        "changes": files.changes - 1,
        "last_files_in_force": in_force,
        "holds": not failed and in_force and files.changes > 1,
    }


async def settled(files: Files, port: int) -> bool:
    """Whether the last of the files hold, within a minute."""
    last = files.changes - 1
    guest = files.folder / "guest.pem"
    guest.write_bytes(Made("a guest", files.guests).with_key)

    async def answer(key: str, certificate: Path | None = None) -> str:
        context = files.context(certificate, last % 2)
        return await Connection(port, context, key, stays=False).ask(stream=False)

    for _ in range(60):
        await asyncio.sleep(1)
        found = [await answer(f"key{last}"), await answer(f"key{last - 1}")]
        found.append(await answer("ann", guest))
        if found[:2] == ["200", "401"] and (found[2] == "200") == bool(last % 2):
            return True
    return False


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="A model's folder; the embedded one if empty.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=1.5, help="Seconds between two changes.")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        with files.serving([options.model] if options.model else []) as port:
            found = asyncio.run(measure(files, port, options))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"{found['requests']} requests, {found['failed']} failed {found['answers']}, while all "
            f"files changed {found['changes']} times; the last ones are in force: "
            f"{found['last_files_in_force']}"
        )
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
