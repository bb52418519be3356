"""Chained hashes of full KV blocks: equal hash means equal KV content.

Each hash covers its parent's, so it stands for the whole prefix. What changes the KV besides the
tokens goes in as extra keys: the `cache_salt` in the first block, from where chaining spreads it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array

from quire.core.request import Request

NONE_HASH = hashlib.sha256(b"quire-none-hash").digest()
"""Parent of a first block."""


def hash_block(parent: bytes, token_ids: list[int], extra: bytes = b"") -> bytes:
    """SHA-256 over parent, tokens and extra keys.

    The parent has 32 bytes and the token count is written before the extra keys, so no two
    different inputs make the same byte string. Token ids are 32-bit, little-endian.
    """
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    body = tokens.tobytes()
    return hashlib.sha256(b"".join((parent, len(body).to_bytes(8, "little"), body, extra))).digest()


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Bring `request.block_hashes` up to the full blocks of its tokens.

    Generated tokens count too, so a follow-up that repeats an answer finds its blocks.
    """
    hashes, tokens = request.block_hashes, request.all_token_ids
    full = len(tokens) // block_size
    for index in range(len(hashes), full):
        parent = hashes[-1] if hashes else NONE_HASH
        extra = b""
        if index == 0 and request.cache_salt is not None:
            extra = b"salt:" + request.cache_salt.encode("utf-8", "surrogatepass")
        start = index * block_size
        hashes.append(hash_block(parent, tokens[start : start + block_size], extra))
