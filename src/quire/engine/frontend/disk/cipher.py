"""Encryption of journal files with AES-256-GCM. The only module that imports `cryptography`; extra
`[journal]`.

Each file has a key of its own, derived from the key file and the file's salt. Knows no format.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from typing import Final

from quire.engine.frontend.disk.records import Cipher, Header
from quire.errors import ConfigError

KEY_BYTES: Final = 32


def read_key(path: str) -> bytes:
    """The key in a key file: 32 bytes as they are, in hexadecimal, or in base64.

    Raises:
        ConfigError: there is no such file, others may read it, it holds no such key, or the library
            is missing.
    """
    flag = f"--journal-key-file {path}"
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{flag} needs the package cryptography: pip install 'quire[journal]'"
        ) from None
    try:
        with open(path, "rb") as file:
            mode, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(1024)
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{flag} may be used by others (mode {mode:o}): chmod 600 it")
    key = _decoded(data)
    if key is None:
        raise ConfigError(
            f"{flag} must hold {KEY_BYTES} random bytes, as they are, in hexadecimal or in base64: "
            "openssl rand -hex 32"
        )
    return key


def _decoded(data: bytes) -> bytes | None:
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    try:
        is_hex = len(text) == 2 * KEY_BYTES
        key = bytes.fromhex(text.decode()) if is_hex else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return key if len(key) == KEY_BYTES else None


def file_cipher(key: bytes, header: Header) -> Cipher:
    """The cipher of one file."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(SHA256(), KEY_BYTES, salt=header.salt, info=b"quire journal").derive(key)
    return _AesGcm(derived)


class _AesGcm:
    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)
        self._wrong = InvalidTag

    def encrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes:
        """The payload as written."""
        return self._aead.encrypt(nonce, data, associated)

    def decrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes | None:
        """The payload as it was; `None` if key or data are wrong."""
        try:
            return self._aead.decrypt(nonce, data, associated)
        except self._wrong:
            return None
