"""How many weights a checkpoint has, before any is read."""

from __future__ import annotations

from pathlib import Path

from quire.config.shape import ModelShape
from quire.weights.formats import open_checkpoint


def count_weights(model: Path, load_format: str, shape: ModelShape) -> int:
    """Number of weights: of the headers, or of `shape` if there are no files (`dummy`).

    Raises:
        ModelLoadError: the checkpoint is missing or broken.
    """
    if load_format == "dummy":
        return estimated_weights(shape)
    with open_checkpoint(model, load_format) as checkpoint:
        return sum(stored.numel for stored in checkpoint.tensors.values())


def estimated_weights(shape: ModelShape) -> int:
    """Weights of a plain decoder with a gated MLP of these sizes."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (q + kv)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return ends + shape.num_layers * (attention + mlp)
