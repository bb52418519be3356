"""What a model is run for, and how it pools: settled from its files and the options.

`config.json` and the files of sentence-transformers say what a model is made for; `--runner`,
`--convert`, `--task` and `--pooler-config` say what a user wants of it. Files are opened by
`quire.checkpoint.sentence_transformers`. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from quire.checkpoint.sentence_transformers import (
    ModuleList,
    list_modules,
    named_activation,
    read_max_seq_length,
    read_modules,
)
from quire.config.architecture import TEXT_HEADS, split_architecture
from quire.config.encoders import ENCODERS, first_position
from quire.config.model import TASKS, ModelConfig
from quire.config.pooler_options import dimension_list, with_options
from quire.config.pooler_spec import PoolerSpec
from quire.config.shape import ModelShape
from quire.errors import ConfigError, ModelLoadError

CLASS_ACTIVATIONS: Final = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
"""What turns logits into scores, by the class names that configurations give."""
_PROBLEMS: Final = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""`problem_type` to the activation."""
MAX_LABELS: Final = 100_000


def read_pooler(model: ModelConfig, shape: ModelShape) -> PoolerSpec | None:
    """How the model pools; `None` for one that generates text.

    Raises:
        ConfigError: options contradict each other or the model.
        ModelLoadError: a file of the model folder is not as it must be.
    """
    runner, convert = _wishes(model)
    backbone, head = split_architecture(shape.architecture)
    modules = list_modules(model.folder)
    if not _pools(runner, backbone, head, modules is not None):
        return None
    task = _task(convert, head, shape.architecture)
    encoder = backbone in ENCODERS
    spec = PoolerSpec(
        task=task,
        backbone=backbone,
        whole_prompts=encoder,
        pooling="cls" if encoder else "last",
        size=shape.hidden_size,
        max_positions=shape.max_position_embeddings - first_position(shape),
        max_seq_length=read_max_seq_length(model.folder),
        matryoshka=bool(shape.raw.get("is_matryoshka") or shape.raw.get("matryoshka_dimensions")),
        matryoshka_dimensions=dimension_list(shape.raw.get("matryoshka_dimensions")),
    )
    spec = _classifier(spec, shape) if task == "classify" else _embedder(spec, modules or [])
    return with_options(spec, model.pooler_config)


def _wishes(model: ModelConfig) -> tuple[str, str]:
    """`runner` and `convert`, with the older `task` in them."""
    runner, convert = model.runner, model.convert
    if model.task is None:
        return runner, convert
    wanted = TASKS[model.task]
    for name, given, meant in zip(("runner", "convert"), (runner, convert), wanted, strict=True):
        if given not in ("auto", meant) and meant != "auto":
            raise ConfigError(f"--task {model.task} means --{name} {meant}, but it is {given}")
    return (
        wanted[0] if runner == "auto" else runner,
        wanted[1] if convert == "auto" else convert,
    )


def _pools(runner: str, backbone: str, head: str, has_modules: bool) -> bool:
    made_for = backbone in ENCODERS or head in ("ForSequenceClassification", "Model")
    if runner == "generate" and made_for:
        raise ConfigError(
            f"--runner generate: {backbone}{head} has no head that generates text; use --runner "
            "pooling"
        )
    if runner == "auto":
        return made_for or has_modules
    return runner == "pooling"


def _task(convert: str, head: str, architecture: str) -> str:
    classifies = head == "ForSequenceClassification"
    if convert == "classify" and not classifies:
        raise ConfigError(
            f"--convert classify: {architecture} has no classification head; give a checkpoint "
            "of a ...ForSequenceClassification architecture"
        )
    if convert == "none" and head in (*TEXT_HEADS, "ForMaskedLM"):
        raise ConfigError(
            f"--convert none: {architecture} is no pooling model by itself; use --convert embed"
        )
    return "classify" if classifies and convert != "embed" else "embed"


def _embedder(spec: PoolerSpec, modules: ModuleList) -> PoolerSpec:
    """As the modules of sentence-transformers say, if there are any."""
    if not modules:
        return spec
    found = read_modules(modules, spec.size)
    return replace(
        spec,
        pooling=found.pooling or spec.pooling,
        dense=found.dense,
        size=found.dense[-1].out_features if found.dense else spec.size,
        use_activation=found.normalize,
    )


def _classifier(spec: PoolerSpec, shape: ModelShape) -> PoolerSpec:
    labels = _labels(shape.raw)
    pooling = "mean" if shape.raw.get("classifier_pooling") == "mean" else spec.pooling
    activation = _class_activation(shape.raw, len(labels))
    return replace(
        spec, size=len(labels), labels=labels, pooling=pooling, activation=activation,
        matryoshka=False, matryoshka_dimensions=(),
    )  # fmt: skip


def _labels(raw: dict[str, Any]) -> tuple[str, ...]:
    """From `id2label`, else as many as `num_labels` says (transformers' default is 2)."""
    named = raw.get("id2label")
    if isinstance(named, dict) and named:
        count = len(named)
        return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(count))
    count = raw.get("num_labels", raw.get("_num_labels", 2))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LABELS:
        raise ModelLoadError(
            f"config.json: 'num_labels' must be from 1 to {MAX_LABELS}, got {count!r}"
        )
    return tuple(f"LABEL_{i}" for i in range(count))


def _class_activation(raw: dict[str, Any], count: int) -> str:
    """What the files say, else a sigmoid for one class and a softmax over several."""
    beside = raw.get("sentence_transformers")
    named = beside.get("activation_fn") if isinstance(beside, dict) else None
    named = named or raw.get("sbert_ce_default_activation_function")
    if named:
        return named_activation(str(named), CLASS_ACTIVATIONS, "config.json")
    problem = raw.get("problem_type")
    if problem in _PROBLEMS and not (count == 1 and problem == "single_label_classification"):
        return _PROBLEMS[problem]
    return "sigmoid" if count == 1 else "softmax"
