"""Compiled linear layers, norms, activations and embedding; plain twins: `reference.py`.

Weights are packed once into the layout of `csrc/gemm.h`, on large pages. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from quire.kernels import coded_linear, reference
from quire.kernels.coded import CodedWeight, concat
from quire.kernels.coded_linear import PreparedCoded
from quire.kernels.compiled import lib
from quire.kernels.native_coded import (
    PackedCoded,
    can_pack,
    keep_coded,
    pack_coded,
    restore_coded,
)
from quire.kernels.native_narrow import can_pack_narrow, pack_narrow
from quire.kernels.packed import ELEMENT_CODES, PackedLinear, allocate, tiled_bias
from quire.kernels.workspace import workspace

CODES: Final = ELEMENT_CODES
ACTIVATIONS: Final = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
"""As csrc/gemm.h numbers them."""
NORMS: Final = {"none": (0, False), "rms": (1, False), "rms_wide": (1, True), "layer": (2, False)}
"""Kind as csrc/gemm.h numbers it, and whether it is not rounded before the weight."""
_MOST_NORMS: Final = 4096
_CPU: Final = torch.device("cpu")


def prepare_linear(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    leaves: int = 1,
) -> PackedLinear:
    """See `reference.prepare_linear`. Reads the weight's parts where they are."""
    parts = (weight,) if isinstance(weight, Tensor) else weight
    n, k = sum(len(part) for part in parts), parts[0].shape[1]
    assert leaves == 1 or k % (2 * leaves) == 0, "leaves are equally long, of whole pairs"
    kind = dtype or parts[0].dtype
    code = CODES[kind]
    memory = allocate(lib.packed_bytes(n, k, code))
    if n % 64:
        memory[-lib.packed_bytes(1, k, code) :].zero_()
    row = 0
    for part in parts:
        source = part.contiguous()
        place = (source.data_ptr(), CODES[source.dtype], memory.data_ptr(), code)
        lib.pack(*place, len(part), k, row, n, gated)
        row += len(part)
    if bias is not None:
        bias = tiled_bias(bias.to(kind), gated)
    shift = 0 if bias is None else bias.data_ptr()
    handle = lib.make_linear(memory.data_ptr(), shift, code, n, k, gated, leaves)
    return PackedLinear(handle, memory, bias, n, k, kind, gated, leaves)


def prepare_coded(
    parts: CodedWeight | Sequence[CodedWeight],
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    leaves: int = 1,
    dtype: torch.dtype | None = None,
) -> PackedLinear | PreparedCoded:
    """See `coded_linear.prepare_coded`."""
    coded = concat((parts,) if isinstance(parts, CodedWeight) else tuple(parts))
    shift = bias
    if bias is not None:
        shift = tiled_bias(bias if dtype is None else bias.to(dtype), gated)
    if coded.activations == "float":
        if can_pack_narrow(coded, leaves):
            return pack_narrow(coded, shift, gated, leaves, dtype or torch.float32)
        return prepare_linear(coded.dequantise(), bias, gated=gated, dtype=dtype, leaves=leaves)
    if can_pack(coded):
        return pack_coded(coded, shift, gated, leaves)
    made = coded_linear.prepare_coded(coded, bias, gated=gated, leaves=leaves, dtype=dtype)
    assert isinstance(made, PreparedCoded)
    return made


def keep_linear(layer: PackedLinear | PreparedCoded) -> dict[str, Any]:
    """See `dispatch.Ops.keep_linear`."""
    if isinstance(layer, PackedCoded):
        return keep_coded(layer)
    if not isinstance(layer, PackedLinear):
        return layer.kept()
    return {
        "memory": layer.memory,
        "bias": layer.bias,
        "size": [layer.out_features, layer.in_features],
        "code": CODES[layer.dtype],
        "gated": layer.gated,
        "leaves": layer.leaves,
    }


def restore_linear(kept: Mapping[str, Any]) -> PackedLinear | PreparedCoded:
    """See `dispatch.Ops.restore_linear`."""
    if "form" in kept:
        return restore_coded(kept)
    if "coded" in kept:
        return PreparedCoded.restored(kept)
    memory, bias, code = kept["memory"], kept["bias"], kept["code"]
    (n, k), gated, leaves = kept["size"], kept["gated"], kept["leaves"]
    assert len(memory) == lib.packed_bytes(n, k, code), "packed by another version"
    dtype = next(dtype for dtype, number in CODES.items() if number == code)
    shift = 0 if bias is None else bias.data_ptr()
    handle = lib.make_linear(memory.data_ptr(), shift, code, n, k, gated, leaves)
    return PackedLinear(handle, memory, bias, n, k, dtype, gated, leaves)


def linear(
    x: Tensor,
    layer: PackedLinear | PreparedCoded,
    out_dtype: torch.dtype | None = None,
    keep: str | None = None,
) -> Tensor:
    """See `reference.linear`."""
    if not isinstance(layer, PackedLinear):
        return reference.linear(x, layer, out_dtype, keep)
    kind = out_dtype or x.dtype
    out = _output(x.shape[0], layer.out_features, kind, keep)
    _multiply(x, layer, 0, out, 0, layer.gated)
    return out


def add_leaves(
    x: Tensor, layer: PackedLinear | PreparedCoded, total: Tensor, rows: Tensor, shares: Tensor
) -> None:
    """See `reference.add_leaves`."""
    if not isinstance(layer, PackedLinear):
        return reference.add_leaves(x, layer, total, rows, shares)
    assert not layer.gated and total.is_contiguous() and total.dtype == torch.float32
    assert total.shape[::2] == (layer.leaves, layer.out_features) and len(rows) == len(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, shares = rows.contiguous(), shares.contiguous()
    lib.add_leaves(
        layer.handle,
        x.data_ptr(),
        CODES[x.dtype],
        x.shape[0],
        x.stride(0),
        total.data_ptr(),
        total.shape[1],
        rows.data_ptr(),
        shares.data_ptr(),
    )


def likeliest(x: Tensor, layer: PackedLinear | PreparedCoded) -> Tensor:
    """See `reference.likeliest`. The columns are never all in memory."""
    if not isinstance(layer, PackedLinear):
        return reference.likeliest(x, layer)
    assert not layer.gated
    if x.stride(1) != 1:
        x = x.contiguous()
    ids = torch.empty(len(x), dtype=torch.int64)
    places = (x.data_ptr(), CODES[x.dtype], x.shape[0], x.stride(0), ids.data_ptr())
    lib.likeliest(layer.handle, *places)
    return ids


def linear_add(x: Tensor, layer: PackedLinear | PreparedCoded, residual: Tensor) -> Tensor:
    """See `reference.linear_add`."""
    if not isinstance(layer, PackedLinear):
        return reference.linear_add(x, layer, residual)
    assert not layer.gated and residual.is_contiguous(), "the sum is written in place"
    _multiply(x, layer, residual.data_ptr(), residual, 0, False)
    return residual


def gated_linear(
    x: Tensor,
    layer: PackedLinear | PreparedCoded | PreparedCoded,
    activation: str = "silu",
    keep: str | None = None,
) -> Tensor:
    """See `reference.gated_linear`."""
    if not isinstance(layer, PackedLinear):
        return reference.gated_linear(x, layer, activation, keep)
    out = _output(x.shape[0], layer.out_features // 2, x.dtype, keep)
    _multiply(x, layer, 0, out, ACTIVATIONS[activation], False)
    return out


def _multiply(
    x: Tensor, layer: PackedLinear, residual: int, out: Tensor, activation: int, split: bool
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    lib.linear(
        layer.handle,
        x.data_ptr(),
        CODES[x.dtype],
        x.shape[0],
        x.stride(0),
        residual,
        out.data_ptr(),
        CODES[out.dtype],
        activation,
        split,
    )


def _output(rows: int, columns: int, dtype: torch.dtype, keep: str | None) -> Tensor:
    if keep is None:
        return torch.empty(rows, columns, dtype=dtype)
    return workspace.take(keep, (rows, columns), dtype, _CPU)


def embedding_of(
    input_ids: Tensor, layer: PackedLinear | PreparedCoded, dtype: torch.dtype
) -> Tensor:
    """See `reference.embedding_of`."""
    if not isinstance(layer, PackedLinear):
        return reference.embedding_of(input_ids, layer, dtype)
    out = torch.empty(len(input_ids), layer.in_features, dtype=dtype)
    ids = input_ids.contiguous()
    lib.gather(layer.handle, ids.data_ptr(), len(ids), out.data_ptr(), CODES[dtype])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    return _normalize(x, None, make_norm("rms", weight, None, eps))[0]


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm_add`."""
    return _normalize(x, residual, make_norm("rms", weight, None, eps))


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm_wide`."""
    return _normalize(x, None, make_norm("rms_wide", weight, None, eps))[0]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `reference.layer_norm`."""
    of_heads = any(t is not None and (t.dim() > 1 or t.dtype != x.dtype) for t in (weight, bias))
    if of_heads:
        return reference.layer_norm(x, weight, bias, eps)
    return _normalize(x, None, make_norm("layer", weight, bias, eps))[0]


_norms: dict[tuple[Any, ...], Any] = {}


def make_norm(kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """The compiled module's view of a norm, kept: models have few, and each is used every step."""
    places = tuple(0 if t is None else t.data_ptr() for t in (weight, bias))
    dtype = next((t.dtype for t in (weight, bias) if t is not None), torch.float32)
    key = (kind, *places, dtype, eps)
    found = _norms.get(key)
    if found is None:
        if len(_norms) > _MOST_NORMS:
            _norms.clear()
        number, wide = NORMS[kind]
        found = _norms[key] = lib.make_norm(number, *places, CODES[dtype], eps, wide)
    return found


def _normalize(x: Tensor, residual: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Over the last dimension of `[..., H]`, whose rows may stand apart."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x
    places = (0, 0)
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype)
        residual = residual.contiguous()
        places = (residual.data_ptr(), total.data_ptr())
        rows = rows.contiguous()
    lib.norm(
        norm,
        rows.data_ptr(),
        *places,
        out.data_ptr(),
        CODES[x.dtype],
        rows.shape[0],
        size,
        rows.stride(0),
    )
    return out, total


OPS: Final[dict[str, Callable[..., Any]]] = {
    "add_leaves": add_leaves,
    "embedding_of": embedding_of,
    "gated_linear": gated_linear,
    "likeliest": likeliest,
    "linear": linear,
    "linear_add": linear_add,
    "prepare_coded": prepare_coded,
    "prepare_linear": prepare_linear,
    "keep_linear": keep_linear,
    "restore_linear": restore_linear,
    "rms_norm": rms_norm,
    "rms_norm_add": rms_norm_add,
    "rms_norm_wide": rms_norm_wide,
    "layer_norm": layer_norm,
}
"""Operations that replace those of the reference."""
