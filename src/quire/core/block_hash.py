"""Chained hashes of full KV blocks: equal hash means equal KV content.

Each hash covers its parent's, so it stands for the whole prefix. What changes the KV besides the
tokens goes in as extra keys: the `cache_salt` in the first block, from where chaining spreads it.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256

from quire.core.request import Request

NONE_HASH = sha256(b"quire-none-hash").digest()
"""Parent of a first block."""


def hash_block(parent: bytes, token_ids: list[int], extra: bytes = b"") -> bytes:
    """Hash of one block: SHA-256 over parent, tokens and extra keys.

    The parent has 32 bytes and the length of the tokens comes before them, so no two different
    inputs make the same byte string. Token ids are 32-bit, little-endian.
    """
    tokens = _to_bytes(token_ids)
    return sha256(parent + _header(tokens) + tokens + extra).digest()


def _to_bytes(token_ids: list[int]) -> bytes:
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _header(tokens: bytes) -> bytes:
    return len(tokens).to_bytes(8, "little")


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Bring `request.block_hashes` up to the full blocks of its tokens.

    Generated tokens count too, so a follow-up that repeats an answer finds its blocks.
    """
    hashes = request.block_hashes
    first, full = len(hashes), len(request.all_token_ids) // block_size
    if first >= full:
        return
    # One conversion for all blocks: most of the work is hashing then.
    tokens = _to_bytes(request.all_token_ids[first * block_size : full * block_size])
    width = len(tokens) // (full - first)
    header = _header(tokens[:width])
    parent = hashes[-1] if hashes else NONE_HASH
    extra = b"" if hashes else _first_block_keys(request)
    for start in range(0, len(tokens), width):
        parent = sha256(parent + header + tokens[start : start + width] + extra).digest()
        hashes.append(parent)
        extra = b""


def parent_key(request: Request, index: int) -> bytes:
    """What comes before block `index` of a request: equal keys mean an equal prefix."""
    return request.block_hashes[index - 1] if index else NONE_HASH + _first_block_keys(request)


def _first_block_keys(request: Request) -> bytes:
    """What separates equal tokens from the first block on."""
    if request.cache_salt is None:
        return b""
    return b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
