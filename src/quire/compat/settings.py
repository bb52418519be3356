"""vLLM's configuration objects, as plain mappings and enums, which is what quire's options take.

`CompilationConfig(mode=0)` is `{"mode": 0}`. The table of options (`quire.config.neutral`) checks
it when it is given to an engine.
"""

from __future__ import annotations

import enum
from typing import Any


def section(**options: Any) -> dict[str, Any]:
    """A configuration object: the values given, by name."""
    return {name: value for name, value in options.items() if value is not None}


class VllmConfig:
    """For annotations of logits processors; what they get is made in `quire.worker.processors`."""


class CompilationMode(enum.IntEnum):
    """What is compiled. quire supports only `NONE`."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """What is captured as a CUDA graph. quire supports only `NONE`."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"


class UsageContext(enum.Enum):
    """Where an engine is used. quire does not report usage to anybody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
