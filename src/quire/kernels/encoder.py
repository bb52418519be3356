"""Operations of encoders in plain torch: bidirectional attention, layer norm, GELU, tanh.

The definition that faster ones are tested against. A row's result depends on its own request
alone: attention is one fixed computation per request, because an encoder's prompt is never cut;
the rest works per row, from exactly rounded steps. Knows nothing of models.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.kernels.exact import exp_, tree_sum

_BLOCK: Final = 1 << 15
"""Elements per pass, so that temporaries stay in cache."""
_QUERY_ROWS: Final = 512
"""Query rows of a long prompt that are computed at once. A constant: it is part of the result."""

# erf on [-4, 4] as x P(x^2) / Q(x^2), float32 minimax coefficients (as used by Eigen); beyond,
# erf is 1 in float32. Highest power first.
_ERF_P: Final = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_Q: Final = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip


def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of `q, k, v [T, H, D]` within each request, in both directions: `[T, H, D]`.

    Args:
        query_start_loc: `[R + 1]` int32: request r owns tokens `loc[r] .. loc[r + 1]`, all of its
            prompt.
        window: A token sees those at most this far away; `None`: all of its request.
    """
    out = torch.empty_like(q)
    bounds = query_start_loc.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        own = slice(start, end)
        out[own] = _attend(q[own], k[own], v[own], scale, window)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One request: `[n, H, D]`. Fresh contiguous copies, so that no address matters."""
    queries = _heads_first(q).mul_(scale)
    keys, values = _heads_first(k), _heads_first(v)
    length, reach = q.shape[0], q.shape[0] if window is None else window
    parts = []
    for first in range(0, length, _QUERY_ROWS):
        end = min(first + _QUERY_ROWS, length)
        seen = slice(max(0, first - reach), min(length, end + reach))
        scores = torch.bmm(queries[:, first:end], keys[:, seen].transpose(1, 2))
        if window is not None:
            scores.masked_fill_(_far(first, end, seen, window, q.device), -torch.inf)
        weights = exp_(scores.sub_(scores.amax(-1, keepdim=True)))
        parts.append(torch.bmm(weights, values[:, seen]).div_(tree_sum(weights).unsqueeze(-1)))
    return torch.cat(parts, dim=1).transpose(0, 1).to(q.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """`[n, H, D]` to float32 `[H, n, D]`."""
    return x.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _far(first: int, end: int, seen: slice, window: int, device: torch.device) -> Tensor:
    """`[rows, keys]`: which of the keys `seen` lie outside the window of rows `first .. end`."""
    rows = torch.arange(first, end, device=device).unsqueeze(1)
    return (torch.arange(seen.start, seen.stop, device=device) - rows).abs_() > window


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension of `[..., H]`.

    In float32, rounded once to x's type.
    """
    wide = x.to(torch.float32)
    size = x.shape[-1]
    centred = wide - tree_sum(wide).div_(size).unsqueeze(-1)
    variance = tree_sum(centred * centred).div_(size)
    normed = centred.div_(variance.add_(eps).sqrt_().unsqueeze(-1)).mul_(weight)
    if bias is not None:
        normed.add_(bias)
    return normed.to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x (1 + erf(x / sqrt 2)) / 2, in float32, for any shape."""
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for part in out.view(-1).split(_BLOCK):
        part.mul_(_erf(part * 0.7071067811865476).add_(1.0).mul_(0.5))
    return out.to(x.dtype)


def _erf(x: Tensor) -> Tensor:
    """Within 1e-6 of the error function."""
    x = x.clamp(-4.0, 4.0)
    square = x * x
    return x.mul_(_horner(square, _ERF_P)).div_(_horner(square, _ERF_Q))


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    y = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y.mul_(x).add_(coefficient)
    return y


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent in float32, for any shape: (1 - e^-2|x|) / (1 + e^-2|x|) with x's sign."""
    wide = x.to(torch.float32)
    decay = exp_(wide.abs().mul_(-2.0).contiguous())
    return ((1.0 - decay) / decay.add(1.0)).copysign_(wide).to(x.dtype)


OPS: Final = {
    "encoder_attention": encoder_attention,
    "gelu": gelu,
    "layer_norm": layer_norm,
    "tanh": tanh,
}
