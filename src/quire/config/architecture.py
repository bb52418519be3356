"""Names of architectures, as `config.json` gives them: a family and the head on top of it."""

from __future__ import annotations

from typing import Final

HEADS: Final = ("ForSequenceClassification", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model")
"""What architecture names end in."""
TEXT_HEADS: Final = ("ForCausalLM", "LMHeadModel")
"""Those of models that generate text."""
_WHOLE_NAMES: Final = ("ChatGLMModel",)
"""Architectures that generate text although their names end like those of bare transformers."""


def split_architecture(architecture: str) -> tuple[str, str]:
    """`BertForSequenceClassification` as `("Bert", "ForSequenceClassification")`.

    The head is empty if the name ends in none of `HEADS`.
    """
    for head in () if architecture in _WHOLE_NAMES else HEADS:
        if architecture.endswith(head) and architecture != head:
            return architecture.removesuffix(head), head
    return architecture, ""
