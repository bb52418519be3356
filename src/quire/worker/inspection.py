"""A loaded model as text, for `QUIRE_LOG_MODEL_INSPECTION`: its layers, their sizes, their types.

Reads what objects hold and knows no family; layers that look the same are shown once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor

from quire.models.base import CausalLM

_LAYERS: Final = ("quire.layers.", "quire.models.", "quire.attention.")


def describe(model: CausalLM | Any) -> str:
    """The tree of a model: one line per layer, children indented by two blanks."""
    dtype = str(model.dtype).removeprefix("torch.")
    head = f"Model: {model.num_parameters:,} parameters in {dtype} on {model.device}"
    return "\n".join([head, *_lines("", model, frozenset())])


def _lines(name: str, layer: Any, above: frozenset[int]) -> Iterator[str]:
    label = f"({name.lstrip('_')}): " if name else ""
    yield f"{label}{type(layer).__name__}{_sizes(layer)}"
    inside = above | {id(layer)}
    children = [(key, child) for key, child in _children(layer) if id(child) not in inside]
    for first, last, count, lines in _folded(children, inside):
        head = lines[0] if count == 1 else f"({first}-{last}): {count} x {_unnamed(lines[0])}"
        yield "  " + head
        yield from ("  " + line for line in lines[1:])


def _folded(
    children: list[tuple[str, Any]], above: frozenset[int]
) -> Iterator[tuple[str, str, int, list[str]]]:
    """Neighbours that look the same, together: first name, last name, how many, lines of one."""
    group: tuple[str, str, int, list[str]] | None = None
    for name, child in children:
        lines = list(_lines(name, child, above))
        same = group is not None and [_unnamed(group[3][0]), *group[3][1:]] == [
            _unnamed(lines[0]),
            *lines[1:],
        ]
        if group is not None and same and name.isdigit():
            group = (group[0], name, group[2] + 1, group[3])
            continue
        if group is not None:
            yield group
        group = (name, name, 1, lines)
    if group is not None:
        yield group


def _unnamed(line: str) -> str:
    return line.partition("): ")[2]


def _children(layer: Any) -> Iterator[tuple[str, Any]]:
    """Layers among the attributes; those of a list under their numbers."""
    for name, value in _attributes(layer):
        if isinstance(value, (list, tuple)):
            yield from ((str(i), item) for i, item in enumerate(value) if _is_layer(item))
        elif _is_layer(value):
            yield name, value


def _attributes(layer: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(layer, "__dict__", {}).items()
    for name in getattr(type(layer), "__slots__", ()):
        if hasattr(layer, name):
            yield name, getattr(layer, name)


def _is_layer(value: Any) -> bool:
    """A layer is made by our tensor code and holds tensors or layers."""
    return type(value).__module__.startswith(_LAYERS) and (
        hasattr(value, "parameters") or callable(value)
    )


def _sizes(layer: Any) -> str:
    """Sizes of a layer that holds tensors itself."""
    shape, own = getattr(layer, "_shape", None), []
    if isinstance(shape, tuple):
        own.append("x".join(map(str, shape)))
    own += [
        f"{name}={'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
        for name, value in _attributes(layer)
        if isinstance(value, Tensor)
    ]
    return f"({', '.join(own)})" if own else ""
