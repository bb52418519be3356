"""Looking at where the time of a model goes: `LayerwiseProfiler`, and kernels of both phases."""

from quire.profiler.layerwise import LayerTimes, LayerwiseProfiler

__all__ = ["LayerTimes", "LayerwiseProfiler"]
