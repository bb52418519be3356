"""The encoder families: transformers whose attention sees the whole prompt in both directions.

One row per family, read by all sides. A row holds what is needed where there is no torch (that a
model is an encoder, and how many positions it has) and names the class that computes it, which is
imported when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.config.architecture import split_architecture
from quire.config.shape import ModelShape
from quire.errors import ModelLoadError
from quire.registry import Registry


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One row of `ENCODERS`."""

    target: str
    """`package.module:Class` of a `quire.models.encoder.Encoder`."""
    starts_after_padding: bool = False
    """The first token has position `pad_token_id + 1`: the rows of the position table before it
    are never used, and the longest prompt is shorter by as many."""


_ROBERTA: Final = EncoderFamily(
    "quire.models.families.bert:RobertaEncoder", starts_after_padding=True
)
ENCODERS: Final[Registry[EncoderFamily]] = Registry(
    "encoder family",
    {
        "Bert": EncoderFamily("quire.models.families.bert:BertEncoder"),
        "Camembert": _ROBERTA,
        "ModernBert": EncoderFamily("quire.models.families.modernbert:ModernBertEncoder"),
        "Roberta": _ROBERTA,
        "XLMRoberta": _ROBERTA,
    },
    error=ModelLoadError,
)
"""Architecture in `config.json`, without its head, to the family."""


def first_position(shape: ModelShape) -> int:
    """Row of the position table that the first token of a prompt uses; 0 for most models."""
    backbone, _ = split_architecture(shape.architecture)
    if backbone not in ENCODERS or not ENCODERS.get(backbone).starts_after_padding:
        return 0
    pad = shape.raw.get("pad_token_id", 1)
    return 0 if pad is None else int(pad) + 1
