"""Tensors of a quantised layer without a checkpoint: `--load-format dummy`.

They have the names, types and shapes of the layer's scheme; codes are random, and scales such that
weights have about the spread of random plain ones. So a model takes the memory and the time that
it would take with its files. Knows no format: what a scheme cannot decode stays plain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.coded import CodedWeight
from quire.quantization.scheme import LayerData, Scheme, Wanted, ceil_div
from quire.weights.bundles import StoredPart, StoredTensor

SPREAD: Final = 0.02
"""Standard deviation of weights."""
_TYPES: Final = {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "U32": torch.uint32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F32": torch.float32,
    "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip
_SEED: Final = 0x5EED
_SAMPLE: Final = 64
_SCALE: Final = 0x38
"""A byte that is a power of two, as a biased exponent and as e4m3."""


def invented(scheme: Scheme, name: str, rows: int, columns: int) -> CodedWeight:
    """A weight `[rows, columns]` of a scheme; the same each time.

    Raises:
        ModelLoadError: the scheme needs tensors that cannot be made up.
    """
    wanted = {n: w for n, w in scheme.tensors(rows, columns).items() if not w.optional}
    unknown = [n for n, w in wanted.items() if w.shapes is None or not w.types & _TYPES.keys()]
    if unknown:
        raise ModelLoadError(f"layer {name!r}: {unknown[0]} cannot be made up")
    generator = torch.Generator().manual_seed(_SEED + rows * columns)
    made = {n: _tensor(n, w, wanted, (rows, columns), generator) for n, w in wanted.items()}
    headers = {n: StoredTensor(f"{name}.{n}", tuple(t.shape), "") for n, t in made.items()}
    found = scheme.decode(LayerData(StoredPart(name, rows, headers), columns, made))
    sample = replace(
        found, codes=found.codes[:_SAMPLE], scales=found.scales[:_SAMPLE],
        zeros=None if found.zeros is None else found.zeros[:_SAMPLE], minima=None,
    ).dequantise()  # fmt: skip
    # Numbers that short types hold, as checkpoints' are.
    scale = 2.0 ** round(math.log2(SPREAD / (float(sample.std()) or 1.0)))
    middle = float(sample.mean().to(torch.bfloat16)) * scale
    minima = None if found.minima is None else torch.full_like(found.minima, middle)
    return replace(found, scales=found.scales * scale, minima=minima)


def _tensor(
    name: str,
    want: Wanted,
    others: Mapping[str, Wanted],
    sizes: tuple[int, int],
    generator: torch.Generator,
) -> Tensor:
    """Random codes, scales of 1, groups in order."""
    kind = _TYPES[min(want.types & _TYPES.keys())]
    shape = max(want.shapes or ((),), key=lambda one: (len(one), one))
    if name.endswith("g_idx"):
        groups = next((w.shapes[0][0] for n, w in others.items() if n == "scales" and w.shapes), 1)
        return (torch.arange(sizes[1]) // ceil_div(sizes[1], groups)).to(kind)
    if name.endswith("shape"):
        return torch.tensor(sizes, dtype=kind)
    if "scale" in name:
        if kind in (torch.uint8, torch.float8_e8m0fnu):
            return torch.full(shape, _SCALE, dtype=torch.uint8)
        # Of NVFP4, one multiplied with and one divided by: no short type holds what comes out.
        whole = {"weight_scale_2": 1 / 3, "weight_global_scale": 3.0}.get(name)
        return torch.ones(shape).to(kind) if whole is None else torch.full(shape, whole)
    if name == "biases" or ("zero_point" in name and kind is torch.int8):
        return torch.zeros(shape, dtype=kind)
    raw = torch.randint(0, 256, (*shape, kind.itemsize), dtype=torch.uint8, generator=generator)
    of_bytes = "scales" in others and "U8" in others["scales"].types
    if kind is torch.float8_e4m3fn or (kind is torch.uint32 and of_bytes):
        raw &= 0xBF  # floats, maybe e4m3: less than 2, and no NaN
    return raw.view(kind).squeeze(-1)
