"""Random blocks of GGUF's types whose weights are of a usual size."""

import numpy as np

from quire.checkpoint.gguf_header import TYPES

_SIZES = {name: (count, size) for name, count, size in TYPES.values()}
_HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": (),
}  # fmt: skip
"""Where scales of whole blocks are, in bytes."""


def random_blocks(kind, count, rng):
    """Bytes of `count` weights: any bits, but small positive scales."""
    per_block, size = _SIZES[kind]
    raw = rng.integers(0, 256, (count // per_block, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        scale = rng.uniform(0.001, 0.01, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = rng.integers(118, 124, len(raw))
    return raw.reshape(-1)
