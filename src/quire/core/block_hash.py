"""Hashes of full KV blocks: an equal hash means equal KV content.

A block's hash is the SHA-256 of everything up to its end: first what changes the KV besides the
tokens (adapter and `cache_salt`), then all tokens of the prefix. One running hash gives the hashes
of all blocks: each block is fed once, and the digest is read at its end. vLLM hashes each block
together with its parent's hash; this costs half of that and is as hard to collide.
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
    """Hash of a whole prefix in one go: what the block that ends there is known by. It defines what
    `extend_block_hashes` computes step by step.

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
    # `map` feeds a block each time the loop asks for its next item, so that the digest is read
    # between one block and the next. All but reading it runs in C.
    hashes += [digest() for _ in map(running.update, blocks)]


def parent_key(request: Request, index: int) -> bytes:
    """A key for what comes before block `index` of a request: equal keys mean an equal prefix."""
    if index:
        return request.block_hashes[index - 1]
    return _begin(_first_block_keys(request)).digest()


def _first_block_keys(request: Request) -> bytes:
    """What tells equal tokens apart from the first block on: the adapter, which changes the KV, and
    the salt, which keeps callers from finding each other's content. The adapter's length comes
    before its name, so that no two pairs make the same bytes."""
    keys = b""
    if request.adapter is not None:
        adapter = request.adapter.encode("utf-8", "surrogatepass")
        keys = b"adapter:%d:%b" % (len(adapter), adapter)
    if request.cache_salt is not None:
        keys += b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
    return keys
