"""Entries of a checkpoint's `quantization_config`, checked, and names of layers against its lists.

Knows JSON, no format.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from quire.errors import ModelLoadError

_REGEX: Final = "re:"


def whole(config: Mapping[str, Any], names: Sequence[str], default: int | None = None) -> int:
    """A whole number under the first of several names.

    Raises:
        ModelLoadError: it is missing or none.
    """
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int:
                raise entry_error(name, "a whole number", value)
            return value
    if default is None:
        raise ModelLoadError(f"the quantization_config of the checkpoint lacks {names[0]!r}")
    return default


def switch(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false.

    Raises:
        ModelLoadError: it is neither.
    """
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise entry_error(name, "true or false", value)
    return value


def names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The texts of the first list that is there and not empty.

    Raises:
        ModelLoadError: it is no list of texts.
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise entry_error(key, "a list of names", value)
        if value:
            return tuple(value)
    return ()


def entry_error(name: str, must: str, value: object) -> ModelLoadError:
    """An error about an entry."""
    return ModelLoadError(
        f"the quantization_config of the checkpoint: {name!r} must be {must}, got {value!r:.80}"
    )


def group_size(config: Mapping[str, Any], keys: Sequence[str], columns: int) -> int:
    """Columns of a group in a layer of `columns` (K); -1 stands for all. It need not divide K.

    Raises:
        ModelLoadError: it is no size of a group.
    """
    size = whole(config, keys, -1)
    if size == -1:
        return columns
    if size < 1:
        raise entry_error(keys[0], "a positive whole number or -1", size)
    return size


def matches(name: str, pattern: str) -> bool:
    """compressed-tensors' rule: the exact name, or `re:` and a regular expression that the name
    begins with.

    Raises:
        ModelLoadError: it is no regular expression.
    """
    if pattern.startswith(_REGEX):
        return begins_with(name, pattern.removeprefix(_REGEX))
    return name == pattern


def begins_with(name: str, expression: str) -> bool:
    """Whether a regular expression fits from the beginning of a name.

    Raises:
        ModelLoadError: it is no regular expression.
    """
    try:
        return re.match(expression, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise entry_error("a pattern", f"a regular expression ({error})", expression) from None


_TEXT_OF_MORE: Final = ("language_model.model.", "model.language_model.")


def spellings(name: str) -> tuple[str, ...]:
    """A layer's name, and what it is called by other versions of transformers: modules of a text
    model within another were renamed, tensors in files keep their old names."""
    for begin, other in (_TEXT_OF_MORE, _TEXT_OF_MORE[::-1]):
        if name.startswith(begin):
            return name, other + name.removeprefix(begin)
    if name.startswith("language_model."):
        return name, name.removeprefix("language_model.")
    return (name,)


def is_within(name: str, listed: Iterable[str]) -> bool:
    """Whether a layer, or a part of the model that it belongs to, is listed: by its whole name, by
    the name's end, or with `*`."""
    for entry in listed:
        if name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}"):
            return True
        if f".{entry}." in name or ("*" in entry and fnmatch.fnmatchcase(name, entry)):
            return True
    return False


def contains_any(name: str, listed: Iterable[str]) -> bool:
    """Whether one of the texts occurs in a name: the rule of transformers and AutoAWQ."""
    return any(entry in name for entry in listed)
