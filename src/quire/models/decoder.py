"""The decoder that families share: one layer, all layers with the embedding, and the head.

What a family does differently is declared in `DecoderStyle`. The classes here read that and the
sizes, and never ask for a family's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.config.shape import LayerKV, ModelShape
from quire.errors import ModelLoadError
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cache_tensors import KVCache
from quire.kernels.decoder import DecoderParts, DecoderRun, LayerParts, NextLogits, NextTokens, Pick
from quire.kernels.request_rows import LastTokens
from quire.kernels.rows import largest_columns
from quire.kernels.scopes import names_are_on
from quire.layers.context import DEFAULT, LayerContext
from quire.layers.embedding import Embedding, TiedEmbedding
from quire.layers.linear import Linear
from quire.layers.module import MLPBlock, Module, ModuleList, revision
from quire.layers.norm import NORMS, Norm
from quire.layers.parameter import Parameters
from quire.layers.rotary import cos_sin_table
from quire.models.decoder_style import PLACEMENTS, AttentionBlock, DecoderStyle, StepInput
from quire.models.sublayers import Attention, GatedMLP, PlainMLP
from quire.weights.names import GATE_UP, QKV, NameRules

__all__ = [
    "AttentionBlock",
    "DecoderForCausalLM",
    "DecoderLayer",
    "DecoderModel",
    "DecoderStyle",
    "MLPBlock",
    "StepInput",
]


KV_SCALES: Final = r".*\.((k|v|q|kv|prob)_(scale|zero_point)|(k|v)_cache\.scale)"
"""Names of scales for keys and values, as checkpoints for an 8-bit KV cache have them."""


class DecoderLayer(Module):
    """Attention and MLP around a residual stream, with norms placed as the style says."""

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        style: DecoderStyle,
        index: int,
        keeps: LayerKV,
    ) -> None:
        make = NORMS[style.norm]
        self._norm_names = PLACEMENTS[style.placement]
        self._norms: dict[str, Norm] = {
            place: make(context, shape.hidden_size, style.eps) for place in self._norm_names
        }
        at = context.at("self_attn")
        self._self_attn: AttentionBlock = (
            style.attention(at, index)
            if style.attention
            else Attention(at, shape, style, index, keeps)
        )
        usual = GatedMLP if style.gated else PlainMLP
        at = context.at("mlp")
        self._mlp: MLPBlock = style.mlp(at, index) if style.mlp else usual(at, shape, style)
        self._parallel = style.placement.startswith("parallel")
        self._plain = style.placement == "pre" and not style.residual_is_normed
        self._residual_is_normed = style.residual_is_normed
        self._scale = style.residual_scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, kv_cache: KVCache, step: StepInput
    ) -> tuple[Tensor, Tensor | None]:
        """`(x, residual)`, both `[T, H]`: their sum is the residual stream after this layer."""
        if self._plain:
            return self._pre_norm(x, residual, kv_cache, step)
        stream = x if residual is None else x + residual
        if self._parallel:
            return self._side_by_side(stream, kv_cache, step)
        return self._one_by_one(stream, kv_cache, step)

    def fused(self, step: StepInput) -> LayerParts | None:
        """The loaded layer as data, if it is of the most common kind."""
        attention, mlp = self._self_attn, self._mlp
        if not self._plain or self._scale != 1.0:
            return None
        if type(attention) is not Attention or type(mlp) is not GatedMLP:
            return None
        parts = attention.fused(step)
        if parts is None:
            return None
        before = self._norms["attention_in"].parts()
        between = self._norms["mlp_in"].parts()
        products = mlp.fused()
        if before is None or between is None or products is None:
            return None
        return LayerParts(before, between, parts, *products)

    def _pre_norm(
        self, x: Tensor, residual: Tensor | None, kv_cache: KVCache, step: StepInput
    ) -> tuple[Tensor, Tensor]:
        """The most common placement, with sums and norms in one operation."""
        before, between = self._norms["attention_in"], self._norms["mlp_in"]
        x, residual = (before(x), x) if residual is None else before.add(x, residual)
        x = self._scaled(self._self_attn(x, kv_cache, step))
        x, residual = between.add(x, residual)
        return self._scaled(self._mlp(x)), residual

    def _side_by_side(
        self, stream: Tensor, kv_cache: KVCache, step: StepInput
    ) -> tuple[Tensor, Tensor]:
        x = self._norms["attention_in"](stream)
        y = self._norms["mlp_in"](stream) if "mlp_in" in self._norms else x
        return self._scaled(self._self_attn(x, kv_cache, step) + self._mlp(y)), stream

    def _one_by_one(
        self, stream: Tensor, kv_cache: KVCache, step: StepInput
    ) -> tuple[Tensor, Tensor | None]:
        x = self._normed("attention_in", stream)
        stream = x if self._residual_is_normed else stream
        x = self._normed("attention_out", self._self_attn(x, kv_cache, step))
        stream = self._normed("attention_sum", stream + self._scaled(x))
        x = self._normed("mlp_in", stream)
        stream = x if self._residual_is_normed else stream
        x = self._scaled(self._normed("mlp_out", self._mlp(x)))
        if "mlp_sum" in self._norms:
            return self._norms["mlp_sum"](stream + x), None
        return x, stream

    def _normed(self, place: str, x: Tensor) -> Tensor:
        norm = self._norms.get(place)
        return x if norm is None else norm(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._scale == 1.0 else x * self._scale

    def children(self) -> Mapping[str, Module]:
        """`self_attn`, the norms under Hugging Face's names, `mlp`."""
        norms = {self._norm_names[place]: norm for place, norm in self._norms.items()}
        return {"self_attn": self._self_attn, **norms, "mlp": self._mlp}


class DecoderModel(Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        context: LayerContext,
        shape: ModelShape,
        style: DecoderStyle,
        kv_layers: Sequence[LayerKV],
        embedding: Embedding | TiedEmbedding,
    ) -> None:
        self._ops = context.ops
        make, size, eps = NORMS[style.norm], shape.hidden_size, style.eps
        width = style.embedding_size or size
        self._embed_tokens = embedding
        self._scale, self._offset = style.embedding_scale, style.position_offset
        rows = style.learned_positions
        self._embed_positions = Embedding(context, rows, size) if rows else None
        self._embed_norm = make(context, width, eps) if style.embedding_norm else None
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if width != size:
            self._project_in = Linear(context.at("project_in"), width, size, bias=False)
            self._project_out = Linear(context.at("project_out"), size, width, bias=False)
        self.layers = ModuleList(
            DecoderLayer(context.at(f"layers.{i}"), shape, style, i, kv)
            for i, kv in enumerate(kv_layers)
        )
        self._norm = make(context, size, eps) if style.final_norm else None
        self._fused_for: tuple[Sequence[KVCache] | None, int] = (None, 0)
        self._run: DecoderRun | None = None

    def __call__(self, input_ids: Tensor, kv_caches: Sequence[KVCache], step: StepInput) -> Tensor:
        """Ids `[T]` to hidden states `[W, H]`, or `[W, embedding_size]`."""
        x, residual = self._embedded(input_ids, step.positions), None
        run = self._fused(x, kv_caches, step)
        if run is not None:
            return run(x, step.positions, step.metadata)
        for index, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            x, residual = layer(x, residual, kv_cache, step.of_layer(index))
        x = step.metadata.select(x)
        residual = None if residual is None else step.metadata.select(residual)
        if self._norm is None:
            x = x if residual is None else x + residual
        else:
            x = self._norm(x) if residual is None else self._norm.add(x, residual)[0]
        return x if self._project_out is None else self._project_out(x)

    def tokens_after(
        self,
        last: LastTokens,
        kv_caches: Sequence[KVCache],
        head: Any,
        picks: list[Pick] | None,
    ) -> NextTokens | None:
        """See `DecoderRun.tokens_after`; `None` as well while layers are not one call, as in
        the first step of all."""
        run = self._run_over(kv_caches)
        return None if run is None else run.tokens_after(last, head, picks)

    def logits_after(
        self, last: LastTokens, kv_caches: Sequence[KVCache], head: Any
    ) -> NextLogits | None:
        """See `DecoderRun.logits_after`; `None` where `tokens_after` is."""
        run = self._run_over(kv_caches)
        return None if run is None else run.logits_after(last, head)

    def _run_over(self, kv_caches: Sequence[KVCache]) -> DecoderRun | None:
        """The layers as one call, if they are."""
        return None if names_are_on() or not self._is_fused_for(kv_caches) else self._run

    def _fused(self, x: Tensor, kv_caches: Sequence[KVCache], step: StepInput) -> DecoderRun | None:
        """All layers in one call, if layers and kernels can do that.

        Tried once per cache, and again after a part of some model was replaced.

        While a profiler records, layers run one by one, so that it sees operations by their names.
        """
        if names_are_on():
            return None
        if not self._is_fused_for(kv_caches):
            self._run = self._fuse(x, kv_caches, step)
            self._fused_for = (kv_caches, revision())
        return self._run

    def _is_fused_for(self, kv_caches: Sequence[KVCache]) -> bool:
        known, changes = self._fused_for
        return known is kv_caches and changes == revision()

    def _fuse(self, x: Tensor, kv_caches: Sequence[KVCache], step: StepInput) -> DecoderRun | None:
        last = None if self._norm is None else self._norm.parts()
        if last is None or self._project_out is not None or not step.attention.can_fuse:
            return None
        found = [layer.fused(step) for layer in self.layers if type(layer) is DecoderLayer]
        layers = [layer for layer in found if layer is not None]
        if len(layers) < len(self.layers):
            return None
        embedding = self._embed_tokens.fused() if self._is_plainly_embedded() else None
        parts = DecoderParts(layers, last, x.shape[1], x.dtype, kv_caches, embedding)
        return self._ops.fuse_decoder(parts)

    def _is_plainly_embedded(self) -> bool:
        """Whether nothing comes between the embedding and the first layer."""
        others = (self._embed_norm, self._project_in, self._embed_positions)
        return self._scale == 1.0 and all(other is None for other in others)

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self._embed_tokens(input_ids)
        if self._scale != 1.0:
            x = x * torch.tensor(self._scale, dtype=x.dtype, device=x.device)
        if self._embed_norm is not None:
            x = self._embed_norm(x)
        if self._project_in is not None:
            x = self._project_in(x)
        if self._embed_positions is not None:
            x = x + self._embed_positions(positions + self._offset)
        return x

    def children(self) -> Mapping[str, Module]:
        """What there is of embedding, projections, layers and norm, under Hugging Face's names."""
        found: dict[str, Module | None] = {
            "embed_tokens": self._embed_tokens,
            "embed_positions": self._embed_positions,
            "embed_norm": self._embed_norm,
            "project_in": self._project_in,
            "project_out": self._project_out,
            "layers": self.layers,
            "norm": self._norm,
        }
        return {name: child for name, child in found.items() if child is not None}


class DecoderForCausalLM(Module):
    """Decoder and language-model head: a `CausalLM` once its parameters are loaded.

    A family sets `style` and, where checkpoints use other names, `NAME_RULES` or `rules`; see
    docs/adding-a-model.md.
    """

    NAME_RULES: ClassVar[NameRules] = NameRules(
        merges=(QKV, GATE_UP), ignore=(r".*\.rotary_emb\.inv_freq",)
    )
    TIED: ClassVar[bool] = False
    """Whether the head is the embedding if the configuration does not say."""

    @classmethod
    def windows(cls, shape: ModelShape) -> tuple[int | None, ...]:
        """Positions a token sees in each layer, itself included; `None`: all before it."""
        return (None,) * shape.num_layers

    @classmethod
    def kv_layers(cls, shape: ModelShape) -> tuple[LayerKV, ...]:
        """What each layer keeps of a token, known before weights are read."""
        heads, dim = shape.num_kv_heads, shape.head_dim
        return tuple(LayerKV(heads, dim, dim, window) for window in cls.windows(shape))

    @classmethod
    def attention_features(cls, shape: ModelShape) -> frozenset[str]:
        """What the family asks of attention, of `quire.attention.base.FEATURES`."""
        layers, style = cls.kv_layers(shape), cls.style(shape)
        found = {
            "window": any(layer.window is not None for layer in layers),
            "value_dim": any(layer.value_dim not in (0, layer.key_dim) for layer in layers),
            "latent": any(layer.value_dim == 0 for layer in layers),
            "softcap": bool(style.attention_softcap),
            "alibi": bool(style.alibi),
            "sinks": style.sinks,
        }
        return frozenset(name for name, needed in found.items() if needed)

    @classmethod
    def style(cls, shape: ModelShape) -> DecoderStyle:
        """The family's differences.

        Raises:
            ModelLoadError: the configuration asks for something the family does not have here.
        """
        raise NotImplementedError

    @classmethod
    def rules(cls, shape: ModelShape) -> NameRules:
        """How checkpoints name and lay out the parameters, where it depends on the sizes."""
        return cls.NAME_RULES

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: str,
        attention: AttentionBackend,
        max_model_len: int | None = None,
        context: LayerContext = DEFAULT,
    ) -> None:
        """Weights are loaded afterwards, through `parameters()`.

        Args:
            shape: Its sizes.
            dtype: Type of weights, activations and KV cache.
            device: As torch names it.
            attention: Computes attention in every layer.
            max_model_len: The greatest length served; `None`: what the model was made for.
            context: What its layers are built with.

        Raises:
            ModelLoadError: the sizes contradict each other or ask for something unknown.
        """
        _check_sizes(shape)
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.ops = context.ops
        self.num_parameters = 0
        self.attention = attention
        self._style = style = self.style(shape).settled(shape)
        self._rope_tables = {
            name: cos_sin_table(replace(rope, length=max_model_len), device)
            for name, rope in (style.ropes or {}).items()
        }
        width = style.embedding_size or shape.hidden_size
        self._lm_head = Linear(context.at("lm_head"), width, shape.vocab_size, style.head_bias)
        at = context.at("model")
        embedding: TiedEmbedding | Embedding
        if self.is_tied:
            embedding = TiedEmbedding(self._lm_head, dtype)
        elif getattr(context.weights, "codes_embeddings", False):
            rows = Linear(at.at("embed_tokens"), width, shape.vocab_size, False)
            embedding = TiedEmbedding(rows, dtype)
        else:
            embedding = Embedding(context, shape.vocab_size, width)
        self._model = DecoderModel(at, shape, style, self.kv_layers(shape), embedding)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        step = StepInput(positions, metadata, self._rope_tables, self.attention)
        return self._model(input_ids, kv_caches, step)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, keep: str | None = None) -> Tensor:
        """See `CausalLM.compute_logits`."""
        logits = self._lm_head(hidden, torch.float32, keep)
        if self._style.logit_scale != 1.0:
            logits = logits * self._style.logit_scale
        cap = self._style.logit_softcap
        return self.ops.tanh(logits / cap) * cap if cap else logits

    @torch.inference_mode()
    def compute_likeliest(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_likeliest`."""
        if self._changes_logits:
            return largest_columns(self.compute_logits(hidden, keep="logits"))
        return self._lm_head.likeliest(hidden)

    def tokens_after(
        self, last: LastTokens, kv_caches: Sequence[KVCache], picks: list[Pick] | None
    ) -> NextTokens | None:
        """See `CausalLM.tokens_after`."""
        if self._changes_logits:
            return None
        return self._model.tokens_after(last, kv_caches, self._lm_head.prepared, picks)

    def logits_after(self, last: LastTokens, kv_caches: Sequence[KVCache]) -> NextLogits | None:
        """See `CausalLM.logits_after`."""
        if self._changes_logits:
            return None
        return self._model.logits_after(last, kv_caches, self._lm_head.prepared)

    @property
    def _changes_logits(self) -> bool:
        """Whether something is done to them after the head: rounding may then make equal what the
        head's own sums tell apart."""
        return self._style.logit_scale != 1.0 or bool(self._style.logit_softcap)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        unsaid = self.shape.raw.get("tie_word_embeddings") is None
        return self.shape.tie_word_embeddings or (self.TIED and unsaid)

    def children(self) -> Mapping[str, Module]:
        """`model` and `lm_head`."""
        return {"model": self._model, "lm_head": self._lm_head}

    def parameters(self) -> Parameters:
        """All parameters under Hugging Face's names; a tied head's weight is the embedding's."""
        found = super().parameters()
        if self.is_tied:
            del found["lm_head.weight"]
        return found

    def name_rules(self) -> NameRules:
        """`rules`, and that scales for a KV cache and a tied head's copy in the checkpoint are
        skipped."""
        rules = self.rules(self.shape)
        tied = (r"lm_head\..*",) if self.is_tied else ()
        return replace(rules, ignore=(*rules.ignore, KV_SCALES, *tied))


def _check_sizes(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got "
            f"{shape.num_heads} and {shape.num_kv_heads}"
        )
