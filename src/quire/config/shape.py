"""The shape of a model: one vocabulary for every family, read from `config.json`.

Field names follow Hugging Face's where families agree. Reads the JSON itself; no transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of each token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Positions a token sees, itself included; `None`: all before it."""

    def bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of a token's keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * bytes_per_element


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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    """The whole JSON, for what a family alone knows."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Read `config.json` of a model folder.

        Raises:
            ModelLoadError: the folder or file is missing, is not JSON, or a size is missing or
                senseless.
        """
        path = folder / "config.json"
        if not folder.is_dir():
            raise ModelLoadError(
                f"there is no model folder {str(folder)!r}: give a folder with config.json, "
                "tokenizer.json and *.safetensors, or quire-demo"
            )
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"the model folder {str(folder)!r} has no config.json") from None
        except (ValueError, OSError) as error:
            raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None
        if not isinstance(data, dict):
            raise ModelLoadError(f"{str(path)!r} must hold a JSON object")
        return cls.from_hf_json(data, source=str(path))

    @classmethod
    def from_hf_json(cls, data: dict[str, Any], source: str = "config.json") -> ModelShape:
        """Translate a Hugging Face configuration.

        Raises:
            ModelLoadError: a needed entry is missing or has a senseless value; `source` is named.
        """
        architectures = data.get("architectures") or []
        if not architectures:
            raise ModelLoadError(f"{source} names no architecture ('architectures')")
        heads = _size(data, "num_attention_heads", source)
        hidden = _size(data, "hidden_size", source)
        rope = data.get("rope_parameters") or {}
        scaling = data.get("rope_scaling") or (
            rope if rope.get("rope_type", "default") != "default" else None
        )
        eos = data.get("eos_token_id")
        return cls(
            architecture=str(architectures[0]),
            vocab_size=_size(data, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_size(data, "intermediate_size", source),
            num_layers=_size(data, "num_hidden_layers", source),
            num_heads=heads,
            num_kv_heads=_size(data, "num_key_value_heads", source, default=heads),
            head_dim=_size(data, "head_dim", source, default=max(1, hidden // heads)),
            max_position_embeddings=_size(data, "max_position_embeddings", source, default=2048),
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            hidden_act=str(data.get("hidden_act", "silu")),
            dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=tuple([eos] if isinstance(eos, int) else eos or ()),
            raw=data,
        )

    def uniform_kv_layers(self) -> tuple[LayerKV, ...]:
        """Every layer alike, seeing all positions."""
        return (LayerKV(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers


def _size(data: dict[str, Any], name: str, source: str, default: int | None = None) -> int:
    value = data.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"{source} misses {name!r}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{source}: {name!r} must be a positive integer, got {value!r}")
    return value
