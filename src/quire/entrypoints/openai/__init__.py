"""The OpenAI-compatible server, as a module to run."""
