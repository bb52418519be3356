"""From a pooling specification to a loaded model: encoder or decoder, with pooler and head.

The counterpart of `models/registry.py` for models that give vectors and classes instead of text.
Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor

from quire.config.encoders import ENCODERS
from quire.config.online_schemes import OnlinePlan
from quire.config.pooler_spec import PoolerSpec
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cache_tensors import KVCache
from quire.kernels.dispatch import Ops, default_ops
from quire.kernels.dtypes import torch_dtype
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.module import Module
from quire.layers.parameter import Parameters
from quire.models.decoder import DecoderForCausalLM
from quire.models.encoder import ClassificationHead, Encoder, EncoderInput
from quire.models.pooler import Pooler
from quire.models.registry import (
    MODELS,
    build_model,
    check_names,
    kv_layers,
    resolve_device,
    resolve_dtype,
    weight_format,
)
from quire.registry import load
from quire.weights.loader import load_weights
from quire.weights.names import NameRules

_TEXT_HEADS: Final = ("lm_head.", "embed_out.", "output_layer.")
"""Parameters that a decoder needs for text only."""

Progress = Callable[[int, int], None]


class PoolingModel(Module):
    """What encoders and decoders that pool have in common: a pooler, and where it runs.

    An encoder computes hidden states by `encode`, a decoder by `forward`.
    """

    num_parameters = 0

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        pooler: Pooler,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.ops = context.ops
        self.shape = shape
        self.pooler = pooler
        self.dtype = dtype
        self.device = device

    @property
    def spec(self) -> PoolerSpec:
        """How it pools."""
        return self.pooler.spec


class EncoderForPooling(PoolingModel):
    """An encoder: whole prompts, no KV cache."""

    def __init__(
        self,
        context: LayerContext,
        spec: PoolerSpec,
        shape: ModelShape,
        dtype: str,
        device: str,
        max_model_len: int | None = None,
    ) -> None:
        """Weights are loaded afterwards, through `parameters()`."""
        _check_heads(shape)
        family = encoder_class(spec.backbone)
        head = family.head(context, shape, spec.size) if spec.task == "classify" else None
        pooler = Pooler(context, spec, head)
        super().__init__(context, shape, pooler, torch_dtype(dtype), torch.device(device))
        self._encoder = family(context, shape, device)

    @torch.inference_mode()
    def encode(self, step: EncoderInput) -> Tensor:
        """Hidden states `[T, H]` of whole prompts."""
        return self._encoder(step)

    def children(self) -> Mapping[str, Module]:
        """`encoder` and perhaps `head`."""
        head = self.pooler.head
        return {"encoder": self._encoder} | ({} if head is None else {"head": head})

    def parameters(self) -> Parameters:
        """Of the encoder and its head, under the checkpoint's names."""
        head = self.pooler.head
        return self._encoder.parameters() | ({} if head is None else head.parameters())

    def name_rules(self) -> NameRules:
        """The family's, with the prefix that checkpoints with a head have."""
        rules = self._encoder.name_rules()
        return replace(rules, renames=tuple((prefix, "") for prefix in self._encoder.PREFIXES))


class DecoderForPooling(PoolingModel):
    """A text model without its head, as a `PagedDecoder`: KV cache, chunks, prefixes; no logits."""

    def __init__(
        self,
        context: LayerContext,
        spec: PoolerSpec,
        shape: ModelShape,
        dtype: str,
        device: str,
        max_model_len: int | None = None,
        attention_backend: str | None = None,
        kv_dtypes: frozenset[str] = frozenset(),
    ) -> None:
        """Weights are loaded afterwards, through `parameters()`."""
        head = ScoreLayer(context, shape, spec.size) if spec.task == "classify" else None
        pooler = Pooler(context, spec, head)
        super().__init__(context, shape, pooler, torch_dtype(dtype), torch.device(device))
        self._decoder: DecoderForCausalLM = build_model(
            decoder_shape(spec, shape),
            dtype,
            device,
            max_model_len,
            attention_backend,
            context.ops,
            context.weights,
            kv_dtypes,
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `PagedDecoder.forward`."""
        return self._decoder.forward(input_ids, positions, kv_caches, metadata)

    def children(self) -> Mapping[str, Module]:
        """`decoder` and perhaps `head`."""
        head = self.pooler.head
        return {"decoder": self._decoder} | ({} if head is None else {"head": head})

    def parameters(self) -> Parameters:
        """The decoder's without its language-model head, and the classifier's, under the
        checkpoint's names."""
        head = self.pooler.head
        own = self._decoder.parameters().items()
        kept = {name: p for name, p in own if not name.startswith(_TEXT_HEADS)}
        return kept | ({} if head is None else head.parameters())

    def name_rules(self) -> NameRules:
        """The family's; checkpoints without a head leave the prefix `model.` out."""
        rules = self._decoder.name_rules()
        ignore = (*rules.ignore, *(prefix.replace(".", r"\..*") for prefix in _TEXT_HEADS))
        renames = rules.renames
        own = self._decoder.parameters()
        if all(name.startswith(("model.", *_TEXT_HEADS)) for name in own):
            same = ("model.", "score.", *_TEXT_HEADS)
            renames = (*renames, *((prefix, prefix) for prefix in same), ("", "model."))
        return replace(rules, ignore=ignore, renames=renames)


class ScoreLayer(ClassificationHead):
    """The classification head of decoders: one linear layer without bias."""

    def __init__(self, context: LayerContext, shape: ModelShape, num_labels: int) -> None:
        self._score = Linear(context.at("score"), shape.hidden_size, num_labels, False)

    def __call__(self, pooled: Tensor) -> Tensor:
        """`[R, H]` to logits `[R, labels]`."""
        return self._score(pooled)

    def children(self) -> Mapping[str, Module]:
        """`score`."""
        return {"score": self._score}


def encoder_class(backbone: str) -> type[Encoder]:
    """The class of an encoder family, imported now.

    Raises:
        ModelLoadError: there is no such family.
    """
    return cast("type[Encoder]", load(ENCODERS.get(backbone).target))


def decoder_shape(spec: PoolerSpec, shape: ModelShape) -> ModelShape:
    """The shape of the text model that a pooling model is made of; its head is never built.

    Raises:
        ModelLoadError: no family of that name.
    """
    names = (f"{spec.backbone}ForCausalLM", f"{spec.backbone}LMHeadModel")
    name = next((name for name in names if name in MODELS), shape.architecture)
    untied = {"tie_word_embeddings": False}
    return replace(shape, architecture=name, raw={**shape.raw, **untied}, **untied)


def pooling_kv_layers(spec: PoolerSpec, shape: ModelShape) -> tuple[LayerKV, ...]:
    """What each layer keeps of a token: nothing, for an encoder.

    Raises:
        ModelLoadError: no family of that name.
    """
    return () if spec.whole_prompts else kv_layers(decoder_shape(spec, shape))


@torch.inference_mode()
def load_pooling_model(
    spec: PoolerSpec,
    shape: ModelShape,
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    max_model_len: int | None = None,
    load_format: str = "auto",
    attention_backend: str | None = None,
    ops: Ops | None = None,
    quantization: str | OnlinePlan | None = None,
    kv_dtypes: frozenset[str] = frozenset(),
) -> EncoderForPooling | DecoderForPooling:
    """Build the model of a folder and load its weights, those of dense layers included.

    Raises:
        ModelLoadError: the architecture, a size, a file or a tensor is not as it must be.
        ConfigError: no attention backend serves the model on this device, or one is wanted for an
            encoder.
    """
    kind = resolve_dtype(shape, dtype)
    weights = weight_format(shape, quantization, encoder=spec.whole_prompts)
    context = LayerContext(ops or default_ops(), torch_dtype(kind), weights)
    common = (
        context,
        spec,
        shape,
        kind,
        resolve_device(device),
        max_model_len,
    )
    model: EncoderForPooling | DecoderForPooling
    if not spec.whole_prompts:
        model = DecoderForPooling(*common, attention_backend, kv_dtypes)
    elif attention_backend in (None, "auto"):
        model = EncoderForPooling(*common)
    else:
        raise ConfigError(
            f"the attention backend {attention_backend!r} is for decoders; {shape.architecture} "
            "is an encoder, which has no KV cache: leave --attention-backend and "
            "QUIRE_ATTENTION_BACKEND out"
        )
    check_names(weights)
    place = str(model.device)
    model.num_parameters = load_weights(
        folder, model.parameters(), model.name_rules(), model.dtype, place, progress, load_format
    )
    for dense, layer in zip(spec.dense, model.pooler.dense, strict=True):
        model.num_parameters += load_weights(
            dense.folder, layer.parameters(), NameRules(), model.dtype, place
        )
    return model


def _check_heads(shape: ModelShape) -> None:
    if shape.hidden_size % shape.num_heads:
        raise ModelLoadError(
            f"hidden_size must be a multiple of num_attention_heads, got {shape.hidden_size} and "
            f"{shape.num_heads}"
        )
