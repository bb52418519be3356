"""OpenAI's surface: Chat Completions, Completions, models, and vLLM's token endpoints."""
