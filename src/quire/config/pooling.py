"""What a model is made for, and how it pools: one vector, or class probabilities, per prompt.

Reads `config.json` (architecture, labels), the sentence-transformers files beside it
(`modules.json`, `1_Pooling/config.json`, `sentence_bert_config.json`, dense layers) and the
options `--runner`, `--convert`, `--task`, `--pooler-config`. Knows file formats, no tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quire.config.shape import ModelShape
from quire.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from quire.config.model import ModelConfig

ENCODERS: Final = ("Bert", "Camembert", "ModernBert", "Roberta", "XLMRoberta")
"""Families whose attention sees the whole prompt: architecture names begin with these."""
OFFSET_POSITIONS: Final = ("Camembert", "Roberta", "XLMRoberta")
"""Those whose first position is `pad_token_id + 1`."""
HEADS: Final = ("ForSequenceClassification", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "Model")
"""What architecture names end in."""
GENERATES: Final = ("ChatGLMModel",)
"""Architectures that generate text, against what their names say."""
POOLINGS: Final = ("cls", "mean", "last", "max", "mean_sqrt_len")
_POOLING_NAMES: Final = {
    "cls": "cls",
    "first": "cls",
    "mean": "mean",
    "last": "last",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
}
_MODE_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
"""Entries of `1_Pooling/config.json` to ours."""
_UNKNOWN_MODES: Final = ("pooling_mode_weightedmean_tokens",)
ACTIVATIONS: Final = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
"""What turns logits into scores, by the class names that configurations give."""
DENSE_ACTIVATIONS: Final = {"Tanh": "tanh", "Identity": "none", "ReLU": "relu", "GELU": "gelu"}
_PROBLEMS: Final = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_POOLER_KEYS: Final = (
    "pooling_type", "seq_pooling_type", "use_activation", "normalize", "dimensions",
    "is_matryoshka", "matryoshka_dimensions",
)  # fmt: skip
MAX_LABELS: Final = 100_000


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer after pooling, in a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """`none`, `tanh`, `relu` or `gelu`."""


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """How a model turns hidden states into what a request gets."""

    task: str
    """`embed` or `classify`."""
    backbone: str
    """Architecture without its head, such as `Bert` or `Qwen3`."""
    whole_prompts: bool
    """An encoder: a prompt is computed in one step, without KV cache."""
    pooling: str
    """One of `POOLINGS`."""
    use_activation: bool = True
    """Embeddings: scaled to length 1. Classes: `activation` applied. A request may say."""
    activation: str = "softmax"
    """Classes: `softmax`, `sigmoid` or `none`."""
    size: int = 0
    """Numbers per embedding, or classes."""
    labels: tuple[str, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    max_positions: int = 2**31
    """Longest prompt that positions allow."""
    max_seq_length: int | None = None
    """Longest prompt that the model was made for, if its files say."""
    dimensions: int | None = None
    """Embeddings are cut to this length unless a request says otherwise."""
    matryoshka: bool = False
    """Whether embeddings may be cut."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The only lengths they may be cut to; empty: any."""

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it scores a pair of texts with one number."""
        return self.task == "classify" and self.size == 1

    @property
    def keeps_prefixes(self) -> bool:
        """Whether cached prefixes can be used: only the last token's state is needed."""
        return not self.whole_prompts and self.pooling == "last"


def read_pooler(model: ModelConfig, shape: ModelShape) -> PoolerSpec | None:
    """How the model pools; `None` for one that generates text.

    Raises:
        ConfigError: options contradict each other or the model.
        ModelLoadError: a file of the model folder is not as it must be.
    """
    runner, convert = _wishes(model)
    family, head = split_architecture(shape.architecture)
    modules = _read_modules(model.folder)
    if not _pools(runner, family, head, modules is not None):
        return None
    task = _task(convert, head, shape.architecture)
    encoder = family in ENCODERS
    spec = PoolerSpec(
        task=task,
        backbone=family,
        whole_prompts=encoder,
        pooling="cls" if encoder else "last",
        size=shape.hidden_size,
        max_positions=_max_positions(shape, family),
        max_seq_length=_max_seq_length(model.folder),
        matryoshka=bool(shape.raw.get("is_matryoshka") or shape.raw.get("matryoshka_dimensions")),
        matryoshka_dimensions=_dimension_list(shape.raw.get("matryoshka_dimensions")),
    )
    spec = _classifier(spec, shape) if task == "classify" else _embedder(spec, modules or [])
    return _overridden(spec, model.pooler_config)


def pooler_config(**options: Any) -> dict[str, Any]:
    """vLLM's `PoolerConfig(...)`, for scripts: the value of the option `pooler_config`."""
    return {name: value for name, value in options.items() if value is not None}


def split_architecture(architecture: str) -> tuple[str, str]:
    """`BertForSequenceClassification` as `("Bert", "ForSequenceClassification")`."""
    for head in () if architecture in GENERATES else HEADS:
        if architecture.endswith(head) and architecture != head:
            return architecture.removesuffix(head), head
    return architecture, ""


# ------------------------------------------------------------------------------- what is wanted


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


TASKS: Final = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "auto"),
}
"""Values of the older option `--task`, as runner and conversion."""


def _pools(runner: str, family: str, head: str, has_modules: bool) -> bool:
    made_for = family in ENCODERS or head in ("ForSequenceClassification", "Model")
    if runner == "generate" and made_for:
        raise ConfigError(
            f"--runner generate: {family}{head} has no head that generates text; use --runner "
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
    if convert == "none" and head in ("ForCausalLM", "LMHeadModel", "ForMaskedLM"):
        raise ConfigError(
            f"--convert none: {architecture} is no pooling model by itself; use --convert embed"
        )
    return "classify" if classifies and convert != "embed" else "embed"


def _max_positions(shape: ModelShape, family: str) -> int:
    if family not in OFFSET_POSITIONS:
        return shape.max_position_embeddings
    return shape.max_position_embeddings - first_position(shape)


def first_position(shape: ModelShape) -> int:
    """Row of the position table that the first token uses."""
    family, _ = split_architecture(shape.architecture)
    pad = shape.raw.get("pad_token_id", 1)
    return int(pad) + 1 if family in OFFSET_POSITIONS and pad is not None else 0


# ---------------------------------------------------------------------------------- classifiers


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
        return _named_activation(str(named), ACTIVATIONS, "config.json")
    problem = raw.get("problem_type")
    if problem in _PROBLEMS and not (count == 1 and problem == "single_label_classification"):
        return _PROBLEMS[problem]
    return "sigmoid" if count == 1 else "softmax"


def _named_activation(path: str, known: dict[str, str], source: str) -> str:
    name = path.rpartition(".")[2].rstrip("()")
    if name not in known:
        raise ModelLoadError(
            f"{source}: the activation must be one of {', '.join(known)}, got {path!r}"
        )
    return known[name]


# ------------------------------------------------------------------------ sentence-transformers


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file is a model without a folder
        return None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None


def _read_modules(folder: Path) -> list[tuple[str, Path]] | None:
    """Kind and folder of each module after the transformer; `None` without `modules.json`."""
    path = folder / "modules.json"
    listed = _read_json(path)
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ModelLoadError(f"{str(path)!r} must hold a list of objects")
    found = []
    for entry in listed:
        kind, place = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ModelLoadError(f"{str(path)!r} names {place!r}, which is outside the folder")
        found.append((kind, folder / place))
    return found


def _embedder(spec: PoolerSpec, modules: list[tuple[str, Path]]) -> PoolerSpec:
    """The chain Transformer, Pooling, Dense ..., Normalize."""
    if not modules:
        return spec
    spec = replace(spec, use_activation=False)
    for kind, folder in modules:
        if kind == "Pooling":
            spec = replace(spec, pooling=_pooling_mode(folder / "config.json", spec.pooling))
        elif kind == "Dense" and not spec.use_activation:
            dense = _dense(folder, spec.size)
            spec = replace(spec, dense=(*spec.dense, dense), size=dense.out_features)
        elif kind == "Normalize":
            spec = replace(spec, use_activation=True)
        elif kind not in ("Transformer", "Dropout"):
            raise ModelLoadError(
                f"modules.json: a module {kind!r} at this place is not supported; supported are "
                "Transformer, Pooling, Dense and Normalize, in this order"
            )
    return spec


def _pooling_mode(path: Path, default: str) -> str:
    data = _read_json(path)
    if data is None:
        return default
    if not isinstance(data, dict):
        raise ModelLoadError(f"{str(path)!r} must hold a JSON object")
    named = data.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes += [flag for flag in (*_MODE_FLAGS, *_UNKNOWN_MODES) if data.get(flag) is True]
    chosen = [_MODE_FLAGS.get(mode) or _POOLING_NAMES.get(mode) for mode in map(str, modes)]
    if len(chosen) != 1 or chosen[0] is None:
        raise ModelLoadError(
            f"{str(path)!r} must choose exactly one of the pooling modes {', '.join(POOLINGS)}, "
            f"got {', '.join(map(str, modes)) or 'none'}"
        )
    return chosen[0]


def _dense(folder: Path, in_features: int) -> DenseSpec:
    data = _read_json(folder / "config.json")
    data = data if isinstance(data, dict) else {}
    given, size = data.get("in_features"), data.get("out_features")
    if given != in_features or not isinstance(size, int) or size < 1:
        raise ModelLoadError(
            f"{str(folder / 'config.json')!r}: in_features must be {in_features} and out_features "
            f"a positive number, got {given!r} and {size!r}"
        )
    named = str(data.get("activation_function", "torch.nn.modules.linear.Identity"))
    activation = _named_activation(named, DENSE_ACTIVATIONS, str(folder / "config.json"))
    return DenseSpec(folder, in_features, size, bool(data.get("bias", True)), activation)


def _max_seq_length(folder: Path) -> int | None:
    data = _read_json(folder / "sentence_bert_config.json")
    length = data.get("max_seq_length") if isinstance(data, dict) else None
    return length if type(length) is int and length > 0 else None


# -------------------------------------------------------------------------------- --pooler-config


def _overridden(spec: PoolerSpec, options: dict[str, Any]) -> PoolerSpec:
    for name in options:
        if name not in _POOLER_KEYS:
            raise ConfigError(
                f"--pooler-config: unknown key {name!r}; known are {', '.join(_POOLER_KEYS)}"
            )
    pooling = options.get("seq_pooling_type", options.get("pooling_type"))
    if pooling is not None:
        chosen = _POOLING_NAMES.get(str(pooling).lower())
        if chosen is None:
            allowed = ", ".join(POOLINGS).upper()
            raise ConfigError(
                f"--pooler-config: pooling_type must be one of {allowed}, got {pooling!r}"
            )
        spec = replace(spec, pooling=chosen)
    wanted = options.get("use_activation", options.get("normalize"))
    if wanted is not None:
        if not isinstance(wanted, bool):
            raise ConfigError(
                f"--pooler-config: use_activation must be true or false, got {wanted!r}"
            )
        spec = replace(spec, use_activation=wanted)
    return _cut(spec, options)


def _cut(spec: PoolerSpec, options: dict[str, Any]) -> PoolerSpec:
    """Lengths that embeddings may be cut to, and the one they are cut to."""
    listed = _dimension_list(options.get("matryoshka_dimensions"))
    if listed or options.get("is_matryoshka"):
        spec = replace(
            spec, matryoshka=True, matryoshka_dimensions=listed or spec.matryoshka_dimensions
        )
    dimensions = options.get("dimensions")
    if dimensions is None:
        return spec
    if spec.task != "embed" or type(dimensions) is not int or not 1 <= dimensions <= spec.size:
        raise ConfigError(
            f"--pooler-config: dimensions must be from 1 to {spec.size}, the size of this model's "
            f"embeddings, got {dimensions!r}"
        )
    return replace(spec, dimensions=dimensions, matryoshka=True)


def _dimension_list(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(v) is int and v > 0 for v in value):
        raise ConfigError(
            f"matryoshka_dimensions must be a list of positive numbers, got {value!r}"
        )
    return tuple(value)
