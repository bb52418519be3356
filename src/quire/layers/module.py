"""The tree that a model is: every layer, by its name in its parent.

A layer states its children once, in `children()`. What walks a model goes by that and by no
attribute: parameters for the loader, clocks around layers, the description at load. So does what
changes one: `replace_child` puts another module in a child's place. Knows no family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from quire.layers.parameter import Parameters, prefixed

M = TypeVar("M", bound="Module")
_revision = 0


def revision() -> int:
    """How often a part of some model was changed. Whoever keeps something made of a tree (all
    layers as one call) makes it anew when this has changed."""
    return _revision


class Module:
    """A layer, or several as one."""

    def children(self) -> Mapping[str, Module]:
        """The layers that this one is made of, in the order of their parameters.

        Names are those of the parameters, relative to this module; they may have dots where a
        checkpoint has levels that the model lacks.
        """
        return {}

    def own_parameters(self) -> Parameters:
        """Tensors that the module keeps itself, by name."""
        return {}

    def parameters(self) -> Parameters:
        """All tensors that the module waits for: its own, then those of its children."""
        found = dict(self.own_parameters())
        for name, child in self.children().items():
            found |= prefixed(name, child.parameters())
        return found

    def modules(self, name: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, parents first, by their names from here on."""
        yield name, self
        for part, child in self.children().items():
            yield from child.modules(f"{name}.{part}" if name else part)

    def replace_child(self, name: str, module: Any) -> None:
        """Put `module` where the child `name` is; it is called and asked like that one.

        Raises:
            KeyError: there is no such child.
        """
        note_change()
        old = self.children()[name]
        for place in (vars(self), *(v for v in vars(self).values() if isinstance(v, dict))):
            for key, value in place.items():
                if value is old:
                    place[key] = module
                    return
        raise AssertionError(f"{type(self).__name__} keeps its child {name!r} out of reach")


class MLPBlock(Module):
    """What may stand at the place of a decoder layer's MLP; its parameters are below `mlp`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H] -> [T, H]`, row by row."""
        raise NotImplementedError


class ModuleList(list[M], Module):
    """Modules under their numbers. A list, so that a step iterates at no cost."""

    def __init__(self, modules: Iterable[M] = ()) -> None:
        super().__init__(modules)

    def children(self) -> Mapping[str, Module]:
        """By number."""
        return {str(i): module for i, module in enumerate(self)}

    def replace_child(self, name: str, module: Any) -> None:
        """See `Module.replace_child`."""
        note_change()
        if name not in self.children():
            raise KeyError(name)
        self[int(name)] = module


def note_change() -> None:
    """Something that may have been fused into one call is computed otherwise from now on."""
    global _revision
    _revision += 1
