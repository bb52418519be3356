"""Modules that scripts run by vLLM's names: `python -m quire.entrypoints.openai.api_server`."""
