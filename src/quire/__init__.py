"""quire: an LLM inference and serving engine.

Importing this package loads no torch and takes milliseconds: names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.config import EngineConfig as EngineConfig
    from quire.engine.async_llm import AsyncLLM as AsyncLLM
    from quire.engine.frontend.beam_params import BeamSearchParams as BeamSearchParams
    from quire.engine.llm import LLM as LLM
    from quire.errors import QuireError as QuireError
    from quire.outputs import BeamSearchOutput as BeamSearchOutput
    from quire.outputs import ClassificationOutput as ClassificationOutput
    from quire.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import EmbeddingOutput as EmbeddingOutput
    from quire.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import PoolingOutput as PoolingOutput
    from quire.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.outputs import RequestOutput as RequestOutput
    from quire.outputs import ScoringOutput as ScoringOutput
    from quire.outputs import ScoringRequestOutput as ScoringRequestOutput
    from quire.params import PoolingParams as PoolingParams
    from quire.params import RequestOutputKind as RequestOutputKind
    from quire.params import SamplingParams as SamplingParams
    from quire.params import StructuredOutputsParams as StructuredOutputsParams

_EXPORTS = {
    "AsyncLLM": "quire.engine.async_llm",
    "BeamSearchOutput": "quire.outputs",
    "BeamSearchParams": "quire.engine.frontend.beam_params",
    "ClassificationOutput": "quire.outputs",
    "ClassificationRequestOutput": "quire.outputs",
    "EmbeddingOutput": "quire.outputs",
    "EmbeddingRequestOutput": "quire.outputs",
    "PoolingOutput": "quire.outputs",
    "PoolingRequestOutput": "quire.outputs",
    "ScoringOutput": "quire.outputs",
    "ScoringRequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "EngineConfig": "quire.config",
    "LLM": "quire.engine.llm",
    "Logprob": "quire.outputs",
    "PoolingParams": "quire.params",
    "QuireError": "quire.errors",
    "RequestOutput": "quire.outputs",
    "RequestOutputKind": "quire.params",
    "SamplingParams": "quire.params",
    "StructuredOutputsParams": "quire.params",
}

__all__ = [*sorted(_EXPORTS), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
