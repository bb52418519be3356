"""Time per layer, split into attention and MLP, while a model works.

    profiler = LayerwiseProfiler(llm)
    profiler.start()
    llm.generate(...)
    profiler.stop()
    profiler.report()          # Layer 0 | attention 0.42ms | mlp 0.31ms | total 0.80ms ...

Between `start()` and `stop()` the layers' parts are replaced by ones that look at the clock, and
layers are called one by one; before and after nothing is there. Knows the shape of the shared
decoder, no family.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.errors import InvalidRequest

_PARTS = (("_self_attn", "attention"), ("_mlp", "mlp"))


@dataclass(slots=True)
class LayerTimes:
    """Seconds of one layer over all calls."""

    layer: int
    attention: float = 0.0
    mlp: float = 0.0
    total: float = 0.0
    """The whole layer, norms and sums included."""
    calls: int = 0


class LayerwiseProfiler:
    """Measures each layer of a decoder.

    Args:
        model: An `LLM`, or a model as its worker holds it.

    Raises:
        InvalidRequest: the model has no decoder layers of the shared kind.
    """

    def __init__(self, model: Any) -> None:
        self._model = find_model(model)
        decoder = getattr(self._model, "_model", None)
        if not isinstance(getattr(decoder, "_layers", None), list):
            raise InvalidRequest(
                f"{type(self._model).__name__} has no decoder layers that could be measured"
            )
        self._decoder: Any = decoder
        self._layers: list[Any] | None = None
        self.times: list[LayerTimes] = []
        """Filled while it runs."""

    def start(self) -> None:
        """Begin to measure; earlier numbers are forgotten.

        Raises:
            InvalidRequest: it runs already.
        """
        if self._layers is not None:
            raise InvalidRequest("the profiler is already running; stop it first")
        self._layers = self._decoder._layers
        self._decoder.layer_by_layer = True
        self.times = [LayerTimes(i) for i in range(len(self._layers))]
        self._decoder._layers = [
            _Timed(layer, times, self._model.device)
            for layer, times in zip(self._layers, self.times, strict=True)
        ]

    def stop(self) -> None:
        """End; the model is as it was.

        Raises:
            InvalidRequest: it does not run.
        """
        if self._layers is None:
            raise InvalidRequest("the profiler is not running; start it first")
        for timed in self._decoder._layers:
            timed.restore()
        self._decoder._layers, self._layers = self._layers, None
        self._decoder.layer_by_layer = False

    def __enter__(self) -> LayerwiseProfiler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def report(self) -> str:
        """Print a line per layer and the total of all, and return the text; milliseconds, mean
        over the calls for layers."""
        lines = [_line(t) for t in self.times]
        total = sum(t.total / t.calls for t in self.times if t.calls)
        text = "\n".join([*lines, f"Total: {1000 * total:.2f}ms"])
        print(text)
        return text

    def export_csv(self, path: str | Path) -> None:
        """Write a row per layer: layer, calls, and mean milliseconds of attention, mlp, total."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["layer", "calls", "attention_ms", "mlp_ms", "total_ms"])
            for t in self.times:
                means = [f"{value:.6f}" for value in _means(t)]
                writer.writerow([t.layer, t.calls, *means])


def _means(t: LayerTimes) -> tuple[float, float, float]:
    per = 1000 / max(1, t.calls)
    return t.attention * per, t.mlp * per, t.total * per


def _line(t: LayerTimes) -> str:
    attention, mlp, total = _means(t)
    return f"Layer {t.layer} | attention {attention:.2f}ms | mlp {mlp:.2f}ms | total {total:.2f}ms"


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
        self._times.calls += 1
        return self._measured(self._layer, "total")(*args)

    def _measured(self, part: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = part(*args)
            self._wait()
            spent = time.perf_counter() - start
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


def find_model(model: Any) -> Any:
    """The model inside an `LLM`, or the model itself."""
    engine = getattr(model, "llm_engine", None)
    return model if engine is None else engine.core.executor.model
