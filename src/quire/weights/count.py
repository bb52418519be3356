"""How many weights a checkpoint has, before any is read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quire import envs
from quire.config.shape import ModelShape
from quire.weights.formats import Stored, open_checkpoint

GGUF_BITS: Final = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "Q8_0": 8.5, "Q2_K": 8.0, "Q3_K": 6.0,
    "Q4_K": 6.0, "Q5_K": 10.0, "Q6_K": 10.0, "IQ4_NL": 4.5, "IQ4_XS": 5.0, "MXFP4": 4.25,
}  # fmt: skip
"""Bits in memory of a weight of GGUF's types: codes of 4 or 8, with scales and minima as floats."""
_USUAL_BITS: Final = 16
"""Of the types that models compute with."""
_BYTES: Final = frozenset(("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"))
"""Codes, or two in one, and scales: kept as they are."""
_WORDS: Final = frozenset(("I32", "U32"))
"""Codes of a few bits, side by side."""


def count_weights(model: Path, load_format: str, shape: ModelShape) -> int:
    """Number of weights: of the headers, or of `shape` if there are no files (`dummy`).

    Quantised ones count as the 16-bit numbers that would take as much memory.

    Raises:
        ModelLoadError: the checkpoint is missing or broken.
    """
    if load_format == "dummy":
        return estimated_weights(shape)
    with open_checkpoint(model, load_format) as checkpoint:
        tied = shape.tie_word_embeddings
        return sum(
            stored.numel if not tied and "embed_tokens" in name else _usual_numbers(stored)
            for name, stored in checkpoint.tensors.items()
        )


def _usual_numbers(stored: Stored) -> int:
    """16-bit numbers that would take as much memory as a loaded tensor."""
    if stored.dtype in GGUF_BITS and envs.CPU_INT4_W4A8:
        return int(stored.numel * GGUF_BITS[stored.dtype] / _USUAL_BITS)
    if stored.dtype in _BYTES:
        return stored.numel // 2
    return stored.numel * (2 if stored.dtype in _WORDS else 1)


def estimated_weights(shape: ModelShape) -> int:
    """Weights of a plain decoder with a gated MLP of these sizes."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (q + kv)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return ends + shape.num_layers * (attention + mlp)
