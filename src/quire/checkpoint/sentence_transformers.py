"""The files that sentence-transformers puts beside a model: what comes after the transformer.

`modules.json` lists modules in order; each may have a folder with a `config.json` of its own
(`1_Pooling`, `2_Dense`); `sentence_bert_config.json` holds the greatest length. This module reads
them, says what they mean in quire's words, and refuses what is not computed. Which of it holds for
a model is for `quire.config.pooling` to settle. Opens no weights.

The formats are those of the library sentence-transformers 5
(https://www.sbert.net/docs/package_reference/sentence_transformer/models.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.checkpoint.config_files import as_object, read_json
from quire.errors import ModelLoadError

POOLINGS: Final = {
    "cls": "cls",
    "first": "cls",
    "mean": "mean",
    "last": "last",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
}
"""Spellings of the ways to pool, in lower case, to ours."""
_POOLING_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
"""Flags of `1_Pooling/config.json`, of which one is true, to ours."""
_UNKNOWN_FLAGS: Final = ("pooling_mode_weightedmean_tokens",)
_DENSE_ACTIVATIONS: Final = {"Tanh": "tanh", "Identity": "none", "ReLU": "relu", "GELU": "gelu"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling, in a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """`none`, `tanh`, `relu` or `gelu`."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What an embedder does with hidden states, by its `modules.json`."""

    pooling: str | None
    """A value of `POOLINGS`; `None`: the files do not say."""
    dense: tuple[DenseModule, ...]
    normalize: bool
    """Embeddings are scaled to length 1."""


ModuleList = list[tuple[str, Path]]
"""Kind and folder of each module, in order."""


def list_modules(folder: Path) -> ModuleList | None:
    """The modules of a model folder; `None` without `modules.json`.

    Raises:
        ModelLoadError: the file is not a list of objects, or names a place outside the folder.
    """
    path = folder / "modules.json"
    listed = read_json(path)
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


def read_modules(modules: ModuleList, hidden_size: int) -> SentenceModules:
    """What a chain Transformer, Pooling, Dense ..., Normalize says.

    Args:
        modules: From `list_modules`.
        hidden_size: Width of the transformer's hidden states, which the first dense layer takes.

    Raises:
        ModelLoadError: a module is not computed, stands in the wrong place or has a bad file.
    """
    pooling: str | None = None
    dense: list[DenseModule] = []
    width, normalize = hidden_size, False
    for kind, folder in modules:
        if kind == "Pooling":
            pooling = _read_pooling(folder / "config.json") or pooling
        elif kind == "Dense" and not normalize:
            dense.append(_read_dense(folder, width))
            width = dense[-1].out_features
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ModelLoadError(
                f"modules.json: a module {kind!r} at this place is not supported; supported are "
                "Transformer, Pooling, Dense and Normalize, in this order"
            )
    return SentenceModules(pooling, tuple(dense), normalize)


def read_max_seq_length(folder: Path) -> int | None:
    """Longest prompt in tokens that the model was made for, if its files say."""
    data = read_json(folder / "sentence_bert_config.json")
    length = data.get("max_seq_length") if isinstance(data, dict) else None
    return length if type(length) is int and length > 0 else None


def named_activation(path: str, known: dict[str, str], source: str) -> str:
    """An activation by the name of its class (`torch.nn.modules.activation.Tanh`, `Tanh()`).

    Nothing is imported: a name that is not in `known` is refused.

    Raises:
        ModelLoadError: it is none of `known`; `source` is the file that says so.
    """
    name = path.rpartition(".")[2].rstrip("()")
    if name not in known:
        raise ModelLoadError(
            f"{source}: the activation must be one of {', '.join(known)}, got {path!r}"
        )
    return known[name]


def _read_pooling(path: Path) -> str | None:
    data = read_json(path)
    if data is None:
        return None
    data = as_object(data, path)
    named = data.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes += [flag for flag in (*_POOLING_FLAGS, *_UNKNOWN_FLAGS) if data.get(flag) is True]
    chosen = [_POOLING_FLAGS.get(mode) or POOLINGS.get(mode) for mode in map(str, modes)]
    if len(chosen) != 1 or chosen[0] is None:
        known = ", ".join(dict.fromkeys(POOLINGS.values()))
        raise ModelLoadError(
            f"{str(path)!r} must choose exactly one of the pooling modes {known}, "
            f"got {', '.join(map(str, modes)) or 'none'}"
        )
    return chosen[0]


def _read_dense(folder: Path, in_features: int) -> DenseModule:
    path = folder / "config.json"
    data = read_json(path)
    data = data if isinstance(data, dict) else {}
    given, size = data.get("in_features"), data.get("out_features")
    if given != in_features or not isinstance(size, int) or size < 1:
        raise ModelLoadError(
            f"{str(path)!r}: in_features must be {in_features} and out_features a positive "
            f"number, got {given!r} and {size!r}"
        )
    named = str(data.get("activation_function", "torch.nn.modules.linear.Identity"))
    activation = named_activation(named, _DENSE_ACTIVATIONS, str(path))
    return DenseModule(folder, in_features, size, bool(data.get("bias", True)), activation)
