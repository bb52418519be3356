"""Clocks around the layers of a decoder, and around attention and MLP within each.

While they are on, modules that look at the clock stand in the places of the layers and their parts,
and layers run one by one, not fused into one call; before and after, nothing is there. Knows the
shape of the shared decoder, no family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from quire.errors import InvalidRequest
from quire.layers.module import Module
from quire.layers.parameter import Parameters
from quire.models.decoder import DecoderModel

_PARTS: Final = (("self_attn", "attention"), ("mlp", "mlp"))
"""Children of a layer, and what their time is called."""


@dataclass(slots=True)
class LayerTimes:
    """Seconds of one layer over all calls."""

    layer: int
    attention: float = 0.0
    mlp: float = 0.0
    total: float = 0.0
    """The whole layer, norms and sums included."""
    calls: int = 0
    started: float = 0.0
    """When its first call began, on the monotonic clock."""


class LayerTimer:
    """Measures each layer of a decoder.

    Args:
        model: As its worker holds it.

    Raises:
        InvalidRequest: the model has no decoder layers of the shared kind.
    """

    def __init__(self, model: Any) -> None:
        self._decoder = _decoder_of(model)
        self._device: torch.device = model.device
        self._timed: list[_Timed] = []
        self.times: list[LayerTimes] = []
        """Filled while it runs."""

    @property
    def is_on(self) -> bool:
        """Whether the clocks are there."""
        return bool(self._timed)

    def start(self) -> None:
        """Put the clocks on; earlier numbers are forgotten."""
        wait = torch.cuda.synchronize if self._device.type == "cuda" else _nothing
        layers = self._decoder.layers
        self.times = [LayerTimes(i) for i in range(len(layers))]
        for times, name in zip(self.times, layers.children(), strict=True):
            self._put_on(layers, name, "total", times, wait)
            for part, what in _PARTS:
                self._put_on(layers.children()[name], part, what, times, wait)

    def _put_on(
        self, parent: Module, name: str, what: str, times: LayerTimes, wait: Callable[[], None]
    ) -> None:
        timed = _Timed(parent, name, what, times, wait)
        parent.replace_child(name, timed)
        self._timed.append(timed)

    def reset(self) -> None:
        """Forget the numbers."""
        for times in self.times:
            times.attention = times.mlp = times.total = times.started = 0.0
            times.calls = 0

    def stop(self) -> None:
        """Take the clocks off; the model is as it was."""
        for timed in self._timed:
            timed.parent.replace_child(timed.name, timed.module)
        self._timed = []


def _decoder_of(model: Any) -> DecoderModel:
    if isinstance(model, Module):
        for _, module in model.modules():
            if isinstance(module, DecoderModel):
                return module
    raise InvalidRequest(f"{type(model).__name__} has no decoder layers that could be measured")


class _Timed(Module):
    """A module with a clock around it."""

    def __init__(
        self, parent: Module, name: str, what: str, times: LayerTimes, wait: Callable[[], None]
    ) -> None:
        self.parent, self.name = parent, name
        self.module: Any = parent.children()[name]
        self._what, self._times, self._wait = what, times, wait

    def __call__(self, *args: Any) -> Any:
        times = self._times
        start = time.monotonic()
        if self._what == "total":
            times.started = times.started if times.calls else start
            times.calls += 1
        result = self.module(*args)
        self._wait()
        setattr(times, self._what, getattr(times, self._what) + time.monotonic() - start)
        return result

    def children(self) -> Mapping[str, Module]:
        """Those of the module that is measured."""
        return self.module.children()

    def own_parameters(self) -> Parameters:
        """Those of the module that is measured."""
        return self.module.own_parameters()

    def replace_child(self, name: str, module: Any) -> None:
        """In the module that is measured."""
        self.module.replace_child(name, module)


def _nothing() -> None:
    """The CPU has done its work when a call returns."""
