"""The parameters of `LLM.beam_search`, as a validated record. Names and defaults are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.bounds import read_field, show
from quire.errors import InvalidRequest


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """How beam search continues prompts.

    Raises:
        InvalidRequest: a field is out of range; the message names the limit and the value.
    """

    beam_width: int
    """Sequences that are continued at each step, and returned; 1 to 128."""
    max_tokens: int
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Whether the end of sequence is a token like others."""
    temperature: float = 0.0
    """Has no effect, as in vLLM: candidates are ranked by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """Sequences are ranked by log-probability / length ** this; -10 to 10."""
    include_stop_str_in_output: bool = False
    """Has no effect here: the tokens of a sequence always hold what ended it."""
    structured_outputs: Any = None
    """Only `None`: beams have no grammars."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    watermarking: Any = None
    """Only `None`: the output is not marked."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "temperature", "length_penalty"):
            setattr(self, name, read_field(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(
                    f"{name} must be true or false, got {show(value)}.", param=name
                )
        if self.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs is not supported with beam search: use SamplingParams.",
                param="structured_outputs",
            )
        if self.watermarking:
            raise InvalidRequest(
                "watermarking is not supported yet: the output is not marked.",
                param="watermarking",
            )
