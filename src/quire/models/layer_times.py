"""Clocks around the layers of a decoder, and around attention and MLP within each.

While they are on, the layers' parts are replaced by ones that look at the clock, and layers run one
by one, not fused into one call; before and after, nothing is there. Knows the shape of the shared
decoder, no family.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from quire.errors import InvalidRequest

_PARTS: Final = (("_self_attn", "attention"), ("_mlp", "mlp"))


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
        owner = getattr(model, "_decoder", model)
        decoder = getattr(owner, "_model", None)
        if not isinstance(getattr(decoder, "_layers", None), list):
            raise InvalidRequest(
                f"{type(model).__name__} has no decoder layers that could be measured"
            )
        self._decoder: Any = decoder
        self._device: torch.device = model.device
        self._layers: list[Any] | None = None
        self.times: list[LayerTimes] = []
        """Filled while it runs."""

    @property
    def is_on(self) -> bool:
        """Whether the clocks are there."""
        return self._layers is not None

    def start(self) -> None:
        """Put the clocks on; earlier numbers are forgotten."""
        decoder = self._decoder
        self._layers = decoder._layers
        self.times = [LayerTimes(i) for i in range(len(decoder._layers))]
        decoder._layers = [
            _Timed(layer, times, self._device)
            for layer, times in zip(decoder._layers, self.times, strict=True)
        ]
        decoder.layer_by_layer = True

    def reset(self) -> None:
        """Forget the numbers."""
        for times in self.times:
            times.attention = times.mlp = times.total = times.started = 0.0
            times.calls = 0

    def stop(self) -> None:
        """Take the clocks off; the model is as it was."""
        for timed in self._decoder._layers:
            timed.restore()
        self._decoder._layers, self._layers = self._layers, None
        self._decoder.layer_by_layer = False


class _Timed:
    """A layer with a clock around it and around its parts."""

    def __init__(self, layer: Any, times: LayerTimes, device: torch.device) -> None:
        self._layer = layer
        self._times = times
        self._wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
        self._parts = {name: getattr(layer, name) for name, _ in _PARTS}
        for name, what in _PARTS:
            setattr(layer, name, self._measured(self._parts[name], what))

    def __call__(self, *args: Any) -> Any:
        if not self._times.calls:
            self._times.started = time.monotonic()
        self._times.calls += 1
        return self._measured(self._layer, "total")(*args)

    def _measured(self, part: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.monotonic()
            result = part(*args)
            self._wait()
            spent = time.monotonic() - start
            setattr(self._times, what, getattr(self._times, what) + spent)
            return result

        return call

    def restore(self) -> None:
        """Take the clocks off."""
        for name, part in self._parts.items():
            setattr(self._layer, name, part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _nothing() -> None:
    """The CPU has done its work when a call returns."""
