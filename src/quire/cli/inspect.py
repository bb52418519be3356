"""`quire inspect MODEL`: what a model is and what it needs, from its configuration and headers
alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from quire.cli.parser import Parser
from quire.config import EngineConfig, ServerConfig
from quire.config.cli import add_engine_flags, engine_config
from quire.config.locate import located
from quire.config.shape import LayerKV, ModelShape
from quire.errors import QuireError
from quire.observability.explain.wording import plural
from quire.tokenizer.chat_template import ChatTemplate
from quire.utils.math import human_bytes

EPILOG = (
    "The flags are those of `quire serve`: what is told is what they would give. A model that is "
    "not on this machine is described from its small files, and its size is an estimate."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser("inspect", "Tell what a model is and needs, without loading it.", epilog=EPILOG)
    parser.add_argument("--json", action="store_true", default=False, help="As JSON.")
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns the exit code."""
    namespace = build_parser().parse(arguments)
    report = inspect(_found(engine_config(namespace)))
    print(json.dumps(report, indent=2) if namespace.json else as_text(report))
    return 0


def _found(config: EngineConfig) -> EngineConfig:
    """The model on this machine. If it is only on the hub, its small files are downloaded."""
    model = config.model
    if model.is_remote(model.model) and not model.folder.is_dir():
        config = dataclasses.replace(config, model=dataclasses.replace(model, load_format="dummy"))
    return located(config)


def inspect(config: EngineConfig) -> dict[str, Any]:
    """Everything that can be said about a model without its weights, as plain data.

    Raises:
        StartupError: the configuration or a header cannot be read, or a flag contradicts it.
    """
    shape = config.model.read_shape()
    resolved, _ = config.resolve(shape)
    architecture = _architecture(shape)
    weights = _weights(config, shape)
    dtype = _dtype(config, shape)
    itemsize = {"float32": 4}.get(dtype, 2)
    layers = _kv_layers(shape)
    per_token = sum(layer.bytes_per_token(itemsize) for layer in layers)
    length = resolved.model.max_model_len or shape.max_position_embeddings
    return {
        "model": config.model.model,
        "folder": str(config.model.folder),
        **architecture,
        "parameters": weights["parameters"],
        "weights": weights,
        "dtype": dtype,
        "weight_bytes": _weight_bytes(weights, itemsize),
        "sizes": _sizes(shape),
        "kv_cache": {
            "bytes_per_token": per_token,
            "bytes_per_request": per_token * length,
            "layers_with_window": sum(layer.window is not None for layer in layers),
        },
        "max_model_len": length,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_scaling": shape.rope_scaling,
        "tokenizer": _tokenizer(config, shape),
        "features": _features(shape),
    }


def _architecture(shape: ModelShape) -> dict[str, Any]:
    from quire.models.registry import MODELS

    supported = shape.architecture in MODELS
    reason = None
    if not supported:
        try:
            MODELS.get(shape.architecture)
        except QuireError as error:
            reason = error.message
    return {"architecture": shape.architecture, "supported": supported, "reason": reason}


def _dtype(config: EngineConfig, shape: ModelShape) -> str:
    from quire.models.registry import resolve_dtype

    return resolve_dtype(shape, config.model.dtype)


def _kv_layers(shape: ModelShape) -> tuple[LayerKV, ...]:
    from quire.models.registry import MODELS, kv_layers

    return kv_layers(shape) if shape.architecture in MODELS else shape.uniform_kv_layers()


def _weights(config: EngineConfig, shape: ModelShape) -> dict[str, Any]:
    from quire.weights.count import estimated_weights
    from quire.weights.formats import open_checkpoint

    model = config.model
    if model.load_format == "dummy":
        return {"parameters": estimated_weights(shape), "estimated": True}
    schemes = _schemes(config, shape)
    with open_checkpoint(model.folder, model.load_format) as checkpoint:
        tensors = list(checkpoint.tensors.values())
        types = Counter[str]()
        for tensor in tensors:
            types[tensor.dtype] += tensor.numel
        return {
            "parameters": schemes.pop("parameters", sum(types.values())),
            "estimated": False,
            **schemes,
            "tensors": len(tensors),
            "types": dict(types.most_common()),
            "files": sorted({tensor.path.name for tensor in tensors}),
            "file_bytes": checkpoint.total_bytes,
        }


def _schemes(config: EngineConfig, shape: ModelShape) -> dict[str, Any]:
    """How a quantised checkpoint keeps its layers, by scheme, or how `--quantization` will; nothing
    of others."""
    from quire.models.inspection import planned_schemes
    from quire.models.registry import MODELS, build_model, check_names, weight_format
    from quire.weights.loader import match_headers

    own = shape.raw.get("quantization_config")
    plan = config.model.online_plan(shape)
    if not (own or plan) or shape.architecture not in MODELS:
        return {}
    try:
        weights = weight_format(shape, plan)
        model = build_model(shape, _dtype(config, shape), "cpu", weights=weights)
        check_names(weights)
        targets = model.parameters()
        match_headers(config.model.folder, targets, model.name_rules(), config.model.load_format)
    except QuireError as error:
        return {"problem": error.message}
    return {
        "parameters": sum(math.prod(target.shape) for target in targets.values()),
        "schemes": {
            label: {**total._asdict(), "bits_per_weight": 8 * total.nbytes / total.weights}
            for label, total in planned_schemes(model).items()
        },
    }


_LEAST_PLAIN = 16
"""Bits of a weight that is no code."""


def _weight_bytes(weights: dict[str, Any], itemsize: int) -> int:
    """Of the weights in memory. Codes are kept as such, all others in the model's type."""
    coded = [s for s in weights.get("schemes", {}).values() if s["bits_per_weight"] < _LEAST_PLAIN]
    plain = weights["parameters"] - sum(scheme["weights"] for scheme in coded)
    return int(plain * itemsize + sum(scheme["nbytes"] for scheme in coded))


def _sizes(shape: ModelShape) -> dict[str, int]:
    names = (
        "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
        "vocab_size",
    )  # fmt: skip
    return {name: getattr(shape, name) for name in names}


def _tokenizer(config: EngineConfig, shape: ModelShape) -> dict[str, Any]:
    from quire.tokenizer.fit import check_fit
    from quire.tokenizer.sources import find_tokenizer
    from quire.tokenizer.tokenizer import Tokenizer

    folder = config.model.tokenizer_folder
    try:
        tokenizer = Tokenizer.from_folder(folder, config.model.chat_template)
        check_fit(tokenizer, shape)
        path = find_tokenizer(folder).path
    except QuireError as error:
        return {"problem": error.message}
    template = tokenizer.chat_template
    return {
        "file": path.name,
        "vocab_size": tokenizer.vocab_size,
        "chat_templates": sorted(template.templates) if template else [],
        "parsers": _parsers(template) if template else None,
    }


def _parsers(template: ChatTemplate) -> str:
    """The parsers that a server would choose."""
    from quire.serving.model_parsers import choose_parsers

    return choose_parsers(ServerConfig(), list(template.templates.values())).names


_FEATURES: dict[str, Callable[[ModelShape], bool]] = {
    "tied_embeddings": lambda shape: shape.tie_word_embeddings,
    "grouped_query_attention": lambda shape: shape.num_kv_heads < shape.num_heads,
    "sliding_window": lambda shape: any(layer.window for layer in _kv_layers(shape)),
    "mixture_of_experts": lambda shape: bool(shape.raw.get("num_local_experts")),
    "rope_scaling": lambda shape: shape.rope_scaling is not None,
    "quantised": lambda shape: bool(shape.raw.get("quantization_config")),
    "code_never_run": lambda shape: bool(shape.raw.get("auto_map")),
}
"""What applies to a model, by its configuration."""


def _features(shape: ModelShape) -> dict[str, bool]:
    return {name: has(shape) for name, has in _FEATURES.items()}


def as_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    return "\n".join(f"{name:<18}{text}" for name, text in _lines(report) if text)


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    weights, tokenizer, kv = report["weights"], report["tokenizer"], report["kv_cache"]
    sizes = report["sizes"]
    about = " (estimated)" if weights["estimated"] else ""
    types = ", ".join(f"{count:,} {kind}" for kind, count in weights.get("types", {}).items())
    features = [name.replace("_", " ") for name, has in report["features"].items() if has]
    schemes = [
        f"{s['layers']} layers {name}, {s['bits_per_weight']:.2f} bits per weight, "
        f"{s['activations']} activations"
        for name, s in weights.get("schemes", {}).items()
    ]
    templates = ", ".join(tokenizer.get("chat_templates", [])) or "no"
    return [
        ("model", report["model"]),
        ("folder", report["folder"]),
        ("architecture", report["architecture"] + ("" if report["supported"] else " (unknown)")),
        ("", report["reason"] or ""),
        ("parameters", f"{report['parameters']:,}{about}"),
        ("stored as", types and f"{types} in {plural(len(weights['files']), 'file')}, "
         f"{human_bytes(weights['file_bytes'])}"),
        ("quantised", weights.get("problem", "")),
        *(("quantised", text) for text in schemes),
        ("weights", f"{human_bytes(report['weight_bytes'])} in {report['dtype']}"),
        ("layers", f"{sizes['num_layers']} of width {sizes['hidden_size']} (MLP "
         f"{sizes['intermediate_size']}), {sizes['num_heads']} heads of {sizes['head_dim']}, "
         f"{sizes['num_kv_heads']} for keys and values"),
        ("vocabulary", f"{sizes['vocab_size']:,}"),
        ("KV cache", f"{human_bytes(kv['bytes_per_token'])} per token, "
         f"{human_bytes(kv['bytes_per_request'])} for {report['max_model_len']:,} tokens"),
        ("context", f"{report['max_model_len']:,} tokens of {report['max_position_embeddings']:,}"),
        ("tokenizer", tokenizer.get("problem") or
         f"{tokenizer['file']}, {tokenizer['vocab_size']:,} tokens, {templates} chat template"),
        ("parsers", tokenizer.get("parsers") or ""),
        ("features", ", ".join(features)),
    ]  # fmt: skip
