"""The compiled decoder: all layers of a model in one call. Layout: `csrc/decoder.h`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from quire.kernels import native_attention
from quire.kernels.compiled import lib
from quire.kernels.decoder import (
    DecoderParts,
    DecoderRun,
    LayerParts,
    NextLogits,
    NextTokens,
    NormParts,
    Pick,
)
from quire.kernels.kv_types import head_dim
from quire.kernels.native_linear import ACTIVATIONS, CODES, make_norm
from quire.kernels.packed import PackedLinear
from quire.kernels.workspace import workspace

if TYPE_CHECKING:
    from quire.kernels.attention_metadata import AttentionMetadata
    from quire.kernels.request_rows import LastTokens, RequestRows

_CPU: Final = torch.device("cpu")
_LOGITS: Final = "logits"
"""Where `compute_logits` has them as well, so that they need not be twice in memory."""


def fuse_decoder(parts: DecoderParts) -> DecoderRun | None:
    """See `decoder.fuse_decoder`; `None` where a layer is not one that csrc/decoder.h has."""
    if not all(_fits(layer, parts.dtype) for layer in parts.layers):
        return None
    return NativeDecoder(parts)


class NativeDecoder:
    """A `DecoderRun`.

    Args:
        parts: Kept: the compiled module points to their memory.
    """

    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        layers = [
            _layer(layer, kv.key, kv.value)
            for layer, kv in zip(parts.layers, parts.kv_caches, strict=True)
        ]
        self._decoder = lib.Decoder(layers, _norm(parts.final_norm), parts.size, CODES[parts.dtype])
        self._embedding = _embedding(parts.embedding, parts.dtype)
        self._requests: tuple[RequestRows, Any] | None = None

    def __call__(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """See `DecoderRun`."""
        assert x.is_contiguous() and x.dtype == self.parts.dtype, "the embedding is made so"
        tables, wanted = metadata.by_layer or (metadata,), metadata.wanted
        last = tables[-1]
        out = x.new_empty(len(x) if wanted is None else len(wanted), x.shape[1])
        self._decoder.run(
            [native_attention.step_of(table) for table in tables],
            [table.slot_mapping.data_ptr() for table in tables],
            positions.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            0 if wanted is None else wanted.data_ptr(),
            -1 if wanted is None else len(wanted),
            native_attention.step_of(last, last_tokens=wanted is not None),
        )
        return out

    def tokens_after(
        self, last: LastTokens, head: Any, picks: list[Pick] | None
    ) -> NextTokens | None:
        """See `DecoderRun`."""
        if not self._takes(head):
            return None
        logits = 0
        if picks is not None:
            size = len(last.rows) * head.out_features
            logits = workspace.buffer(_LOGITS, size, torch.float32, _CPU).data_ptr()
        return NextTokens(*self._step(last, head, logits, picks or []))

    def logits_after(self, last: LastTokens, head: Any) -> NextLogits | None:
        """See `DecoderRun`."""
        if not self._takes(head):
            return None
        logits = workspace.take(_LOGITS, (len(last.rows), head.out_features), torch.float32, _CPU)
        _, seconds = self._step(last, head, logits.data_ptr(), [])
        return NextLogits(logits, seconds)

    def _takes(self, head: Any) -> bool:
        return self._embedding is not None and isinstance(head, PackedLinear)

    def _step(
        self, last: LastTokens, head: PackedLinear, logits: int, picks: list[Pick]
    ) -> tuple[list[int], float]:
        """Tokens and seconds of the head; with neither logits nor picks, the likeliest."""
        found: tuple[list[int], float] = self._decoder.tokens_after(
            self._known(last.requests),
            self._embedding,
            last.rows,
            last.positions,
            head.handle,
            logits,
            picks,
        )
        return found

    def _known(self, requests: RequestRows) -> Any:
        if self._requests is None or self._requests[0] is not requests:
            self._requests = requests, _requests(requests)
        return self._requests[1]


def _embedding(embedding: Any, dtype: torch.dtype) -> Any:
    if isinstance(embedding, PackedLinear):
        return lib.embed_by(embedding.handle)
    if not isinstance(embedding, Tensor) or embedding.dtype != dtype:
        return None
    return (
        lib.embed_from(embedding.data_ptr(), len(embedding)) if embedding.is_contiguous() else None
    )


def _requests(requests: RequestRows) -> Any:
    tokens, blocks = requests.tokens, requests.blocks
    return lib.make_request_rows(
        tokens.ctypes.data,
        *tokens.shape,
        blocks.ctypes.data,
        blocks.shape[1],
        requests.block_size,
        requests.window or 0,
    )


def _fits(layer: LayerParts, dtype: torch.dtype) -> bool:
    attention = layer.attention
    linears = (attention.qkv, attention.out, layer.gate_up, layer.down)
    norms = (layer.before_attention, layer.before_mlp, attention.q_norm, attention.k_norm)
    tensors = [t for norm in norms if norm is not None for t in (norm.weight, norm.bias)]
    return (
        all(isinstance(linear, PackedLinear) for linear in linears)
        and attention.spec.latent_dim is None
        # As `native_linear.layer_norm`: others are computed by the plain operation.
        and all(t is None or t.dim() == 1 for t in tensors)
        and all(
            norm is None
            or norm.kind != "layer"
            or all(t is None or t.dtype == dtype for t in (norm.weight, norm.bias))
            for norm in norms
        )
    )


def _norm(norm: NormParts | None) -> Any:
    if norm is None:
        return make_norm("none", None, None, 0.0)
    return make_norm(norm.kind, norm.weight, norm.bias, norm.eps)


def _layer(layer: LayerParts, keys: Tensor, values: Tensor) -> Any:
    attention = layer.attention
    heads, kv_heads, dim = attention.heads
    table = attention.rope_table
    return lib.make_decoder_layer(
        _norm(layer.before_attention),
        _norm(layer.before_mlp),
        _norm(attention.q_norm),
        _norm(attention.k_norm),
        attention.qkv.handle,
        attention.out.handle,
        layer.gate_up.handle,
        layer.down.handle,
        ACTIVATIONS[layer.activation],
        native_attention.layer_of(attention.spec, heads, kv_heads, dim, head_dim(values)),
        native_attention.cache_of(keys, attention.spec.kv_scales[0]),
        native_attention.cache_of(values, attention.spec.kv_scales[1]),
        0 if table is None else table.data_ptr(),
        0 if table is None else table.shape[-1],
        attention.interleaved,
    )


OPS: Final[dict[str, Callable[..., Any]]] = {"fuse_decoder": fuse_decoder}
"""Operations that replace those of the reference."""
