"""The shape of a model: sizes and constants, under one name whatever its family calls them.

Field names are Hugging Face's where families agree. What `config.json` says is checked here, before
anything is computed from it; transformers is not needed. Knows no tensors and no family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.bounds import show
from quire.checkpoint.config_files import CONFIG_FILE, read_config
from quire.config.vocabulary import ALIASES, canonical, merged
from quire.errors import ModelLoadError

LIMITS: Final = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31 - 1,
}
"""Largest sizes that are believed: far above any model, far below what would overflow."""
EXTENDING: Final = frozenset({"linear", "ntk", "dynamic", "yarn"})
"""Rotary scalings that come with the original `max_position_embeddings`, not the extended one."""


KV_DTYPES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2,
    "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Types that keys and values may be kept in, and their bytes."""
KV_TAILS: Final = {"int8": 4}
"""Bytes behind the numbers of a head, of the types that keep a scale there."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of each token: the layout of its KV cache."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """0: values are part of the keys."""
    window: int | None = None
    """Positions a token sees, itself included; `None`: all before it."""
    dtype: str | None = None
    """Of `KV_DTYPES`; `None`: the model's."""

    @property
    def widths(self) -> tuple[int, int]:
        """Elements that a head's key and value take, their scales included."""
        tail = KV_TAILS.get(self.dtype or "", 0)
        return self.key_dim + tail, self.value_dim + tail if self.value_dim else 0

    def bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of a token's keys, values and scales, the model's type having that many."""
        size = bytes_per_element if self.dtype is None else KV_DTYPES[self.dtype]
        return self.num_kv_heads * sum(self.widths) * size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of a decoder, as its checkpoint states them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dtype: str = "float32"
    """The checkpoint's own type."""
    eos_token_ids: tuple[int, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    """The whole JSON, for what a family alone knows: flat, with Hugging Face's common names filled
    in (`quire.config.vocabulary.ALIASES`)."""

    @classmethod
    def from_folder(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape:
        """Read `config.json` of a model folder, with `overrides` over it.

        Raises:
            ModelLoadError: the folder or file is missing, is not JSON, or a size is missing or
                senseless.
        """
        data = merged(read_config(folder), overrides or {})
        return cls.from_hf_json(data, source=str(folder / CONFIG_FILE))

    @classmethod
    def from_hf_json(cls, data: Mapping[str, Any], source: str = CONFIG_FILE) -> ModelShape:
        """Translate a Hugging Face configuration, however the family spells its entries.

        Raises:
            ModelLoadError: a needed entry is missing or has a senseless value; `source` is named.
        """
        data = canonical(data, source)
        read = _Reader(data, source)
        heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
        rope = read.rope()
        return cls(
            architecture=read.architecture(),
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.size("intermediate_size"),
            num_layers=read.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=read.size("num_key_value_heads", default=heads),
            head_dim=read.size("head_dim", default=max(1, hidden // heads)),
            max_position_embeddings=read.size("max_position_embeddings", default=2048),
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            rope_theta=read.positive("rope_theta", rope.get("rope_theta", 10000.0)),
            rope_scaling=read.rope_scaling(rope),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            hidden_act=str(data.get("hidden_act") or "silu"),
            dtype=str(data.get("dtype") or "float32").removeprefix("torch."),
            eos_token_ids=read.token_ids("eos_token_id"),
            raw=data,
        )

    @property
    def default_length(self) -> int:
        """Positions that are served if nobody says how many."""
        # "dynamic" changes what short texts get as soon as longer ones are allowed: only on demand.
        return self.max_position_embeddings if self._rope_kind == "dynamic" else self.length_limit

    @property
    def length_limit(self) -> int:
        """Positions that may be served: what the model was made for, or what its rotary scaling
        extends that to."""
        # Gemma 3's configurations state the extended length, those of other families the original.
        stated = str(self.raw.get("model_type")).startswith("gemma3")
        if stated or self._rope_kind not in EXTENDING:
            return self.max_position_embeddings
        scaling = self.rope_scaling or {}
        factor = scaling.get("factor")
        if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
            return self.max_position_embeddings
        original = scaling.get("original_max_position_embeddings")
        original = original if isinstance(original, int) else self.max_position_embeddings
        extended = int(min(original * factor, LIMITS["max_position_embeddings"]))
        return max(extended, self.max_position_embeddings)

    @property
    def _rope_kind(self) -> str:
        scaling = self.rope_scaling or {}
        return str(scaling.get("rope_type") or scaling.get("type") or "default")

    def uniform_kv_layers(self) -> tuple[LayerKV, ...]:
        """Every layer alike, seeing all positions."""
        return (LayerKV(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked access to the entries of a canonical configuration."""

    data: Mapping[str, Any]
    source: str

    def architecture(self) -> str:
        """The first name in `architectures`."""
        names = self.data.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        raise ModelLoadError(
            f"{self.source} names no architecture ('architectures'); give it as "
            """--hf-overrides '{"architectures": ["LlamaForCausalLM"]}'"""
        )

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer within `LIMITS`."""
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            others = ", ".join(ALIASES.get(name, ()))
            raise ModelLoadError(
                f"{self.source} misses {name!r}" + (f" (also read: {others})" if others else "")
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(
                f"{self.source}: {name!r} must be a positive integer, got {value!r:.60}"
            )
        if value > LIMITS[name]:
            raise ModelLoadError(
                f"{self.source}: {name!r} must be at most {LIMITS[name]}, got {value!r:.60}"
            )
        return value

    def positive(self, name: str, default: float) -> float:
        """A number above 0 that float32 holds, and with it what is computed from it."""
        value = self.data.get(name)
        value = default if value is None else value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ModelLoadError(
                f"{self.source}: {name!r} must be a number above 0, got {value!r:.60}"
            )
        if not 1e-30 <= value <= 1e30:
            raise ModelLoadError(
                f"{self.source}: {name!r} must be from 1e-30 to 1e30, got {show(value):.60}"
            )
        return float(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """No id, one, or a list of them."""
        value = self.data.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelLoadError(
                f"{self.source}: {name!r} must be a token id or a list of them, got {value!r:.60}"
            )
        return tuple(ids)

    def rope(self) -> dict[str, Any]:
        """`rope_parameters`; where kinds of layers have their own, those of full attention."""
        rope = self.data.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise ModelLoadError(
                f"{self.source}: 'rope_parameters' must be an object, got {rope!r:.60}"
            )
        full = rope.get("full_attention")
        return full if isinstance(full, dict) else rope

    def rope_scaling(self, rope: dict[str, Any]) -> dict[str, Any] | None:
        """The scaling, as old configurations (`rope_scaling`) or new ones spell it."""
        scaling = self.data.get("rope_scaling")
        if scaling is None or scaling == {}:
            return rope if rope.get("rope_type", "default") != "default" else None
        if not isinstance(scaling, dict):
            raise ModelLoadError(
                f"{self.source}: 'rope_scaling' must be an object, got {scaling!r:.60}"
            )
        return scaling
