"""A copy of a model for engines that read quantised checkpoints and make none: rounded to the
nearest, in compressed-tensors' format. What rounding costs is known to `quire quantize` alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

from quire.compress.codes import Codes, int4_codes, int8_codes
from quire.compress.writer import write_checkpoint
from quire.weights.files import SafetensorsCheckpoint
from quire.weights.formats import Checkpoint

GROUP: Final = 128
"""Columns that a scale of int4 has: of the usual numbers the one with the fewest bytes."""
HEAD: Final = "lm_head"
EMBEDDING: Final = "model.embed_tokens"


def write_rounded(model: Path, out: Path, bits: int) -> None:
    """Write it into a folder that is made.

    Args:
        model: A folder with safetensors of a model whose linear layers are called `..._proj`.
        out: Must not exist.
        bits: 8 (activations too, one scale for each token) or 4 (weights alone). The head has 8;
            one that is the embedding is written apart from it.
    """
    config = json.loads((model / "config.json").read_text("utf-8"))
    tied = bool(config.get("tie_word_embeddings"))
    out.mkdir()
    with SafetensorsCheckpoint(model) as checkpoint:

        def codes_of(layer: str) -> Codes | None:
            if layer == HEAD:
                return _codes(checkpoint, EMBEDDING if tied else HEAD, 8)
            return _codes(checkpoint, layer, bits) if layer.endswith("_proj") else None

        write_checkpoint(
            checkpoint, model, out, codes_of, [], lambda done, total: None, HEAD if tied else None
        )


def _codes(checkpoint: Checkpoint, layer: str, bits: int) -> Codes:
    weight = checkpoint.read(f"{layer}.weight").to(torch.float32)
    if bits == 8:
        return int8_codes(weight, torch.bfloat16)
    return int4_codes(weight, GROUP, torch.bfloat16)
