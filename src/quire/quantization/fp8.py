"""Checkpoints with `quant_method` fp8 (DeepSeek, Qwen, AutoFP8) or fbgemm_fp8.

`weight` e4m3 with scales for the tensor, its rows or blocks: `weight_scale`, or `weight_scale_inv`,
which codes are multiplied with in spite of its name. After vLLM 0.32 (`quantization/fp8.py`) and
transformers 5.24 (`integrations/finegrained_fp8.py`). Static scales of activations are not used:
activations stay floats. Knows no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from quire.errors import ModelLoadError
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import entry_error, is_within, names
from quire.quantization.scheme import Scheme
from quire.quantization.schemes import Fp8
from quire.weights.bundles import StoredPart
from quire.weights.names import GATE_UP

_FUSED: Final = re.compile(rf"\.experts\.\d+\.{GATE_UP.target}$")
"""Gates and ups that writers have put in one tensor, before or after they were quantised."""


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(Fp8Checkpoint(config))


class Fp8Checkpoint:
    """A `CheckpointFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        if block is not None:
            sizes = block if isinstance(block, list) else []
            if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
                raise entry_error("weight_block_size", "two positive whole numbers", block)
            self._block: tuple[int, int] | None = (sizes[0], sizes[1])
        else:
            self._block = None
        form = config.get("fmt") or "e4m3"
        if form != "e4m3":
            raise entry_error("fmt", "e4m3 (nearest to it: convert the weights)", form)
        self._left = names(config, "ignored_layers", "modules_to_not_convert")

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        if is_within(part.name, self._left):
            return None
        scale, other = "weight_scale", "weight_scale_inv"
        if scale not in part.tensors and (self._block is not None or other in part.tensors):
            scale = other
        stacked = len(GATE_UP.parts) if _FUSED.search(part.name) else 1
        found = Fp8(scale, self._block, stacked=stacked)
        if scale in part.tensors and found.is_unclear(part.rows):
            raise ModelLoadError(
                f"layer {part.name!r} ({found.label}): tensor {part.tensors[scale].name!r}: blocks "
                f"may go on from gates to ups, {part.rows // stacked} rows each, or begin anew: "
                "save both apart"
            )
        return found
