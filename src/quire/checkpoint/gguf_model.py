"""Translates GGUF's terms into Hugging Face's: the configuration, and the names and layout of
tensors.

`gguf_families.py` has a row per architecture of llama.cpp. `config_of` makes the `config.json` that
corresponds to the file; `hf_name` gives Hugging Face's name of a tensor, and `GGUFLayout` says what
llama.cpp's converter did to it. Reads no tensor data except the rotary factors, which exist only as
a tensor.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quire.checkpoint.gguf_families import (
    ARCHITECTURES,
    EXPERTS,
    MIXTURES,
    OPTIONS,
    GGUFLayout,
    Metadata,
    no_options,
)
from quire.checkpoint.gguf_header import GGUFHeader, is_gguf, read_header
from quire.errors import ModelLoadError
from quire.spelling import did_you_mean

_SINGLE: Final = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""`*`: one tensor has all of them, along its first dimension."""
_WHOLE: Final = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
"""Names whose end is another, too."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
"""As files of 2023 have them."""
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 `[head_dim / 2]` (Llama 3.1)."""
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hf_name(name: str, layout: GGUFLayout) -> str | None:
    """Hugging Face's name of a tensor; `None` for one that is not a weight of the model. Of a
    tensor with all experts of a layer it has a `*` for their number."""
    if name == ROPE_FACTORS:
        return None
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        block, part, number = expert.groups()
        return f"model.layers.{block}.mlp.experts.{number}.{part}_proj.weight"
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    block, part, kind = match.groups()
    if block is not None and f"{part}.{kind}" in _WHOLE:
        return f"model.layers.{block}.{_WHOLE[f'{part}.{kind}']}"
    ours = (_SINGLE if block is None else {**_BLOCK, **layout.names}).get(part)
    if ours is None:
        return name
    return f"{ours}.{kind}" if block is None else f"model.layers.{block}.{ours}.{kind}"


def gguf_file(model: Path) -> Path | None:
    """The GGUF file that a path means: the file itself, or the only one in a folder (the first part
    of a split one).

    Raises:
        ModelLoadError: the folder has several models in this format.
    """
    if is_gguf(model):
        return model
    if not model.is_dir():
        return None
    files = [f for f in sorted(model.glob("*.gguf")) if _part(f) in (None, 1)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ModelLoadError(
            f"{str(model)!r} has {len(files)} GGUF models ({names}): give the path of one"
        )
    return files[0] if files else None


def parts_of(path: Path) -> list[Path]:
    """All files of a model that may be split, in order.

    Raises:
        ModelLoadError: a part is missing, or `path` is not the first.
    """
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    if int(match[1]) != 1:
        raise ModelLoadError(f"{str(path)!r} is not the first part of its model: give that one")
    head = path.name[: match.start()]
    parts = [path.with_name(f"{head}-{i + 1:05d}-of-{match[2]}.gguf") for i in range(int(match[2]))]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{str(part)!r} is missing, a part of {path.name!r}")
    return parts


def _part(path: Path) -> int | None:
    match = _SPLIT.search(path.name)
    return int(match[1]) if match else None


def layout_of(metadata: Mapping[str, Any], source: str) -> GGUFLayout:
    """The row of a file's architecture.

    Raises:
        ModelLoadError: there is no such row; the message names all that exist.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        hint = did_you_mean(str(name), ARCHITECTURES)
        raise ModelLoadError(
            f"{source}: unknown GGUF architecture {name!r}{hint or '.'} Known: {known}; for others "
            "give the safetensors checkpoint"
        )
    if not metadata.get(f"{name}.expert_count"):
        return ARCHITECTURES[name]
    layout = MIXTURES.get(name, ARCHITECTURES[name])
    if layout.model_type not in EXPERTS:
        raise ModelLoadError(
            f"{source}: GGUF files of {name} with experts are not read; give the safetensors "
            "checkpoint"
        )
    return layout


def config_of(path: Path) -> dict[str, Any]:
    """The `config.json` that corresponds to a file.

    Raises:
        ModelLoadError: the file is broken, or its architecture is unknown.
    """
    header, with_factors = read_header(path), path
    for part in parts_of(path)[1:]:
        tensors = read_header(part).tensors
        header.tensors.update(tensors)
        # Often the first part has no tensors at all (`--no-tensor-in-first-split`).
        with_factors = part if ROPE_FACTORS in tensors else with_factors
    meta = header.metadata
    layout = layout_of(meta, str(path))
    get = Metadata(meta, str(meta["general.architecture"]))
    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "vocab_size": _rows(header, "token_embd.weight"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon")
        or get("attention.layer_norm_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _scaling(with_factors, header, get),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "qkv")),
        "dtype": "bfloat16",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(meta),
        "quantization_config": _quantization(header),
        **layout.config,
        **OPTIONS.get(layout.model_type, no_options)(header, get),
    }
    return {name: value for name, value in config.items() if value is not None}


def _quantization(header: GGUFHeader) -> dict[str, Any] | None:
    """What stands for quantised weights in a config.json; `None`: there are none."""
    quantised = any(tensor.dtype not in _FLOATS for tensor in header.tensors.values())
    return {"quant_method": "gguf"} if quantised else None


def _rows(header: GGUFHeader, name: str) -> int | None:
    entry = header.tensors.get(name)
    return entry.shape[0] if entry else None


def _eos(meta: Mapping[str, Any]) -> list[int] | None:
    """Ids of end-of-sequence and end-of-turn; both end an answer."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [meta[name] for name in names if isinstance(meta.get(name), int)]
    return list(dict.fromkeys(ids)) or None


def _scaling(path: Path, header: GGUFHeader, get: Metadata) -> dict[str, Any] | None:
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(path, header, get)
    kind, factor = get("rope.scaling.type"), get("rope.scaling.factor")
    if kind in (None, "none") or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    more = {
        "original_max_position_embeddings": get("rope.scaling.original_context_length") or None,
        "beta_fast": get("rope.scaling.yarn_beta_fast"),
        "beta_slow": get("rope.scaling.yarn_beta_slow"),
        "attention_factor": get("rope.scaling.yarn_attn_factor"),
        # The models of OpenAI are the only ones whose bounds are no whole numbers.
        "truncate": False if get.architecture == "gpt-oss" else None,
    }
    return scaling | {name: value for name, value in more.items() if value is not None}


def _llama3_scaling(path: Path, header: GGUFHeader, get: Metadata) -> dict[str, Any]:
    """The scaling parameters that the stored factors come from: Llama 3.1's, if they give exactly
    these factors.

    Raises:
        ModelLoadError: the factors follow another rule.
    """
    # The file has the factors but not the parameters they were computed from. The largest factor is
    # the scaling factor, because the lowest frequencies are divided by all of it; the others are
    # constants of Llama 3.1. Computing the factors again shows whether that was the rule.
    factors = _floats(path, header)
    original = get("rope.scaling.original_context_length") or 8192
    factor = round(max(factors), 4)
    theta = get("rope.freq_base") or 10000.0
    try:
        rule = [
            _llama3_factor(theta ** (-i / len(factors)), factor, original)
            for i in range(len(factors))
        ]
    except (ArithmeticError, TypeError) as error:
        raise ModelLoadError(f"{str(path)!r}: the rotary frequencies are wrong: {error}") from None
    for i, (stored, expected) in enumerate(zip(factors, rule, strict=True)):
        if not math.isclose(stored, expected, rel_tol=1e-3):
            raise ModelLoadError(
                f"{str(path)!r}: {ROPE_FACTORS} does not follow the rule of Llama 3.1 (factor {i} "
                f"is {stored:g}, not {expected:g}); give the safetensors checkpoint"
            )
    scaling = {"factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", **scaling, **_LLAMA3}


def _llama3_factor(frequency: float, factor: float, original: int) -> float:
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = original * frequency / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / (kept + (1 - kept) / factor)


def _floats(path: Path, header: GGUFHeader) -> tuple[float, ...]:
    entry = header.tensors[ROPE_FACTORS]
    if entry.dtype != "F32" or not 0 < entry.numel <= 2**14:
        raise ModelLoadError(f"{str(path)!r}: {ROPE_FACTORS} must hold some float32 values")
    with path.open("rb") as file:
        file.seek(entry.begin)
        return struct.unpack(f"<{entry.numel}f", file.read(entry.nbytes))
