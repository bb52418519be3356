"""Hashes of full KV blocks: equal hash means equal KV content.

A block's hash is the SHA-256 of everything up to its end: what changes the KV besides the tokens
(the `cache_salt`), then all tokens of the prefix. One running hash gives them all: each block is
fed once, and the digest is read at its end. That costs half of hashing block after block with
its parent's hash in front, and is as hard to collide.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

from quire.core.request import Request

if TYPE_CHECKING:
    from hashlib import _Hash

_SEED = b"quire-block-hash"
_TOKEN_BYTES = array("I").itemsize


def hash_prefix(token_ids: list[int], keys: bytes = b"") -> bytes:
    """Hash of a whole prefix, in one go: what a block that ends there is known by.

    The keys come with their length before the tokens, so no two different inputs make the same
    byte string. Token ids are 32-bit, little-endian.
    """
    running = _begin(keys)
    running.update(_to_bytes(token_ids))
    return running.digest()


def _begin(keys: bytes) -> _Hash:
    return sha256(_SEED + len(keys).to_bytes(8, "little") + keys)


def _to_bytes(token_ids: list[int]) -> bytes:
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Bring `request.block_hashes` up to the full blocks of its tokens.

    Generated tokens count too, so a follow-up that repeats an answer finds its blocks.
    """
    hashes = request.block_hashes
    first, full = len(hashes), len(request.all_token_ids) // block_size
    if first >= full:
        return
    running = request.prefix_hash
    if running is None:
        running = request.prefix_hash = _begin(_first_block_keys(request))
    tokens = request.all_token_ids
    packed = _to_bytes(tokens[first * block_size :] if first else tokens)
    width = block_size * _TOKEN_BYTES
    blocks = [packed[start : start + width] for start in range(0, (full - first) * width, width)]
    digest = running.digest
    # In C, but for the digests: each block is fed when the next step of the loop asks for it.
    hashes += [digest() for _ in map(running.update, blocks)]


def parent_key(request: Request, index: int) -> bytes:
    """What comes before block `index` of a request: equal keys mean an equal prefix."""
    if index:
        return request.block_hashes[index - 1]
    return _begin(_first_block_keys(request)).digest()


def _first_block_keys(request: Request) -> bytes:
    """What separates equal tokens from the first block on: the adapter, which changes the KV, and
    the salt, which keeps callers apart. The adapter's length stands before it, so that no two
    pairs make the same bytes."""
    keys = b""
    if request.adapter is not None:
        adapter = request.adapter.encode("utf-8", "surrogatepass")
        keys = b"adapter:%d:%b" % (len(adapter), adapter)
    if request.cache_salt is not None:
        keys += b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
    return keys
