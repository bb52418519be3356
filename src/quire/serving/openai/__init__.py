"""OpenAI's API: Chat Completions, Completions, models, and vLLM's token endpoints."""
