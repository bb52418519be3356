"""vLLM's `LLMEngine`: quire's, but with a method where quire has a property."""

from __future__ import annotations

from quire.engine.llm_engine import LLMEngine as Engine


class LLMEngine(Engine):
    """The synchronous engine, for loops written for vLLM."""

    def has_unfinished_requests(self) -> bool:  # type: ignore[override]
        """Whether `step()` has anything to do."""
        return super().has_unfinished_requests
