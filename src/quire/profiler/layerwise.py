"""Time per layer, split into attention and MLP, while a model works.

    profiler = LayerwiseProfiler(llm)
    profiler.start()
    llm.generate(...)
    profiler.stop()
    profiler.report()          # Layer 0 | attention 0.42ms | mlp 0.31ms | total 0.80ms ...

The clocks are those of `quire.models.layer_times`. Knows no family.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest
from quire.models.layer_times import LayerTimer, LayerTimes


class LayerwiseProfiler:
    """Measures each layer of a decoder.

    Args:
        model: An `LLM`, or a model as its worker holds it.

    Raises:
        InvalidRequest: the model has no decoder layers of the shared kind.
    """

    def __init__(self, model: Any) -> None:
        self._timer = LayerTimer(find_model(model))

    @property
    def times(self) -> list[LayerTimes]:
        """Filled while it runs."""
        return self._timer.times

    def start(self) -> None:
        """Begin to measure; earlier numbers are forgotten.

        Raises:
            InvalidRequest: it runs already.
        """
        if self._timer.is_on:
            raise InvalidRequest("the profiler is already running; stop it first")
        self._timer.start()

    def stop(self) -> None:
        """End; the model is as it was.

        Raises:
            InvalidRequest: it does not run.
        """
        if not self._timer.is_on:
            raise InvalidRequest("the profiler is not running; start it first")
        self._timer.stop()

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


def find_model(model: Any) -> Any:
    """The model inside an `LLM`, or the model itself."""
    engine = getattr(model, "llm_engine", None)
    return model if engine is None else engine.core.executor.model
