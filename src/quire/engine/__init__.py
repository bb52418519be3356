"""The engine loop and its public faces: `LLM` (inline) and `AsyncLLM` (engine-core process)."""
