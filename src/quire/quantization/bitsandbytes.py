"""Checkpoints of bitsandbytes: nf4 and fp4 in blocks, and int8 with a scale for each row.

After bitsandbytes 0.50 (`functional.py`, `nn/modules.py`,
https://github.com/bitsandbytes-foundation/bitsandbytes). 4 bits: `weight` holds the bytes of
the flat weight, the higher half of a byte first; weight = map[code] * absmax[i / blocksize], and
absmax may itself be quantised. 8 bits: weight = code * SCB / 127; columns with outliers are no
matter of their own, because which they are would depend on the batch. Knows no kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import KINDS, CodedWeight
from quire.quantization.bits import nibbles
from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.entries import contains_any, names, switch
from quire.quantization.scheme import FLOATS, LayerData, Scheme, Wanted
from quire.weights.bundles import StoredPart

_BYTES: Final = frozenset({"U8"})
_STORAGE: Final = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
"""Types that the bytes of 4-bit weights may be stored as (`bnb_4bit_quant_storage`), and bytes of
one number."""
_PER_STEP: Final = 7.874015718698502e-3
"""1 / 127, as bitsandbytes has it (`backends/default/ops.py`)."""
_STATE: Final = "weight.quant_state.bitsandbytes__"
_MAX_JSON: Final = 1 << 16


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`.

    Raises:
        ModelLoadError: an entry is wrong, or asks for what is not read.
    """
    return QuantisedFormat(BitsAndBytes(config))


@dataclass(frozen=True, slots=True)
class Bits4:
    """nf4 or fp4."""

    kind: str
    nested: bool
    activations: str = "float"

    @property
    def label(self) -> str:
        """See `Scheme`."""
        return f"{self.kind} (bitsandbytes)"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        size = rows * columns // 2
        floats = frozenset({"F32"})
        found = {
            "weight": Wanted(frozenset(_STORAGE), _shapes_of(size)),
            "weight.absmax": Wanted(_BYTES if self.nested else floats),
            "weight.quant_map": Wanted(floats, ((16,),)),
            f"{_STATE}{self.kind}": Wanted(_BYTES),
        }
        if self.nested:
            found["weight.nested_absmax"] = Wanted(floats)
            found["weight.nested_quant_map"] = Wanted(floats, ((256,),))
        return found

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        rows, columns = layer.rows, layer.columns
        state = self._state(layer)
        block = state["blocksize"]
        table = torch.tensor(KINDS[self.kind].values, dtype=torch.float32)
        if not torch.equal(layer["weight.quant_map"], table):
            raise layer.refuse("weight.quant_map", f"is not the table of {self.kind}")
        absmax = self._absmax(layer, state)
        wanted = -(-rows * columns // block)
        if absmax.numel() != wanted:
            why = f"must hold {wanted} scales of blocks of {block}, got {absmax.numel()}"
            raise layer.refuse("weight.absmax", why)
        stored = layer["weight"].reshape(-1).view(torch.uint8)
        if 2 * len(stored) != rows * columns:
            why = f"must have {rows * columns // 2} bytes, got {len(stored)}"
            raise layer.refuse("weight", why)
        codes = nibbles(stored, high_first=True)
        # Blocks run through the rows: each row is cut where the shorter of both ends.
        group = math.gcd(columns, block)
        first = torch.arange(0, rows * columns, group) // block
        scales = absmax[first].reshape(rows, columns // group)
        return CodedWeight(self.kind, codes.reshape(rows, columns), scales, None, group, "float")

    def _state(self, layer: LayerData) -> dict[str, Any]:
        name = f"{_STATE}{self.kind}"
        raw = layer[name]
        try:
            state = json.loads(bytes(raw[:_MAX_JSON].tolist()))
            shape, block = list(state["shape"]), state["blocksize"]
        except (ValueError, KeyError, TypeError) as error:
            raise layer.refuse(name, f"holds no state of bitsandbytes: {error!r:.80}") from None
        sizes = [block, state.get("nested_blocksize", 256) if self.nested else 1]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise layer.refuse(name, f"sizes of blocks must be positive, got {sizes}")
        if shape != [layer.rows, layer.columns]:
            raise layer.refuse(name, f"shape must be {[layer.rows, layer.columns]}, got {shape}")
        if self.nested and not math.isfinite(state.get("nested_offset", math.nan)):
            raise layer.refuse(name, "nested_offset must be a finite number")
        result: dict[str, Any] = state
        return result

    def _absmax(self, layer: LayerData, state: Mapping[str, Any]) -> Tensor:
        if not self.nested:
            return layer.floats("weight.absmax").reshape(-1)
        codes = layer["weight.absmax"].reshape(-1).to(torch.int64)
        outer, block = layer.floats("weight.nested_absmax").reshape(-1), state["nested_blocksize"]
        if outer.numel() != -(-codes.numel() // block):
            why = f"must hold a scale for each {block} of {codes.numel()}, got {outer.numel()}"
            raise layer.refuse("weight.nested_absmax", why)
        table = layer.floats("weight.nested_quant_map")
        spread = outer.repeat_interleave(block)[: codes.numel()]
        offset = torch.tensor(float(state["nested_offset"]), dtype=torch.float32)
        return table[codes] * spread + offset


def _shapes_of(size: int) -> tuple[tuple[int, ...], ...]:
    """Those of so many bytes, in each type."""
    counts = [size // item for item in dict.fromkeys(_STORAGE.values()) if size % item == 0]
    return tuple(shape for n in counts for shape in ((n, 1), (n,), (1, n)))


@dataclass(frozen=True, slots=True)
class Bits8:
    """LLM.int8 without outliers: each row of activations gets int8 codes of its own."""

    label: str = "int8 (bitsandbytes)"
    activations: str = "int8"

    def tensors(self, rows: int, columns: int) -> Mapping[str, Wanted]:
        """See `Scheme`."""
        return {
            "weight": Wanted(frozenset({"I8"}), ((rows, columns),)),
            "SCB": Wanted(FLOATS, ((rows,), (rows, 1))),
            "weight_format": Wanted(_BYTES, ((), (1,)), optional=True),
        }

    def decode(self, layer: LayerData) -> CodedWeight:
        """See `Scheme`."""
        if "weight_format" in layer and int(layer["weight_format"]) != 0:
            raise layer.refuse(
                "weight_format", "only the plain layout of rows (0) is read, got "
                f"{int(layer['weight_format'])}; nearest: save the model again"
            )  # fmt: skip
        scales = layer.floats("SCB").reshape(-1, 1) * _PER_STEP
        return CodedWeight("int8", layer["weight"], scales, None, layer.columns, "int8")


class BitsAndBytes:
    """A `CheckpointFormat`. Layers that were skipped show in their tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._eight = switch(config, "load_in_8bit", False)
        four = switch(config, "load_in_4bit", False)
        if self._eight == four:
            raise ModelLoadError(
                "the quantization_config of the checkpoint must have one of load_in_4bit and "
                "load_in_8bit"
            )
        self._kind = config.get("bnb_4bit_quant_type") or "fp4"
        if not self._eight and self._kind not in ("nf4", "fp4"):
            raise ModelLoadError(
                f"bitsandbytes' {self._kind!r:.40} is not read; nearest: nf4 or fp4"
            )
        self._left = names(config, "llm_int8_skip_modules")

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        weight = part.tensors.get("weight")
        plain = weight is not None and weight.dtype in FLOATS and len(part.tensors) == 1
        left = contains_any(part.name, self._left) or part.name.endswith("lm_head")
        if plain and left:
            return None
        if self._eight:
            return Bits8()
        return Bits4(str(self._kind), "weight.nested_absmax" in part.tensors)
