"""vLLM's `LLMEngine`: quire's, where one property is a call."""

from __future__ import annotations

from quire.engine.llm_engine import LLMEngine as Engine


class LLMEngine(Engine):
    """The synchronous engine, as loops written for vLLM drive it."""

    def has_unfinished_requests(self) -> bool:  # type: ignore[override]
        """Whether `step()` has anything to do."""
        return super().has_unfinished_requests
